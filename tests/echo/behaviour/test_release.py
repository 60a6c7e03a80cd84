"""A loader that is abandoned or interrupted leaves no file or connection open, and can go on where it was."""

import gc
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from adaecho import EchoLoader, TarShards
from tests.echo.read.test_marks import Seekable, SeekablePass
from tests.echo.sources import soon
from tests.echo.threads.test_workers import assert_no_threads_soon, only_by_hand
from tests.needs import needs
from tests.shards.archives import QUICK, label_alone, labels, write_shards
from tests.shards.nginx import needs_nginx, nginx

OPEN = Path("/proc/self/fd")
needs_proc = needs(str(OPEN), present=OPEN.exists(), remedy="nothing else lists a process's open files")
EXAMPLES = 200


def opened(kind: str) -> set[str]:
    found = set()
    for one in OPEN.iterdir():
        with suppress(FileNotFoundError):  # the folder's own
            found.add(os.readlink(one))
    return {name for name in found if kind in name}


def take_three(loader: EchoLoader, look: Callable[[], None], *, interrupted: bool) -> list[Any]:
    seen: list[Any] = []
    with suppress(KeyboardInterrupt):
        for batch in loader:
            seen.append(batch)
            look()
            if len(seen) == 3 and interrupted:
                raise KeyboardInterrupt
            if len(seen) == 3:
                break
    return seen


@needs_proc
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("server", [None, pytest.param(nginx, marks=needs_nginx)], ids=["files", "http"])
def test_no_file_or_connection_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Any, interrupted: bool, num_workers: int
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    large = tmp_path / "large"
    write_shards(large, 2, EXAMPLES)  # of which a few batches read a small part
    with server(tmp_path / "server", large) if server else nullcontext(f"{large}/") as place:
        kind = "socket:" if server else str(large)
        before = opened(kind)

        def make(num_workers: int) -> EchoLoader:
            shards = TarShards(f"{place}shard-{{000..001}}.tar", order="stored", retries=QUICK)
            return EchoLoader(shards, 2, decode=label_alone, shuffle_buffer=5, num_workers=num_workers)

        with make(0) as whole:
            expected = labels(islice(whole, EXAMPLES))  # two passes
        seen, found_open = [], []
        with make(num_workers) as loader:
            for _ in range(4):
                seen += labels(
                    take_three(
                        loader, lambda: found_open.append(opened(kind) - before), interrupted=interrupted
                    )
                )
                assert soon(lambda: not opened(kind) - before)
                assert_no_threads_soon()
                loader.state_dict()
            seen += labels(islice(loader, EXAMPLES - 12))
        assert seen == expected
        assert any(found_open)
        assert not opened(kind) - before


@needs_proc
@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_file_stays_open_after_an_error(tmp_path: Path, num_workers: int) -> None:
    def fail(example: dict[str, Any]) -> dict[str, Any]:
        if example["__key__"] == "00007":
            raise ValueError("not this one")
        return label_alone(example)

    write_shards(tmp_path / "large", 2, EXAMPLES)
    shards = TarShards(f"{tmp_path}/large/*.tar", order="stored")
    with EchoLoader(shards, 2, decode=fail, num_workers=num_workers) as loader:
        with pytest.raises(ValueError, match="not this one"):
            list(islice(loader, 5))
        assert soon(lambda: not opened(str(tmp_path)))


def watched(closed: list[bool], collect_at: int = -1) -> Seekable:
    """Tells of each iterator that is closed whether it was reading; the collector comes while one reads."""

    class Pass(SeekablePass):
        reading = False

        def __next__(self) -> Any:
            self.reading = True
            if self._next == collect_at:
                gc.collect()
            self.reading = False
            return super().__next__()

        def close(self) -> None:
            closed.append(self.reading)

    source = Seekable(1000)
    source.iterate_from = lambda position: Pass(position[0], 1000)  # type: ignore[method-assign]
    return source


def test_the_garbage_collector_never_closes_what_is_being_read() -> None:
    closed: list[bool] = []
    with EchoLoader(watched(closed, collect_at=9), 2) as loader, only_by_hand():
        old = iter(loader)
        cycle: list[Any] = [iter(loader)]  # the newest iterator
        cycle.append(cycle)
        del cycle
        with pytest.warns(UserWarning, match="from a newer one"):
            batches = [next(old).tolist() for _ in range(10)]
    assert batches == [[2 * number, 2 * number + 1] for number in range(10)]
    assert not any(closed)


def test_nothing_is_closed_twice_or_for_nothing() -> None:
    closed: list[bool] = []
    with EchoLoader(watched(closed), 2) as loader:
        loader.stop()  # nothing has been read yet
        for first in (0, 4, 8):
            assert [int(one) for batch in islice(loader, 2) for one in batch] == list(range(first, first + 4))
            loader.stop()
    assert closed == 4 * [False]
