"""Tar shards from a real nginx whose connections break."""

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader, IndexedTarShards, Retries
from adaecho.shards import TransferError
from tests.echo.threads.test_workers import assert_no_threads_soon
from tests.shards.archives import NUM_EXAMPLES, QUICK, label_alone, labels, make, number_of, urls, write_shard
from tests.shards.nginx import Proxy, needs_nginx


@needs_nginx
@pytest.mark.parametrize("kind", ["tar", "indexed"])
def test_a_server_that_goes_away_is_never_a_bad_example(proxy: Proxy, kind: str) -> None:
    source = make(kind, proxy.url)
    loader = EchoLoader(source, 4, decode=label_alone, max_bad_examples=100, order="shards")
    next(iter(loader))
    proxy.faults = 100 * [("cut", 0)]
    message = r"shard-00\d\.tar: reading at byte \d+ failed after 3 tries"
    with pytest.raises(TransferError, match=message) as caught:
        list(islice(loader, 20))
    assert "while reading example" in caught.value.__notes__[0]
    assert loader.bad_examples == []


@needs_nginx
@pytest.mark.parametrize("server", ["gone", "dripping"])
@pytest.mark.parametrize("kind", ["tar", "indexed"])
def test_stopping_does_not_wait_for_a_server_and_loses_nothing(
    proxy: Proxy, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, server: str
) -> None:
    """The examples in hand would take many minutes."""
    common: dict[str, Any] = {"decode": label_alone, "order": "shards"}
    expected = labels(islice(EchoLoader(make(kind, str(folder)), 4, **common), 12))
    source = make(kind, proxy.url)
    waiting = threading.Event()

    def wait(_: Retries, failures: int, asked_s: float) -> None:  # noqa: ARG001
        waiting.set()
        threading.current_thread().rest(600)

    monkeypatch.setattr(Retries, "wait", wait)
    with EchoLoader(source, 4, num_workers=2, **common) as loader:
        iterator = iter(loader)
        seen = labels(islice(iterator, 2))
        # Nothing is read ahead any more; it reads an example again.
        loader.load_state_dict(loader.state_dict())
        proxy.faults = 100 * [("cut", 0) if server == "gone" else ("drip", 100)]

        def ask() -> None:
            with pytest.raises(RuntimeError, match="asking again goes on"):
                next(iterator)

        asking = threading.Thread(target=ask)
        asking.start()
        assert (waiting if server == "gone" else proxy.dripped).wait(120)
        loader.stop()
        asking.join(120)
        assert not asking.is_alive()
        assert_no_threads_soon()
        proxy.faults.clear()
        seen += labels(islice(loader, 10))
    assert seen == expected


@needs_nginx
def test_restoring_an_index_asks_for_the_buffer_alone(proxy: Proxy) -> None:
    def loader() -> EchoLoader:
        return EchoLoader(source, 2, decode=label_alone, shuffle_buffer=6)

    source = make("indexed", proxy.url)
    first = loader()
    list(islice(first, 5))
    state, expected = first.state_dict(), labels(islice(first, 3))
    proxy.ranges.clear()
    restored = loader()
    restored.load_state_dict(state)
    assert proxy.ranges == []  # what the buffer held is read when it leaves
    assert labels(islice(restored, 3)) == expected
    assert 1 <= restored.reread_examples <= 6
    assert 1 <= len(proxy.ranges) <= 12  # those, and as many that entered
    assert all("-" in asked and not asked.endswith("-") for asked in proxy.ranges)


@needs_nginx
def test_neighbours_come_with_one_request(proxy: Proxy) -> None:
    source = make("indexed", proxy.url)
    proxy.ranges.clear()
    examples = source.__getitems__(list(range(NUM_EXAMPLES)))
    assert [number_of(example) for example in examples] == list(range(NUM_EXAMPLES))
    assert len(proxy.ranges) == 4
    shuffled = np.random.default_rng(0).permutation(NUM_EXAMPLES).tolist()
    assert [number_of(example) for example in source.__getitems__([*shuffled, 7])] == [*shuffled, 7]
    assert len(proxy.ranges) == 4 + 5
    assert number_of(source[7]) == 7


@needs_nginx
def test_an_index_is_kept_and_notices_changes(proxy: Proxy, folder: Path, tmp_path: Path) -> None:
    index = tmp_path / "index.npz"
    made = IndexedTarShards(urls(proxy.url), index=index, retries=QUICK)
    proxy.ranges.clear()
    kept = IndexedTarShards(urls(proxy.url), index=index, retries=QUICK)
    assert proxy.ranges == []
    assert len(kept) == len(made) == NUM_EXAMPLES
    assert kept[3] == made[3]
    with pytest.raises(ValueError, match="it is of other shards"):
        IndexedTarShards(urls(proxy.url).replace("003", "002"), index=index)
    write_shard(folder / "shard-000.tar", [7, 8, 9, 10, 11, 12])
    with pytest.raises(TransferError, match="the file has changed"):
        kept[0]
