"""Worker threads: errors, pauses, close, and the release of threads, files and sources."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader, TarShards
from tests.echo.sources import Broken, Dataset, Halting, Stream, arrays, labels, soon
from tests.needs import needs
from tests.shards.archives import label_alone, write_shards

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("adaecho")]


def assert_no_threads_soon() -> None:
    assert soon(lambda: not threads()), threads()


@WORKERS
def test_an_exception_has_its_traceback_and_names_the_example(num_workers: int) -> None:
    loader = EchoLoader(Broken(20, 7), 4, order="sequential", num_workers=num_workers)
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
def test_an_error_of_an_iterable_names_the_example(num_workers: int) -> None:
    def source() -> Any:
        yield from range(5)
        raise OSError("disk on fire")

    loader = EchoLoader(source, 2, num_workers=num_workers, max_bad_examples=9)
    with pytest.raises(OSError, match="disk on fire") as caught:
        list(islice(loader, 5))
    assert "example 5 (counted from 0 over all passes) of source" in caught.value.__notes__[0]
    assert loader.fresh_examples == 4


@pytest.mark.parametrize("echo", ["none", "batch", "example_before_augmentation"])
def test_abandoned_iterators_lose_no_example(echo: str) -> None:
    common: dict[str, Any] = {"echo": echo, "shuffle_buffer": 5}
    loader = EchoLoader(Stream(30), 4, num_workers=3, **common)
    seen = []
    for _ in range(4):
        seen += labels(loader, 3)
    assert seen == labels(EchoLoader(Stream(30), 4, **common), 12)


def test_a_forgotten_loader_frees_its_threads_and_source() -> None:
    closed = []

    def source() -> Any:
        try:
            while True:
                time.sleep(0.2)  # so that the thread that logs long waits sees a wait
                yield np.zeros(3)
        finally:
            closed.append(True)

    loader = EchoLoader(source, 4, num_workers=2)
    references = [weakref.ref(loader), weakref.ref(source)]
    iterator = iter(loader)
    next(iterator)
    assert threads()
    del loader, iterator, source
    assert soon(lambda: gc.collect() >= 0 and not any(reference() for reference in references))
    assert_no_threads_soon()
    assert closed == [True]


EXITS = """
from adaecho import EchoLoader

def source():
    try:
        while True:
            yield 0
    finally:
        print("closed")

loader = EchoLoader(source, 4, num_workers=1)
next(iter(loader))
"""


def test_the_exit_of_the_interpreter_closes_the_loader() -> None:
    ended = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "closed\n", "")


def test_interrupt_and_close_end_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    with EchoLoader(arrays(30), 4, num_workers=2) as loader:
        iterator = iter(loader)
        first = next(iterator)
        with monkeypatch.context() as patch:
            # Ctrl-C while the training loop waits for a batch
            patch.setattr(loader._pipeline.run, "next", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
        assert_no_threads_soon()
        second = next(iterator)
        assert not set(first["label"].tolist()) & set(second["label"].tolist())
    assert_no_threads_soon()  # Python lists a thread for a moment after it has ended
    loader.close()
    with pytest.raises(RuntimeError, match="was closed"):
        next(iterator)


def test_an_interrupted_pause_does_not_stop_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    source = Halting(1000, 20)
    with EchoLoader(source, 4, order="sequential", num_workers=1, prefetch=8) as loader:
        iterator = iter(loader)
        next(iterator)
        assert source.reading.wait(120)
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", interrupted)
            with pytest.raises(KeyboardInterrupt), loader.paused():
                pass
        source.go.set()
        assert len(list(islice(iterator, 60))) == 60


def test_workers_do_not_read_during_a_pause() -> None:
    source = Dataset(1000)
    with EchoLoader(source, 4, num_workers=2, prefetch=50) as loader:
        iterator = iter(loader)
        next(iterator)
        with loader.paused():
            reads = source.reads
            time.sleep(0.1)
            assert source.reads == reads
        # More batches than the workers can have prepared before the pause
        assert len(list(islice(iterator, 120))) == 120
    assert source.reads > reads


@pytest.mark.parametrize("ahead", [{"prefetch": 6}, {"prefetch_factor": 3}], ids=str)
def test_prefetching_is_bounded(ahead: dict[str, int]) -> None:
    source = Dataset(100_000)
    with EchoLoader(source, 8, num_workers=2, **ahead) as loader:  # type: ignore[arg-type]
        next(iter(loader))
        reads, before = source.reads, -1
        while reads != before:
            time.sleep(0.05)
            reads, before = source.reads, reads
    # Batches: one consumed, then six prefetched and two in work on each side of the shuffle buffer
    assert reads <= 8 * (1 + 2 * (6 + 2))


OPEN = Path("/proc/self/fd")
needs_proc = needs(str(OPEN), present=OPEN.exists(), remedy="nothing else lists a process's open files")


def opened(kind: str) -> set[str]:
    found = set()
    for one in OPEN.iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this listing
            found.add(os.readlink(one))
    return {name for name in found if kind in name}


@needs_proc
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_forgotten_loader_closes_its_files(tmp_path: Path, num_workers: int) -> None:
    write_shards(tmp_path / "large", 2, 200)
    shards = TarShards(f"{tmp_path}/large/*.tar", shuffle=False)
    loader = EchoLoader(shards, 2, decode=label_alone, shuffle_buffer=5, num_workers=num_workers)
    next(iter(loader))
    assert opened(str(tmp_path))
    del loader
    gc.collect()
    assert soon(lambda: not opened(str(tmp_path)))
