"""Tar shards under an EchoLoader: order, ranks, restoring, http."""

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader, IndexedTarShards, Retries, TarShards
from adaecho.echo import TransferError
from adaecho.echo.crew import Interrupted, rest
from adaecho.echo.shards import shard_urls
from tests.echo.archives import number_of, write_shard, write_shards
from tests.echo.nginx import Proxy, needs_nginx, nginx
from tests.echo.sources import IDS, VARIANTS
from tests.echo.test_workers import assert_no_threads_soon

NUM_EXAMPLES = 23
QUICK = Retries(tries=3, delay_s=0.001, timeout_s=0.3)
Source = TarShards | IndexedTarShards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", 4, NUM_EXAMPLES)
    return tmp_path / "data"


@pytest.fixture
def proxy(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("no_proxy", "*")
    with nginx(tmp_path / "server", folder) as url, Proxy(url) as started:
        yield started


def make(kind: str, place: str) -> Source:
    urls = f"{place}/shard-{{000..003}}.tar"
    return TarShards(urls, seed=5, retries=QUICK) if kind == "tar" else IndexedTarShards(urls, retries=QUICK)


def decode(example: dict[str, Any]) -> dict[str, Any]:
    number = number_of(example)
    return {"x": np.frombuffer(example["bin"], dtype=np.uint8), "label": number}


def label_alone(example: dict[str, Any]) -> dict[str, Any]:
    return {"label": number_of(example)}


def first_bytes(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**example, "x": np.resize(example["x"], 3) + rng.random()}


def labels(batches: Any) -> list[int]:
    return [label for batch in batches for label in batch["label"].tolist()]


def shards_in_order(numbers: list[int], lengths: list[int]) -> list[int]:
    """Numbers of the shards, after a check that each is read through."""
    firsts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    order = []
    while numbers:
        shard = firsts.index(numbers[0])
        assert numbers[: lengths[shard]] == list(range(firsts[shard], firsts[shard + 1]))
        numbers = numbers[lengths[shard] :]
        order.append(shard)
    return order


@pytest.mark.parametrize("kind", ["tar", "indexed"])
def test_shards_are_shuffled_for_each_pass_and_read_through(folder: Path, kind: str) -> None:
    lengths = IndexedTarShards(f"{folder}/*.tar").shard_lengths.tolist()
    loader = EchoLoader(make(kind, str(folder)), 4, order="shards", decode=label_alone, epochs=1)
    orders = [shards_in_order(labels(loader), lengths) for _ in range(6)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    again = EchoLoader(make(kind, str(folder)), 4, order="shards", decode=label_alone, epochs=1)
    assert [shards_in_order(labels(again), lengths) for _ in range(6)] == orders


def test_as_stored_and_permuted(folder: Path) -> None:
    pattern = f"{folder}/*.tar"
    for source in (TarShards(pattern, order="stored"), IndexedTarShards(pattern)):
        loader = EchoLoader(source, 5, order="stored", decode=label_alone, epochs=1)
        assert labels(loader) == list(range(NUM_EXAMPLES))
    permuted = labels(EchoLoader(IndexedTarShards(pattern), 5, decode=label_alone, epochs=1, num_workers=2))
    assert sorted(permuted) == list(range(NUM_EXAMPLES))
    assert permuted != list(range(NUM_EXAMPLES))


@pytest.mark.parametrize("world", [2, 3, 6], ids=lambda world: f"{world} ranks")  # 6: more than shards
@pytest.mark.parametrize("kind", ["tar", "indexed"])
def test_ranks_share_out_every_pass(folder: Path, kind: str, world: int) -> None:
    loaders = [
        EchoLoader(make(kind, str(folder)), 2, decode=label_alone, epochs=1, rank=rank, world_size=world)
        for rank in range(world)
    ]
    for number in range(1, 3):
        seen = [label for loader in loaders for label in labels(loader)]
        assert sorted(seen) == list(range(NUM_EXAMPLES))
        assert sum(loader.fresh_examples for loader in loaders) == number * NUM_EXAMPLES


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["tar", "indexed"])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_restores_at_every_batch(folder: Path, variant: dict[str, Any], kind: str, num_workers: int) -> None:
    common: dict[str, Any] = {
        "batch_size": 3, "shuffle_buffer": 6, "decode": decode, "augment": first_bytes, "rank": 1,
        "world_size": 2, **variant,
    }  # fmt: skip
    with EchoLoader(make(kind, str(folder)), num_workers=num_workers, **common) as loader:
        iterator = iter(loader)
        states, batches, counts = [loader.state_dict()], [], [0]
        for _ in range(9):
            batches.append(next(iterator)["x"].tolist())
            counts.append(loader.fresh_examples)
            states.append(loader.state_dict())
    for position, state in enumerate(states):
        with EchoLoader(
            make(kind, str(folder)), num_workers=(num_workers + position) % 2, **common
        ) as restored:
            restored.load_state_dict(state)
            assert restored.fresh_examples == counts[position]
            rest = [batch["x"].tolist() for batch in islice(restored, 2)]
            assert rest[: 9 - position] == batches[position : position + 2]


def test_restoring_does_not_begin_at_the_first_shard(folder: Path) -> None:
    def loader() -> EchoLoader:
        return EchoLoader(TarShards(f"{folder}/*.tar", order="stored"), 2, decode=label_alone)

    first = loader()
    taken = labels(islice(first, 9))
    restored = loader()
    restored.load_state_dict(first.state_dict())
    assert restored.reread_examples <= 2
    assert labels(islice(restored, 1)) == [taken[-1] + 1, taken[-1] + 2]


@needs_nginx
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["tar", "indexed"])
def test_breaking_connections_change_nothing(proxy: Proxy, folder: Path, kind: str, num_workers: int) -> None:
    common: dict[str, Any] = {"decode": label_alone, "shuffle_buffer": 5, "order": "shards"}
    expected = labels(islice(EchoLoader(make(kind, str(folder)), 4, **common), 14))
    with EchoLoader(make(kind, proxy.url), 4, num_workers=num_workers, **common) as loader:
        proxy.faults = [(fault, at) for at in range(200, 6000, 1000) for fault in ("cut", "reset", "stall")]
        assert labels(islice(loader, 14)) == expected
        assert loader.fresh_examples == 14 * 4 + 5


@needs_nginx
@pytest.mark.parametrize("kind", ["tar", "indexed"])
def test_a_server_that_goes_away_is_never_a_bad_example(proxy: Proxy, kind: str) -> None:
    source = make(kind, proxy.url)
    loader = EchoLoader(source, 4, decode=label_alone, max_bad_examples=100, order="shards")
    next(iter(loader))
    proxy.faults = 100 * [("cut", 0)]
    with pytest.raises(
        TransferError, match=r"shard-00\d\.tar: reading at byte \d+ failed after 3 tries"
    ) as caught:
        list(islice(loader, 20))
    assert "while reading example" in caught.value.__notes__[0]
    assert loader.bad_examples == []


@needs_nginx
@pytest.mark.parametrize("kind", ["tar", "indexed"])
def test_stopping_does_not_wait_for_a_server_and_loses_nothing(
    proxy: Proxy, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    common: dict[str, Any] = {"decode": label_alone, "order": "shards"}
    expected = labels(islice(EchoLoader(make(kind, str(folder)), 4, **common), 12))
    source = make(kind, proxy.url)
    waiting = threading.Event()

    def wait(_: Retries, failures: int) -> None:  # noqa: ARG001
        waiting.set()
        rest(600)

    monkeypatch.setattr(Retries, "wait", wait)
    with EchoLoader(source, 4, num_workers=2, **common) as loader:
        iterator = iter(loader)
        seen = labels(islice(iterator, 2))
        proxy.faults = 100 * [("cut", 0)]
        loader.load_state_dict(loader.state_dict())  # nothing is read ahead any more

        def ask() -> None:
            with pytest.raises(Interrupted):
                next(iterator)

        asking = threading.Thread(target=ask)
        asking.start()
        assert waiting.wait(20)
        loader.stop()
        asking.join(20)
        assert not asking.is_alive()
        assert_no_threads_soon()
        proxy.faults.clear()
        seen += labels(islice(loader, 10))
    assert seen == expected


@needs_nginx
def test_restoring_an_index_asks_for_the_buffer_alone(proxy: Proxy) -> None:
    def loader() -> EchoLoader:
        return EchoLoader(source, 2, decode=label_alone, shuffle_buffer=6)

    source = IndexedTarShards(f"{proxy.url}shard-{{000..003}}.tar", retries=QUICK)
    first = loader()
    list(islice(first, 5))
    proxy.ranges.clear()
    restored = loader()
    restored.load_state_dict(first.state_dict())
    assert restored.reread_examples == 6
    assert 1 <= len(proxy.ranges) <= 6
    assert all("-" in asked and not asked.endswith("-") for asked in proxy.ranges)
    assert labels(islice(restored, 3)) == labels(islice(first, 3))


@needs_nginx
def test_neighbours_come_with_one_request(proxy: Proxy) -> None:
    source = IndexedTarShards(f"{proxy.url}shard-{{000..003}}.tar", retries=QUICK)
    proxy.ranges.clear()
    examples = source.__getitems__(list(range(NUM_EXAMPLES)))
    assert [number_of(example) for example in examples] == list(range(NUM_EXAMPLES))
    assert len(proxy.ranges) == 4
    assert number_of(source[7]) == 7


@needs_nginx
def test_an_index_is_kept_and_notices_changes(proxy: Proxy, folder: Path, tmp_path: Path) -> None:
    urls, index = f"{proxy.url}shard-{{000..003}}.tar", tmp_path / "index.npz"
    made = IndexedTarShards(urls, index=index, retries=QUICK)
    proxy.ranges.clear()
    kept = IndexedTarShards(urls, index=index, retries=QUICK)
    assert proxy.ranges == []
    assert len(kept) == len(made) == NUM_EXAMPLES
    assert kept[3] == made[3]
    with pytest.raises(ValueError, match="it is of other shards"):
        IndexedTarShards(urls.replace("003", "002"), index=index)
    write_shard(folder / "shard-000.tar", [7, 8, 9, 10, 11, 12])
    with pytest.raises(TransferError, match="the file has changed"):
        kept[0]


def test_a_damaged_example_names_shard_and_byte(folder: Path) -> None:
    source = IndexedTarShards(f"{folder}/*.tar")
    damaged = folder / "shard-002.tar"
    content = bytearray(damaged.read_bytes())
    content[:512] = bytes(range(256)) * 2
    damaged.write_bytes(content)
    first = int(source.shard_lengths[:2].sum())
    loader = EchoLoader(source, 4, order="stored", decode=label_alone, max_bad_examples=1, epochs=1)
    assert labels(loader) == [number for number in range(NUM_EXAMPLES) if number != first]
    assert loader.bad_examples[0]["origin"] == f"example 0 of {damaged} (byte 0)"
    sequential = EchoLoader(TarShards(f"{folder}/*.tar", order="stored"), 4, decode=label_alone)
    with pytest.raises(ValueError, match=r"shard-002\.tar: no tar header at byte 0"):
        list(islice(sequential, 6))


def test_names_of_shards(folder: Path, tmp_path: Path) -> None:
    assert shard_urls("s3://b/{08..11}-{0..1}.tar")[:3] == [
        "s3://b/08-0.tar",
        "s3://b/08-1.tar",
        "s3://b/09-0.tar",
    ]
    assert shard_urls(["a.tar", "https://host/b*.tar"]) == ["a.tar", "https://host/b*.tar"]
    assert shard_urls(f"{folder}/*2.tar") == [f"{folder}/shard-002.tar"]
    with pytest.raises(ValueError, match="no file matches"):
        TarShards(f"{tmp_path}/none-*.tar")
    with pytest.raises(ValueError, match="order='random'"):
        TarShards("a.tar", order="random")
    with pytest.raises(ValueError, match="has no shard_lengths"):
        EchoLoader([1, 2, 3], 1, order="shards")


def test_nothing_stays_open(folder: Path) -> None:
    """Warnings are errors here, so a file that Python has to close itself fails the test."""
    for kind in ("tar", "indexed"):
        with EchoLoader(make(kind, str(folder)), 2, decode=label_alone, num_workers=1) as loader:
            next(iter(loader))
        abandoned = EchoLoader(make(kind, str(folder)), 2, decode=label_alone)
        next(iter(abandoned))
        abandoned.close()
