"""A loader that is closed leaves no file or connection open; one that is abandoned goes on where it was."""

import gc
import os
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from adaecho import EchoLoader, TarShards
from tests.echo.sources import soon
from tests.echo.threads.test_workers import assert_no_threads_soon
from tests.needs import needs
from tests.servers import serving
from tests.shards.archives import label_alone, labels, write_shards

OPEN = Path("/proc/self/fd")
needs_proc = needs(str(OPEN), present=OPEN.exists(), remedy="nothing else lists a process's open files")
EXAMPLES = 200


def opened(kind: str) -> set[str]:
    found = set()
    for one in OPEN.iterdir():
        with suppress(FileNotFoundError):  # the folder's own
            found.add(os.readlink(one))
    return {name for name in found if kind in name}


@needs_proc
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("server", [None, serving], ids=["files", "http"])
def test_an_abandoned_loader_goes_on_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Any, interrupted: bool, num_workers: int
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    large = tmp_path / "large"
    write_shards(large, 2, EXAMPLES)  # of which a few batches read a small part
    with server(large) if server else nullcontext(f"{large}/") as place:
        place = f"http://{place}/" if server else place
        kind = "socket:" if server else str(large)
        before = opened(kind)

        def make(num_workers: int) -> EchoLoader:
            shards = TarShards(f"{place}shard-{{000..001}}.tar", shuffle=False)
            return EchoLoader(shards, 2, decode=label_alone, shuffle_buffer=5, num_workers=num_workers)

        with make(0) as whole:
            expected = labels(islice(whole, EXAMPLES))  # two passes
        seen = []
        loader = make(num_workers)
        for _ in range(4):
            with suppress(KeyboardInterrupt):
                for number, batch in enumerate(loader):
                    seen += labels([batch])
                    if number == 2 and interrupted:
                        raise KeyboardInterrupt
                    if number == 2:
                        break
            loader.state_dict()
        seen += labels(islice(loader, EXAMPLES - 12))
        assert seen == expected
        del loader
        gc.collect()
        assert_no_threads_soon()
        assert soon(lambda: not opened(kind) - before)


@needs_proc
@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_file_stays_open_after_an_error(tmp_path: Path, num_workers: int) -> None:
    def fail(example: dict[str, Any]) -> dict[str, Any]:
        if example["__key__"] == "00007":
            raise ValueError("not this one")
        return label_alone(example)

    write_shards(tmp_path / "large", 2, EXAMPLES)
    shards = TarShards(f"{tmp_path}/large/*.tar", shuffle=False)
    with EchoLoader(shards, 2, decode=fail, num_workers=num_workers) as loader:
        with pytest.raises(ValueError, match="not this one"):
            list(islice(loader, 5))
        assert_no_threads_soon()
    assert soon(lambda: not opened(str(tmp_path)))
