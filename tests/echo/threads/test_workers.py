"""Threads: errors, bad examples, pausing, stopping; nothing is left behind and nothing is lost."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader
from adaecho.echo.threads import PoolThread
from tests.echo.sources import Broken, Dataset, Halting, Stream, arrays, labels, soon

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("adaecho")]


def assert_no_threads_soon() -> None:
    assert soon(lambda: not threads()), threads()


@contextmanager
def only_by_hand() -> Iterator[None]:
    """The garbage collector comes when it is called."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@WORKERS
def test_an_exception_reaches_the_caller_with_traceback_and_origin(num_workers: int) -> None:
    loader = EchoLoader(Broken(20, 7), 4, order="stored", num_workers=num_workers)
    iterator = iter(loader)
    assert next(iterator)["label"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="cannot decode 7") as caught:
        next(iterator)
    assert "__getitem__" in [entry.name for entry in caught.traceback]
    assert "example 7 of Broken" in caught.value.__notes__[0]
    assert "max_bad_examples=0" in caught.value.__notes__[0]
    assert loader.fresh_examples == 4
    with pytest.raises(RuntimeError, match="an error stopped this EchoLoader"):
        next(iterator)
    assert_no_threads_soon()


@WORKERS
def test_an_error_of_the_source_itself_names_the_example(num_workers: int) -> None:
    def source() -> Any:
        yield from range(5)
        raise OSError("disk on fire")

    loader = EchoLoader(source, 2, num_workers=num_workers)
    with pytest.raises(OSError, match="disk on fire") as caught:
        list(islice(loader, 5))
    assert "example 5 (counted from 0 over all passes) of source" in caught.value.__notes__[0]
    assert loader.fresh_examples == 4


@pytest.mark.parametrize("echo", ["none", "batch", "example_before_augmentation"])
def test_abandoning_the_iterator_loses_nothing(echo: str) -> None:
    common: dict[str, Any] = {"echo": echo, "shuffle_buffer": 5}
    loader = EchoLoader(Stream(30), 4, num_workers=3, **common)
    seen = []
    for _ in range(4):
        seen += labels(loader, 3)
    assert seen == labels(EchoLoader(Stream(30), 4, **common), 12)


def test_a_forgotten_loader_leaves_nothing() -> None:
    closed = []

    def source() -> Any:
        try:
            while True:
                yield np.zeros(3)
        finally:
            closed.append(True)

    loader = EchoLoader(source, 4, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    assert threads()
    del loader, iterator
    gc.collect()
    assert_no_threads_soon()
    assert soon(lambda: closed == [True])  # by a thread of its own


def test_the_end_of_the_process_waits_for_what_a_forgotten_loader_still_reads() -> None:
    code = """
import gc, threading, time
from adaecho import EchoLoader

reading = threading.Event()

def source():
    try:
        yield from range(8)
        reading.set()
        time.sleep(0.5)
        while True:
            yield 0
    finally:
        print("closed")

loader = EchoLoader(source, 4, num_workers=1)
next(iter(loader))
reading.wait()
del loader
gc.collect()
kept = EchoLoader(source, 4, num_workers=1)
next(iter(kept))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["closed"] * 2, "")


def test_an_interrupt_ends_the_threads_and_so_does_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    with EchoLoader(arrays(30), 4, num_workers=2) as loader:
        iterator = iter(loader)
        first = next(iterator)
        with monkeypatch.context() as patch:
            # Ctrl-C while the training loop waits for a batch.
            patch.setattr(loader._pipeline.run, "next", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
        assert_no_threads_soon()
        second = next(iterator)
        assert not set(first["label"].tolist()) & set(second["label"].tolist())
    assert threads() == []
    loader.close()
    with pytest.raises(RuntimeError, match="was closed"):
        next(iterator)


@pytest.mark.parametrize("echo", ["none", "batch"])
def test_an_old_iterator_may_be_collected_in_the_middle_of_a_newer_ones_pass(echo: str) -> None:
    class Collecting(Dataset):
        def __getitem__(self, row: int) -> dict[str, Any]:
            time.sleep(0.002)
            if self.reads == 30:
                gc.collect()
            return super().__getitem__(row)

    with EchoLoader(Collecting(64), 4, echo=echo, shuffle_buffer=4, num_workers=1) as loader:
        abandoned = iter(loader)
        next(abandoned)
        cycle: list[Any] = [abandoned]
        cycle.append(cycle)
        with only_by_hand():
            del abandoned, cycle
            assert len(list(islice(loader, 30))) == 30


def test_an_interrupted_wait_for_a_pause_leaves_nobody_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    source = Halting(1000, 20)
    with EchoLoader(source, 4, order="stored", num_workers=1, prefetch=8) as loader:
        iterator = iter(loader)
        next(iterator)
        assert source.reading.wait(120)  # somebody works
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", interrupted)
            with pytest.raises(KeyboardInterrupt), loader.paused():
                pass
        source.go.set()
        assert len(list(islice(iterator, 60))) == 60


def test_nothing_is_read_while_paused() -> None:
    source = Dataset(1000)
    with EchoLoader(source, 4, num_workers=2, prefetch=50) as loader:
        iterator = iter(loader)
        next(iterator)
        with loader.paused():
            reads = source.reads
            time.sleep(0.1)
            assert source.reads == reads
        # More than can lie ready: 50 and two workers' on either side of the shuffle.
        assert len(list(islice(iterator, 120))) == 120
    assert source.reads > reads


@pytest.mark.parametrize("ahead", [{"prefetch": 6}, {"prefetch_factor": 3}], ids=str)
def test_reading_ahead_is_bounded(ahead: dict[str, int]) -> None:
    source = Dataset(100_000)
    with EchoLoader(source, 8, num_workers=2, **ahead) as loader:  # type: ignore[arg-type]
        next(iter(loader))
        reads, before = source.reads, -1
        while reads != before:
            time.sleep(0.05)
            reads, before = source.reads, reads
    # Batches: one taken, six ahead on either side of the shuffle, and two workers' each.
    assert reads <= 8 * (1 + 2 * (6 + 2))


def test_a_thread_that_can_not_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with EchoLoader(Dataset(100), 4, num_workers=2) as loader:
        with monkeypatch.context() as patch:
            patch.setattr(PoolThread, "start", refused)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                next(iter(loader))
        assert len(next(iter(loader))["x"]) == 4
