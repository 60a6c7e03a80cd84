"""Tar shards under an EchoLoader: order, ranks, restoring."""

import os
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader, IndexedTarShards, TarShards
from adaecho.shards import sequential
from adaecho.shards.remote import Transfer
from adaecho.shards.sequential import shard_urls
from tests.echo.sources import IDS, VARIANTS
from tests.shards.archives import NUM_EXAMPLES, label_alone, labels, make, number_of, write_shard
from tests.shards.hostile import time_limit


def decode(example: dict[str, Any]) -> dict[str, Any]:
    number = number_of(example)
    return {"x": np.frombuffer(example["bin"], dtype=np.uint8), "label": number}


def first_bytes(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**example, "x": np.resize(example["x"], 3) + rng.random()}


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


def one_by_one(kind: str, folder: Path) -> TarShards | IndexedTarShards:
    if kind == "indexed":
        return IndexedTarShards(f"{folder}/*.tar", open_shards=1)
    return TarShards(f"{folder}/*.tar", seed=5, open_shards=1)


@pytest.mark.parametrize("kind", ["tar", "indexed"])
def test_shards_are_shuffled_for_each_pass_and_read_through(folder: Path, kind: str) -> None:
    lengths = IndexedTarShards(f"{folder}/*.tar").shard_lengths.tolist()

    def orders() -> list[list[int]]:
        loader = EchoLoader(one_by_one(kind, folder), 4, order="shards", decode=label_alone, epochs=1)
        return [shards_in_order(labels(loader), lengths) for _ in range(6)]

    found = orders()
    assert all(sorted(order) == [0, 1, 2, 3] for order in found)
    assert len({tuple(order) for order in found}) > 1
    assert orders() == found


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("kind", "order"), [(TarShards, "permutation"), (IndexedTarShards, "shards")])
def test_a_buffer_smaller_than_a_shard_sees_the_classes_of_eight(
    tmp_path: Path, num_workers: int, kind: type[TarShards | IndexedTarShards], order: str
) -> None:
    for number in range(8):  # one class each, as sorted data is written
        write_shard(tmp_path / f"{number}.tar", list(range(150 * number, 150 * number + 150)))
    loader = EchoLoader(
        kind(f"{tmp_path}/*.tar"), 64, order=order, shuffle_buffer=100, decode=label_alone, epochs=1,
        num_workers=num_workers,
    )  # fmt: skip
    for _ in range(2):
        batches = [{label // 150 for label in labels([batch])} for batch in loader]
        assert all(len(classes) >= 7 for classes in batches[:12])


@pytest.mark.parametrize("open_shards", [1, 2, 3, 9])
def test_shards_that_are_open_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, open_shards: int
) -> None:
    lengths = IndexedTarShards(f"{folder}/*.tar").shard_lengths
    opened: set[str] = set()
    most = 0

    class Counted(Transfer):
        def __init__(self, url: str, *args: Any, **options: Any) -> None:
            nonlocal most
            opened.add(url)
            most = max(most, len(opened))
            super().__init__(url, *args, **options)

        def close(self) -> None:
            opened.discard(self.url)
            super().close()

    monkeypatch.setattr(sequential, "Transfer", Counted)

    def source(epoch: int) -> TarShards:
        made = TarShards(f"{folder}/*.tar", seed=3, open_shards=open_shards)
        made.set_epoch(epoch)
        return made

    def numbers(examples: Any) -> list[int]:
        return [number_of(example) for example in examples]

    passes = [numbers(source(epoch)) for epoch in range(4)]
    assert [numbers(source(epoch)) for epoch in range(4)] == passes
    assert len({tuple(one) for one in passes}) == 4 or open_shards == 1
    ends = np.cumsum(lengths)
    for one in passes:
        assert sorted(one) == list(range(NUM_EXAMPLES))
        for shard in range(4):  # each is read in its order
            of_shard = [number for number in one if np.searchsorted(ends, number, side="right") == shard]
            assert of_shard == sorted(of_shard)
    assert most == min(open_shards, 4)
    going, position = iter(source(1)), []
    for taken in range(NUM_EXAMPLES + 1):
        position = going.position
        assert len(position) <= 2 + 5 * min(open_shards, 4)
        assert numbers(source(1).iterate_from(position)) == passes[1][taken:]
        next(going, None)
    assert numbers(source(1).iterate_from(position)) == []
    going.close()
    assert not opened


def test_as_stored_and_permuted(folder: Path) -> None:
    pattern = f"{folder}/*.tar"
    for source in (TarShards(pattern, order="stored"), IndexedTarShards(pattern)):
        loader = EchoLoader(source, 5, order="stored", decode=label_alone, epochs=1)
        assert labels(loader) == list(range(NUM_EXAMPLES))
    permuted = labels(EchoLoader(IndexedTarShards(pattern), 5, decode=label_alone, epochs=1, num_workers=2))
    assert sorted(permuted) == list(range(NUM_EXAMPLES))
    assert permuted != list(range(NUM_EXAMPLES))


def test_a_loader_keeps_its_share_beside_another_around_the_same_shards(folder: Path) -> None:
    def around(shards: TarShards) -> EchoLoader:
        return EchoLoader(shards, 2, decode=label_alone, rank=1, world_size=2)

    shards = TarShards(f"{folder}/*.tar")
    loader, alone = around(shards), around(TarShards(f"{folder}/*.tar"))
    whole = EchoLoader(shards, 2, decode=label_alone, epochs=1)
    for _ in range(3):
        assert sorted(labels(whole)) == list(range(NUM_EXAMPLES))
        assert labels(islice(loader, NUM_EXAMPLES)) == labels(islice(alone, NUM_EXAMPLES))


@pytest.mark.parametrize("world", [2, 3, 6], ids=lambda world: f"{world} ranks")  # 6: more than shards
@pytest.mark.parametrize("kind", ["tar", "indexed"])
def test_ranks_share_out_every_pass(folder: Path, kind: str, world: int) -> None:
    passes = []
    for rank in range(world):
        source = make(kind, str(folder))
        if kind == "tar":  # how many a rank gets is not known: it asks for passes of a share of its own
            source.set_share(rank, world)
            share = {"rank": 0, "world_size": 1}
            source = source.__iter__
        else:
            share = {"rank": rank, "world_size": world}
        loader = EchoLoader(source, 2, decode=label_alone, epochs=1, **share)
        passes.append([labels(loader) for _ in range(2)])
        assert loader.fresh_examples == sum(map(len, passes[-1]))
    for seen in zip(*passes, strict=True):
        read = sorted(label for one in seen for label in one)
        if kind == "tar":
            assert read == list(range(NUM_EXAMPLES))
        else:  # every rank has as many, of which all but the last are its own
            assert {len(one) for one in seen} == {-(-NUM_EXAMPLES // world)}
            assert set(read) == set(range(NUM_EXAMPLES))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "order"), [("tar", "shards"), ("indexed", "permutation"), ("indexed", "shards")]
)
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_restores_at_every_batch(
    folder: Path, variant: dict[str, Any], kind: str, order: str, num_workers: int
) -> None:
    common: dict[str, Any] = {
        "batch_size": 3, "shuffle_buffer": 6, "decode": decode, "augment": first_bytes, "rank": 1,
        "world_size": 2, "order": order, **variant,
    }  # fmt: skip
    with EchoLoader(make(kind, str(folder)), num_workers=num_workers, **common) as loader:
        iterator = iter(loader)
        states, batches, counts = [loader.state_dict()], [], [0]
        for _ in range(9):
            batches.append(next(iterator)["x"].tolist())
            counts.append(loader.fresh_examples)
            states.append(loader.state_dict())
    for position, state in enumerate(states):
        others = (num_workers + position) % 2
        with EchoLoader(make(kind, str(folder)), num_workers=others, **common) as restored:
            restored.load_state_dict(state)
            assert restored.fresh_examples == counts[position]
            rest = [batch["x"].tolist() for batch in islice(restored, 2)]
            assert rest[: 9 - position] == batches[position : position + 2]


@pytest.mark.parametrize("taken", [18, 1500], ids=["in a shard", "after many passes"])
def test_restoring_begins_in_a_shard_from_few_marks(folder: Path, taken: int) -> None:
    def loader() -> EchoLoader:
        return EchoLoader(TarShards(f"{folder}/*.tar"), 1, decode=label_alone)

    first = loader()
    list(islice(first, taken))
    state = first.state_dict()
    assert len(state["progress"]) == 1
    restored = loader()
    restored.load_state_dict(state)
    assert restored.reread_examples <= 1
    assert labels(islice(restored, 30)) == labels(islice(first, 30))


def test_a_damaged_example_names_shard_and_byte(folder: Path) -> None:
    source = IndexedTarShards(f"{folder}/*.tar")
    damaged = folder / "shard-002.tar"
    content, about = bytearray(damaged.read_bytes()), damaged.stat()
    content[:512] = bytes(range(256)) * 2
    damaged.write_bytes(content)
    os.utime(damaged, ns=(about.st_atime_ns, about.st_mtime_ns))  # bits that rot change no time
    first = int(source.shard_lengths[:2].sum())
    loader = EchoLoader(source, 4, order="stored", decode=label_alone, max_bad_examples=1, epochs=1)
    assert labels(loader) == [number for number in range(NUM_EXAMPLES) if number != first]
    assert loader.bad_examples[0]["origin"] == f"example 0 of {damaged} (byte 0)"
    sequential = EchoLoader(TarShards(f"{folder}/*.tar", order="stored"), 4, decode=label_alone)
    with pytest.raises(ValueError, match=r"shard-002\.tar: no tar header at byte 0"):
        list(islice(sequential, 6))


def test_names_of_shards(folder: Path) -> None:
    assert shard_urls("s3://b/{08..11}-{0..1}.tar")[:3] == [
        f"s3://b/{at}.tar" for at in ("08-0", "08-1", "09-0")
    ]
    assert shard_urls(Path("a.tar")) == shard_urls([Path("a.tar")]) == ["a.tar"]
    assert shard_urls(["a.tar", "https://host/b*.tar"]) == ["a.tar", "https://host/b*.tar"]
    assert shard_urls(f"{folder}/*2.tar") == [f"{folder}/shard-002.tar"]


def test_a_file_that_there_is_is_no_pattern(tmp_path: Path) -> None:
    """``a[1].tar`` as a pattern is a1.tar: another's examples, or none."""
    names = ["a1.tar", "a[1].tar", "a[2].tar", "{0..1}.tar"]
    files = [tmp_path / name for name in names]
    for file in files:
        file.touch()
    assert shard_urls(files) == shard_urls(list(map(str, files))) == list(map(str, files))
    assert shard_urls(tmp_path / "a[12].tar") == shard_urls(f"{tmp_path}/a[12].tar") == [f"{tmp_path}/a1.tar"]
    assert shard_urls(f"{tmp_path}/a[{{1..2}}].tar") == [f"{tmp_path}/a[1].tar", f"{tmp_path}/a[2].tar"]
    with pytest.raises(ValueError, match=r"b-\*\.tar'?: no file matches"):
        shard_urls([f"{tmp_path}/a*.tar", f"{tmp_path}/b-*.tar"])


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no file": (lambda: TarShards("none-*.tar"), "no file matches"),
    "order": (lambda: TarShards("a.tar", order="random"), "order='random'"),
    "open shards": (lambda: TarShards("a.tar", open_shards=0), "open_shards=0"),
    "no shards": (lambda: EchoLoader([1, 2, 3], 1, order="shards"), "has no shard_lengths"),
    **{
        pattern: (
            partial(TarShards, f"https://u:pw@h/{pattern}"),
            r"\*{3}@h/.*stands for \d{9} names, more than",
        )
        for pattern in ("{0..300000000}.tar", "{0..9999}-{0..9999}.tar?t=secret")
    },
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_is_refused(make: Callable[[], object], message: str) -> None:
    with time_limit(), pytest.raises(ValueError, match=message) as caught:
        make()
    assert "pw" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_nothing_stays_open(folder: Path) -> None:
    """Warnings are errors here, so a file that Python has to close itself fails the test."""
    for kind in ("tar", "indexed"):
        with EchoLoader(make(kind, str(folder)), 2, decode=label_alone, num_workers=1) as loader:
            next(iter(loader))
        abandoned = EchoLoader(make(kind, str(folder)), 2, decode=label_alone)
        next(iter(abandoned))
        abandoned.close()


def test_a_pipe_in_place_of_a_shard_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0.tar")
    with pytest.raises(OSError, match="no regular file"):
        IndexedTarShards([str(tmp_path / "0.tar")])
