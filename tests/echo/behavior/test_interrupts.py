"""Ctrl-C at any point, and close, pause and state requests from other threads."""

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import adaecho.echo
from adaecho import EchoLoader
from adaecho.echo import variants as echoes
from adaecho.echo.memory.pytree import collate
from tests.echo.sources import (  # fmt: skip
    IDS,
    SOURCES,
    VARIANTS,
    Dataset,
    Halting,
    add_noise,
    example,
    labels,
    soon,
)


class Interrupting:
    """Calls a function, but raises KeyboardInterrupt at some calls."""

    def __init__(self, call: Callable[..., Any], *at: int) -> None:
        self.call, self.at, self.calls = call, at, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls in self.at:
            raise KeyboardInterrupt
        return self.call(*arguments)


def interrupted_batches(loader: EchoLoader, batches: int) -> tuple[list[Any], int]:
    """Take batches and continue after each interrupt. Returns the batches and the number of interrupts."""
    iterator, seen, interrupts = iter(loader), [], 0
    while len(seen) < batches:
        try:
            batch = next(iterator)
            seen.append((batch["x"].tolist(), batch["label"].tolist(), loader.fresh_examples))
        except KeyboardInterrupt:
            interrupts += 1
    return seen, interrupts


@pytest.mark.parametrize("where", ["iterated", "read", "decode", "augment", "collate"])
@pytest.mark.parametrize("echo", echoes.VARIANTS)
def test_an_interrupt_in_user_code_loses_no_example(where: str, echo: str) -> None:
    class Source(Dataset):
        def __getitem__(self, row: int) -> Any:
            return calls["read"](super().__getitem__(row))

    def source() -> Any:  # an interrupt ends the generator, so the loader opens another one
        return (calls["read"](example(row)) for row in range(30))

    at = (2, 3, 5) if where == "collate" else (3, 9, 10, 21)
    seen = []
    for interrupts in ((), at):
        calls: dict[str, Any] = {"read": dict, "decode": dict, "augment": add_noise, "collate": collate}
        name = "read" if where == "iterated" else where
        calls[name] = Interrupting(calls[name], *interrupts)
        loader = EchoLoader(
            source if where == "iterated" else Source(30), 4, echo=echo, factor=1 if echo == "none" else 2,
            shuffle_buffer=5, augment=lambda one, rng, augment=calls["augment"]: augment(one, rng),
            decode=calls["decode"], collate=calls["collate"],
        )  # fmt: skip
        seen.append(interrupted_batches(loader, 12))
    (expected, none), (batches, interrupted) = seen
    assert batches == expected
    assert (none, interrupted) == (0, len(at))


ECHO = str(Path(adaecho.echo.__file__).parent)
EVENTS = ("call", "return", "c_call", "c_return")

Site = tuple[str, str, int, str]  # file, function, line of a C call or 0, event


class Profiler:
    """Counts calls and returns of the loader's functions and of the C functions that they call.

    It raises KeyboardInterrupt at some of them. CPython handles Ctrl-C at the same points.
    """

    def __init__(self, *at: int) -> None:
        self.sites: list[Site] = []
        self.at, self.due = set(at), False

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "c_call" and argument.__name__ == "__exit__":
            return  # CPython handles no signal between the end of a with block and the release of a lock
        if not code.co_filename.startswith(ECHO) or event not in EVENTS:
            return
        # The garbage collector may end a generator and swallows exceptions. An interrupt after the loader's
        # own methods have returned belongs to the consumer.
        if code.co_name == "<genexpr>" or (event == "return" and code.co_name in ("__iter__", "__next__")):
            return
        line = frame.f_lineno if event.startswith("c_") else 0
        self.sites.append((code.co_filename, code.co_name, line, event))
        self.due |= len(self.sites) in self.at
        if self.due and not is_collected(frame):
            self.due = False
            raise KeyboardInterrupt

    def during(self, call: Callable[[], Any]) -> Any:
        """Repeat a call after each interrupt and return its result."""
        while True:
            sys.setprofile(self)
            try:
                return call()
            except KeyboardInterrupt:
                continue
            finally:
                sys.setprofile(None)


def is_collected(frame: Any) -> bool:
    """Whether the garbage collector called this frame. It swallows exceptions."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def batches_and_states(make: Callable[[], EchoLoader], profiler: Profiler) -> list[Any]:
    seen: list[Any] = []
    with make() as loader:
        for _ in range(2):
            iterator = profiler.during(loader.__iter__)
            while (batch := profiler.during(lambda i=iterator: next(i, None))) is not None:
                seen.append((batch["x"].tolist(), batch["label"].tolist(), loader.fresh_examples))
                if len(seen) % 3 == 0:
                    state = profiler.during(loader.state_dict)
                    # These differ after the loader has restored its source
                    del state["timers"], state["reread_examples"], state["progress"]
                    seen.append(str(state))
    return seen


def maker(index: int, num_workers: int) -> tuple[str, Callable[[], EchoLoader]]:
    kinds = {name: SOURCES[name] for name in ("map", "arrays", "stream", "ragged")}
    kind = list(kinds)[(index + 2 * num_workers) % len(kinds)]
    make, augment, _, more = kinds[kind]
    common = {"shuffle_buffer": 4, "epochs": 1, "num_workers": num_workers, **VARIANTS[index], **more}
    return f"{IDS[index]}-{kind}-{num_workers}", lambda: EchoLoader(make(9), 3, augment=augment, **common)


MAKERS = dict(maker(index, num_workers) for index in range(len(VARIANTS)) for num_workers in (0, 1))
_tried: set[Site] = set()  # each call and return is tried with one variant


@pytest.mark.parametrize("name", MAKERS)
def test_an_interrupt_in_the_loader_changes_no_batch(name: str) -> None:
    rng = random.Random(name)
    uninterrupted = Profiler()
    expected = batches_and_states(MAKERS[name], uninterrupted)
    numbers: dict[Site, list[int]] = {}
    for number, site in enumerate(uninterrupted.sites, start=1):
        numbers.setdefault(site, []).append(number)
    functions = [site for site in numbers if not site[3].startswith("c_") and site not in _tried]
    inner = sorted(site for site in numbers if site[3].startswith("c_"))
    for site in (*functions, *rng.sample(inner, min(5, len(inner)))):
        _tried.add(site)
        first = rng.choice(numbers[site])
        # Sometimes a second one, while the loader recovers from the first
        second = first + rng.randint(1, 150) if rng.random() < 0.3 else first
        assert batches_and_states(MAKERS[name], Profiler(first, second)) == expected, (site, first, second)


def test_requesting_a_batch_ends_the_pause_of_the_same_thread() -> None:
    with EchoLoader(Dataset(1000), 4, num_workers=1, prefetch=1) as loader:
        iterator, others = iter(loader), []
        next(iterator)
        with loader.paused(), loader.paused():
            # Another thread waits for the end of the pause
            thread = threading.Thread(target=lambda: others.extend(islice(iterator, 8)), daemon=True)
            thread.start()
        thread.join(120)
        assert len(others) == 8
        with loader.paused(), loader.paused():
            assert len(list(islice(iterator, 8))) == 8


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_requested_during_a_batch_precedes_the_batch(num_workers: int) -> None:
    source = Halting(16, 8)
    common: dict[str, Any] = {"order": "sequential", "epochs": 1, "num_workers": num_workers}
    with EchoLoader(source, 4, **common) as loader, EchoLoader(source, 4, **common) as restored:
        iterator = iter(loader)
        labels(iterator, 2)
        thread = threading.Thread(target=lambda: next(iterator), daemon=True)
        thread.start()
        source.reading.wait(200)
        assert soon(lambda: loader._taking)
        state = loader.state_dict()
        assert state["fresh_examples"] == 8
        with pytest.raises(RuntimeError, match="another thread is requesting a batch"):
            next(iterator)
        source.go.set()
        thread.join(200)
        assert loader.state_dict()["fresh_examples"] == 12
        assert labels(iterator) == [[12, 13, 14, 15]]
        restored.load_state_dict(state)
        assert labels(restored) == [[8, 9, 10, 11], [12, 13, 14, 15]]


# A timer interrupts waits, the start and the end of threads, and the recovery from the last interrupt.
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
    fired.append(True)  # the garbage collector may swallow the exception in the callback of a weak reference
    raise KeyboardInterrupt

def interrupted(seen, iterator, least, times, *between_s):
    draw = random.Random(0)
    while times > 0 or len(seen) < least:
        times -= 1
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
    (inline, [(20, 1e-4, 0.02)]),
    (with_threads, [(30, 1e-4, 0.0015), (30, 1e-4, 0.005)]),
    (with_processes, [(20, 1e-3, 0.1)]),
):
    expected = [plain(batch) for batch in make()]
    assert len(expected) >= 200
    for given in rounds:
        with make() as loader:
            iterator, seen = iter(loader), []
            interrupted(seen, iterator, 0 if make is with_threads else 21, *given)
            seen.extend(iterator)
        assert [plain(batch) for batch in seen] == expected
        assert not multiprocessing.active_children()
"""


def test_interrupts_at_random_times_change_no_batch() -> None:
    command = [sys.executable, "-c", AT_ANY_MOMENT]
    # It hangs if a lock is broken.
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
