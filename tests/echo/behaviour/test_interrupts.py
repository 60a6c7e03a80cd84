"""Ctrl-C anywhere, and stopping, closing or pausing in another thread: nothing is lost, nothing is left."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import adaecho.echo
from adaecho import EchoLoader
from adaecho.echo import variants as echoes
from adaecho.echo.memory.pytree import collate
from tests.echo.read.test_marks import Seekable
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
    """Calls what it wraps, and at some of the calls raises KeyboardInterrupt instead."""

    def __init__(self, call: Callable[..., Any], *at: int) -> None:
        self.call, self.at, self.calls = call, at, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls in self.at:
            raise KeyboardInterrupt
        return self.call(*arguments)


def taken(loader: EchoLoader, batches: int) -> tuple[list[Any], int]:
    """Batches, whatever interrupts them; and how many interrupts there were."""
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
def test_an_interrupt_loses_nothing(where: str, echo: str) -> None:
    class Source(Dataset):
        def __getitem__(self, row: int) -> Any:
            return calls["read"](super().__getitem__(row))

    def source() -> Any:  # which an interrupt ends: it is opened again
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
        seen.append(taken(loader, 12))
    (expected, none), (batches, interrupted) = seen
    assert batches == expected
    assert (none, interrupted) == (0, len(at))


ECHO = str(Path(adaecho.echo.__file__).parent)
EVENTS = ("call", "return", "c_call", "c_return")

Site = tuple[str, str, int, str]  # file, function, line where that is not at its beginning or end, event


class Profiler:
    """Counts the calls and returns of the loader's functions and of those in C that they call.

    It raises KeyboardInterrupt at some of them, as Ctrl-C does: CPython looks for signals there.
    """

    def __init__(self, *at: int) -> None:
        self.sites: list[Site] = []
        self.at, self.due = set(at), False

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "c_call" and argument.__name__ == "__exit__":
            return  # of a lock: CPython looks for no signal between the end of a with block and this
        if not code.co_filename.startswith(ECHO) or event not in EVENTS:
            return
        # A generator may be ended by the garbage collector, which lets no exception out; what the loader's
        # own methods return is the consumer's, and so is an interrupt after it.
        if code.co_name == "<genexpr>" or (event == "return" and code.co_name in ("__iter__", "__next__")):
            return
        line = frame.f_lineno if event.startswith("c_") else 0
        self.sites.append((code.co_filename, code.co_name, line, event))
        self.due |= len(self.sites) in self.at
        if self.due and not is_collected(frame):
            self.due = False
            raise KeyboardInterrupt

    def during(self, call: Callable[[], Any]) -> Any:
        """What a call gives in the end, called once more after each interrupt."""
        while True:
            sys.setprofile(self)
            try:
                return call()
            except KeyboardInterrupt:
                continue
            finally:
                sys.setprofile(None)


def is_collected(frame: Any) -> bool:
    """Whether the garbage collector has called it: what is raised there reaches nobody."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def iterated(make: Callable[[], EchoLoader], profiler: Profiler) -> list[Any]:
    seen: list[Any] = []
    with make() as loader:
        for _ in range(2):
            iterator = profiler.during(loader.__iter__)
            while (batch := profiler.during(lambda i=iterator: next(i, None))) is not None:
                seen.append((batch["x"].tolist(), batch["label"].tolist(), loader.fresh_examples))
                if len(seen) % 3 == 0:
                    state = profiler.during(loader.state_dict)
                    # A loader that went back marks its source elsewhere.
                    del state["timers"], state["reread_examples"], state["progress"]
                    seen.append(str(state))
    return seen


def decode_row(row: Any) -> dict[str, Any]:
    return example(int(row))


decode_row.thread_safe = True  # type: ignore[attr-defined]


def maker(index: int, num_workers: int) -> tuple[str, Callable[[], EchoLoader]]:
    kinds = {name: SOURCES[name] for name in ("map", "arrays", "stream", "ragged")}
    kinds["seekable"] = (Seekable, add_noise, None, {"decode": decode_row})
    kind = list(kinds)[(index + 2 * num_workers) % len(kinds)]
    make, augment, _, more = kinds[kind]
    common = {"shuffle_buffer": 4, "epochs": 1, "num_workers": num_workers, **VARIANTS[index], **more}
    return f"{IDS[index]}-{kind}-{num_workers}", lambda: EchoLoader(make(9), 3, augment=augment, **common)


MAKERS = dict(maker(index, num_workers) for index in range(len(VARIANTS)) for num_workers in (0, 1))
_tried: set[Site] = set()  # each function's beginning and end is tried with one variant


@pytest.mark.parametrize("name", MAKERS)
def test_an_interrupt_anywhere_in_the_loader_loses_and_doubles_nothing(name: str) -> None:
    rng = random.Random(name)
    undisturbed = Profiler()
    expected = iterated(MAKERS[name], undisturbed)
    numbers: dict[Site, list[int]] = {}
    for number, site in enumerate(undisturbed.sites, start=1):
        numbers.setdefault(site, []).append(number)
    functions = [site for site in numbers if not site[3].startswith("c_") and site not in _tried]
    inner = sorted(site for site in numbers if site[3].startswith("c_"))
    for site in (*functions, *rng.sample(inner, min(5, len(inner)))):
        _tried.add(site)
        first = rng.choice(numbers[site])
        # Sometimes another one, while the loader goes back because of the first.
        second = first + rng.randint(1, 150) if rng.random() < 0.3 else first
        assert iterated(MAKERS[name], Profiler(first, second)) == expected, (site, first, second)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_can_be_read_only_once_says_so_after_an_interrupt(num_workers: int) -> None:
    with EchoLoader(map(example, range(30)), 4, shuffle_buffer=5, num_workers=num_workers) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loader._pipeline.run, "next", Interrupting(max, 1))
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
        with pytest.raises(ValueError, match="map is an iterator, which can be iterated once"):
            next(iterator)


def test_closing_elsewhere_while_the_next_batch_is_waited_for_says_so() -> None:
    source = Halting(30, 4)

    def elsewhere() -> None:
        source.reading.wait(120)
        time.sleep(0.1)  # the consumer waits by now, or finds it when it comes
        threading.Timer(0.2, source.go.set).start()
        loader.close()

    with EchoLoader(source, 4, order="stored", num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        with pytest.raises(RuntimeError, match="closed"):
            next(iterator)
        thread.join()
        with pytest.raises(RuntimeError, match="was closed"):
            next(iterator)


def test_to_ask_for_a_batch_ends_the_pause_of_who_asks() -> None:
    with EchoLoader(Dataset(1000), 4, num_workers=1, prefetch=1) as loader:
        iterator, others = iter(loader), []
        next(iterator)
        with loader.paused(), loader.paused():
            # Another thread only waits for the end of the pause.
            thread = threading.Thread(target=lambda: others.extend(islice(iterator, 8)), daemon=True)
            thread.start()
        thread.join(120)
        assert len(others) == 8
        with loader.paused(), loader.paused():
            assert len(list(islice(iterator, 8))) == 8
        assert len(list(islice(iterator, 8))) == 8


@pytest.mark.parametrize("where", ["paused", "resume"])
@pytest.mark.parametrize("event", ["call", "return"])
def test_an_interrupt_at_the_end_of_a_pause_leaves_nobody_paused(where: str, event: str) -> None:
    def interrupt(frame: Any, seen: str, _: Any) -> None:
        if armed and (frame.f_code.co_name, seen) == (where, event):
            armed.clear()
            raise KeyboardInterrupt

    armed: list[bool] = []
    with EchoLoader(Dataset(1000), 4, num_workers=2) as loader:
        iterator = iter(loader)
        batches = labels(iterator, 2)
        sys.setprofile(interrupt)
        try:
            with suppress(KeyboardInterrupt), loader.paused():
                armed.append(True)
        finally:
            sys.setprofile(None)
        assert not armed
        batches += labels(iterator, 60)
    assert batches == labels(EchoLoader(Dataset(1000), 4), 62)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_that_another_thread_asks_for_while_a_batch_is_taken_is_that_before(num_workers: int) -> None:
    source = Halting(16, 8)
    common: dict[str, Any] = {"order": "stored", "epochs": 1, "num_workers": num_workers}
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


def test_states_that_another_thread_asks_for_are_right() -> None:
    def make() -> EchoLoader:
        return EchoLoader(Dataset(400), 4, echo="batch", factor=2, batch_shuffle_buffer=5)

    def ask() -> None:
        while not ended.is_set():
            states.append(loader.state_dict())

    ended, states = threading.Event(), list[Any]()
    loader = make()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert soon(lambda: states)
    stream = labels(loader, 300)
    ended.set()
    thread.join(200)
    stream += labels(loader, 10)
    for state in states[:: max(1, len(states) // 20)]:
        resumed = make()
        resumed.load_state_dict(state)
        found = labels(resumed, 10)
        assert any(found == stream[place : place + 10] for place in range(301))


def test_inline_a_pause_has_no_thread_to_wait_for() -> None:
    with EchoLoader(Dataset(1000), 4) as loader, loader.paused():
        next(iter(loader))


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

def interrupted(seen, iterator, least, times, *between_s):
    draw = random.Random(0)
    while times > 0 or len(seen) < least:  # a busy machine makes few batches between two
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
    (inline, [(40, 1e-4, 0.02)]),
    (with_threads, [(60, 1e-4, 0.0015), (60, 1e-4, 0.005)] * 3),
    (with_processes, [(40, 1e-3, 0.1)]),
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


def test_a_loader_that_is_interrupted_at_any_moment_gives_the_same_stream() -> None:
    process = subprocess.Popen([sys.executable, "-c", AT_ANY_MOMENT], stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()  # which hangs if a lock is broken
    assert process.returncode == 0, errors
