"""Real signals, to processes of their own: they go on with the same stream, or end with all they started."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.needs import needs

GOES_ON = """
    import sys, time
    from itertools import islice
    from adaecho import EchoLoader
    from tests.echo.sources import Dataset, add_noise

    def slow(example):
        time.sleep(0.01)
        return example

    def noise(example, rng):
        time.sleep(0.01)
        return add_noise(example, rng)

    def new():
        return iter(EchoLoader(
            Dataset(50), 4, echo="example_before_augmentation", factor=2, shuffle_buffer=10, decode=slow,
            augment=noise,
        ))

    undisturbed = list(islice(new(), 40))
    iterator, seen, interrupts = new(), [], 0
    print("started", flush=True)
    while len(seen) < 40 or interrupts < 6:
        try:
            # What the loader gave is kept in the same call: between two of Python's a signal could fall.
            seen.extend(islice(iterator, 1))
        except KeyboardInterrupt:
            interrupts += 1
            print("interrupted", flush=True)  # only then comes the next signal
    for batch, expected in zip(seen[:40], undisturbed, strict=True):
        assert batch["x"].tolist() == expected["x"].tolist()
"""

# By a timer, at any moment: in a wait, while threads are ended or started, in a repair of the last interrupt.
GOES_ON_WITH_THREADS = """
    import random, signal, sys
    from itertools import islice
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from adaecho import EchoLoader

    fired = []

    def interrupt(*_):
        fired.append(True)  # the collector may swallow what is raised, where a weak reference has a callback
        raise KeyboardInterrupt

    def interrupted(seen, iterator, longest_s):
        draw = random.Random(0)
        for _ in range(60):
            fired.clear()
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-4, longest_s))
                while not fired:
                    seen.extend(islice(iterator, 1))
            except KeyboardInterrupt:
                pass

    signal.signal(signal.SIGALRM, interrupt)
    print("started", flush=True)
    expected = []
    for longest_s in [None] + [0.0015, 0.005] * 3:
        loader = EchoLoader(
            DataLoader(TensorDataset(torch.arange(400)), 4, shuffle=True), None, epochs=1, echo="batch",
            factor=2, batch_shuffle_buffer=3, num_workers=1,
        )
        iterator, seen = iter(loader), []
        if longest_s:
            interrupted(seen, iterator, longest_s)
            signal.setitimer(signal.ITIMER_REAL, 0)
        seen.extend(iterator)
        expected = expected or [rows.tolist() for rows, in seen]
        assert len(expected) == 200
        assert [rows.tolist() for rows, in seen] == expected
"""

ENDS = """
    import time
    from adaecho import EchoLoader
    from tests.echo.global_augments import draw
    from tests.echo.sources import Dataset

    if __name__ == "__main__":
        for number, _ in enumerate(EchoLoader(Dataset(50), 4, num_workers=2, augment=draw)):
            if number == 4:
                print("started", flush=True)
            time.sleep(0.01)
"""


def start(folder: Path, code: str) -> "subprocess.Popen[str]":
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def test_a_process_that_is_interrupted_again_and_again_sees_the_same_stream(tmp_path: Path) -> None:
    process = start(tmp_path, GOES_ON)
    assert process.stdout is not None
    for _ in range(6):
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


def test_threads_that_are_interrupted_at_any_moment_give_the_same_stream(tmp_path: Path) -> None:
    process = start(tmp_path, GOES_ON_WITH_THREADS)
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()  # which hangs if a lock is broken
    assert process.returncode == 0, errors


def in_session(leader: int) -> list[int]:
    """Processes that a session still has."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:  # gone meanwhile
            continue
        if int(session) == leader and state != "Z":
            found.append(int(folder.name))
    return found


@needs(
    "/proc", present=Path("/proc/self/stat").exists(), remedy="nothing else tells whose child a process was"
)
@pytest.mark.parametrize("to_all", [True, False], ids=["as a terminal does", "to one process"])
def test_an_interrupted_process_ends_with_its_workers(tmp_path: Path, to_all: bool) -> None:
    process = start(tmp_path, ENDS)
    deadline = time.monotonic() + 240
    while len(in_session(process.pid)) < 3:  # itself, and a process for each worker's augment
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if to_all:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGINT
    assert errors.splitlines()[-1].startswith("KeyboardInterrupt")
    deadline = time.monotonic() + 60
    while in_session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert in_session(process.pid) == []
