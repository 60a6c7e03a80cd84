"""Signals at any moment, in a process of its own: it goes on with the same stream."""

import subprocess
import sys

# By a timer, at any moment: in a wait, while threads are ended or started, in a repair of the last interrupt.
AT_ANY_MOMENT = """
import multiprocessing, random, signal, time
from itertools import islice
import torch
from torch.utils.data import DataLoader, TensorDataset
from adaecho import EchoLoader
from tests.echo.others import plain
from tests.echo.sources import Dataset, add_noise

fired = []

def interrupt(*_):
    fired.append(True)  # the collector may swallow what is raised, where a weak reference has a callback
    raise KeyboardInterrupt

def interrupted(seen, iterator, times, *between_s):
    draw = random.Random(0)
    for _ in range(times):
        fired.clear()
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(*between_s))
            while not fired:
                seen.extend(islice(iterator, 1))
        except KeyboardInterrupt:
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)

def slow(example):
    time.sleep(0.001)
    return example

echoed = {"epochs": 1, "echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 10}

def inline():
    return EchoLoader(Dataset(400), 4, decode=slow, augment=add_noise, **echoed)

def with_threads():
    return EchoLoader(
        DataLoader(TensorDataset(torch.arange(400)), 4, shuffle=True), None, epochs=1, echo="batch",
        factor=2, batch_shuffle_buffer=3, num_workers=1,
    )

def with_processes():
    return EchoLoader(Dataset(3000), 4, augment=add_noise, num_workers=2, processes=True, **echoed)

signal.signal(signal.SIGALRM, interrupt)
for make, rounds in (
    (inline, [(40, 1e-4, 0.02)]),
    (with_threads, [(60, 1e-4, 0.0015), (60, 1e-4, 0.005)] * 3),
    (with_processes, [(40, 1e-3, 0.1)]),
):
    expected = [plain(batch) for batch in make()]
    assert len(expected) >= 200
    for given in rounds:
        with make() as loader:
            iterator, seen = iter(loader), []
            interrupted(seen, iterator, *given)
            assert make is with_threads or len(seen) > 20
            seen.extend(iterator)
        assert [plain(batch) for batch in seen] == expected
        assert not multiprocessing.active_children()
"""


def test_a_loader_that_is_interrupted_at_any_moment_gives_the_same_stream() -> None:
    process = subprocess.Popen([sys.executable, "-c", AT_ANY_MOMENT], stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()  # which hangs if a lock is broken
    assert process.returncode == 0, errors
