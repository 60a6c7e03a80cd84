"""Tar shards as a stream: contents, order, resume, and damaged archives."""

import gzip
import io
import json
import random
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from adaecho import EchoLoader, TarShards
from adaecho.shards.tar_shards import shard_urls
from tests.datasets.files import write_tar
from tests.echo.sources import IDS, VARIANTS
from tests.shards.archives import NUM_EXAMPLES, label_alone, labels, number_of, urls, write_shard


def decode(example: dict[str, Any]) -> dict[str, Any]:
    number = number_of(example)
    return {"x": np.frombuffer(example["bin"], dtype=np.uint8), "label": number}


def first_bytes(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**example, "x": np.resize(example["x"], 3) + rng.random()}


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "a/folder/", "a folder/é" * 40 + "/"], ids=["", "folder", "long"])
def test_reads_what_the_standard_library_writes(tmp_path: Path, format: int, prefix: str) -> None:
    if format == tarfile.USTAR_FORMAT and len(prefix) > 100:
        prefix = "a folder/" * 15
    write_shard(tmp_path / "a.tar", list(range(9)), format=format, prefix=prefix)
    examples = list(TarShards(tmp_path / "a.tar"))
    assert [number_of(example) for example in examples] == list(range(9))
    assert examples[3]["__key__"] == f"{prefix}00003"


def test_extended_headers_of_times_are_skipped(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for row in range(50):
            member = tarfile.TarInfo(f"{row}.txt" if row % 2 else f"é{row}.txt")
            member.size, member.mtime = 600, 1.5
            archive.addfile(member, io.BytesIO(600 * b"x"))
    assert [one["__key__"] for one in TarShards(tmp_path / "a.tar")] == [
        f"{row}" if row % 2 else f"é{row}" for row in range(50)
    ]


def test_a_key_ends_at_the_first_dot_and_other_members_are_skipped(tmp_path: Path) -> None:
    names = ["README", "a.b/1.Seg.PNG", "a.b/1.jpg", "a.b/._1.jpg", ".hidden", "a.b/c/1.jpg", "2.cls"]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, name in enumerate(names):
            for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):
                other = tarfile.TarInfo("3.d")
                other.type, other.linkname = kind, "3.e"
                archive.addfile(other)
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"%d" % number))
    assert list(TarShards(tmp_path / "a.tar")) == [
        {"__key__": "a.b/1", "seg.png": b"1", "jpg": b"2"},
        {"__key__": "a.b/c/1", "jpg": b"5"},
        {"__key__": "2", "cls": b"6"},
    ]


def reference(folder: Path, seed: int, epoch: int, open_shards: int, rank: int, world: int) -> list[int]:
    """The order of an epoch, computed independently from lists."""
    shards = []
    for name in sorted(folder.iterdir()):
        with tarfile.open(name) as archive:
            shards.append([int(one.name[:5]) for one in archive if one.name.endswith("cls")])
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(shards))
    mine = [list(shards[number]) for number in order]
    if world <= len(shards):
        mine, rank, world = mine[rank::world], 0, 1
    draws = np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, 1]).random_raw(NUM_EXAMPLES)
    within, waiting, given = mine[:open_shards], mine[open_shards:], list[int]()
    while within:
        slot = int(draws[min(len(given), NUM_EXAMPLES - 1)] % np.uint64(len(within)))
        if within[slot]:
            given.append(within[slot].pop(0))
        else:
            within[slot : slot + 1] = [waiting.pop(0)] if waiting else []
    return given[rank::world]


@pytest.mark.parametrize("open_shards", [1, 2, 8])
@pytest.mark.parametrize("world", [1, 2, 4, 5])
def test_every_rank_reads_its_share_in_a_keyed_order(folder: Path, open_shards: int, world: int) -> None:
    shards, seen = TarShards(urls(folder), seed=5, open_shards=open_shards), list[list[int]]()
    for epoch in range(3):
        shards.set_epoch(epoch)
        of_epoch = []
        for rank in range(world):
            shards.set_share(rank, world)
            mine = [number_of(example) for example in shards]
            assert mine == reference(folder, 5, epoch, open_shards, rank, world)
            of_epoch += mine
        assert sorted(of_epoch) == list(range(NUM_EXAMPLES))
        seen.append(of_epoch)
    assert seen[0] != seen[1] != seen[2]


def test_the_stored_order(folder: Path) -> None:
    assert [number_of(one) for one in TarShards(urls(folder), shuffle=False)] == list(range(NUM_EXAMPLES))


@pytest.mark.parametrize("place", ["files", "http"])
@pytest.mark.parametrize("open_shards", [1, 2, 8])
@pytest.mark.parametrize("share", [(0, 1), (1, 3), (2, 5)])
def test_an_epoch_starts_at_any_position(
    folder: Path, store: Any, place: str, open_shards: int, share: tuple[int, int]
) -> None:
    shards = TarShards(urls(folder if place == "files" else store.url), open_shards=open_shards)
    shards.set_share(*share)
    whole = [number_of(example) for example in shards]
    one = iter(shards)
    for taken in range(len(whole) + 1):
        position = json.loads(json.dumps([int(part) for part in one.position]))
        if taken % 3 == 0 or place == "files":
            rest = shards.iterate_from(position)
            assert [number_of(example) for example in rest] == whole[taken:]
        if taken % 5 == 0:
            one.close()  # and goes on
        example = next(one, None)
        assert (example is None) == (taken == len(whole))
    if place == "http":
        assert any(store.ranges)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_restores_at_every_batch(folder: Path, variant: dict[str, Any], num_workers: int) -> None:
    common: dict[str, Any] = {
        "batch_size": 3, "shuffle_buffer": 6, "decode": decode, "augment": first_bytes, "rank": 1,
        "world_size": 2, **variant,
    }  # fmt: skip
    with EchoLoader(TarShards(urls(folder)), num_workers=num_workers, **common) as loader:
        iterator = iter(loader)
        states, batches = [loader.state_dict()], []
        for _ in range(6):
            batches.append(next(iterator)["x"].tolist())
            states.append(loader.state_dict())
    for position, state in enumerate(states):
        shards = TarShards(urls(folder))
        with EchoLoader(shards, num_workers=(num_workers + position) % 2, **common) as restored:
            restored.load_state_dict(state)
            rest = [batch["x"].tolist() for batch in islice(restored, 2)]
            assert rest[: 6 - position] == batches[position : position + 2]


def test_a_resume_rereads_only_the_buffer(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", list(range(400)))

    def loader() -> EchoLoader:
        return EchoLoader(TarShards(tmp_path / "a.tar"), 4, decode=label_alone, shuffle_buffer=8)

    with loader() as first, loader() as restored:
        list(islice(first, 80))
        restored.load_state_dict(first.state_dict())
        assert labels(islice(restored, 3)) == labels(islice(first, 3))
        assert 8 <= restored.reread_examples < 150


def test_epochs_of_a_loader_are_passes(folder: Path) -> None:
    with EchoLoader(TarShards(urls(folder)), 4, decode=label_alone, epochs=1) as loader:
        passes = [labels(loader) for _ in range(3)]
        loader.set_epoch(1)
        assert labels(loader) == passes[1]
    assert passes[0] != passes[1] != passes[2]
    assert all(sorted(one) == list(range(NUM_EXAMPLES)) for one in passes)


def _cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def _garbage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    with tarfile.open(file) as archive:
        begin = archive.getmembers()[-2].offset
    content[begin : begin + 512] = bytes(range(256)) * 2
    file.write_bytes(content)


def _compress(file: Path) -> None:
    file.write_bytes(gzip.compress(file.read_bytes()))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda file: _cut(file, file.stat().st_size // 3), "the archive is empty or truncated"),
    "cut at a block": (lambda file: _cut(file, 512), "byte 0: the archive is empty or truncated"),
    "cut before its end": (lambda file: _cut(file, 0), "byte 0: the archive is empty or truncated"),
    "no archive": (lambda file: file.write_bytes(b"x" * 2048), r"byte 512: \w+"),
    "compressed": (_compress, r"byte 512: \w+"),
    "header": (_garbage, r"byte \d{3,}: "),
    "the same name twice": (
        lambda file: write_tar(file, [("1.a", b"x"), ("1.A", b"y")]),
        "1 has two files 'a'",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_archive_is_named(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    write_shard(tmp_path / "a.tar", list(range(9)))
    damage(tmp_path / "a.tar")
    shards = iter(TarShards(tmp_path / "a.tar"))
    for _ in range(2):  # it is no end of a pass when asked again
        with pytest.raises(
            tarfile.ReadError, match=rf"a\.tar: not a complete plain tar archive, .*{message}"
        ):
            list(shards)


def test_an_archive_truncated_between_members_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [(f"{row}.txt", b"x") for row in range(4)])
    _cut(tmp_path / "a.tar", 4 * 1024)
    with pytest.raises(tarfile.ReadError, match="byte 4096: the archive is empty or truncated"):
        list(TarShards(tmp_path / "a.tar"))


def test_archives_without_examples(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [])
    write_shard(tmp_path / "b.tar", [3])
    assert [number_of(one) for one in TarShards(tmp_path / "*.tar")] == [3]
    loader = EchoLoader(TarShards(tmp_path / "a.tar"), 1)
    with pytest.raises(ValueError, match="is empty"):
        next(iter(loader))


def test_names_of_shards(folder: Path) -> None:
    names = [f"{folder}/shard-{number:03d}.tar" for number in range(4)]
    assert shard_urls(f"{folder}/shard-*.tar") == shard_urls(urls(folder)) == shard_urls(names) == names
    assert shard_urls("s3://a/{0..1}/{08..10}.tar") == [
        f"s3://a/{one}/{other}.tar" for one in "01" for other in ("08", "09", "10")
    ]
    with pytest.raises(ValueError, match=r"absent-\*\.tar': no file matches"):
        shard_urls(f"{folder}/absent-*.tar")
    with pytest.raises(ValueError, match="the list is empty"):
        shard_urls([])
    with pytest.raises(ValueError, match="open_shards=0"):
        TarShards(folder / "a.tar", open_shards=0)
    with pytest.raises(FileNotFoundError):
        next(iter(TarShards(folder / "absent.tar")))


def test_shards_of_a_store_of_fsspec(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    for file in folder.iterdir():
        memory.pipe(f"/bucket/{file.name}", file.read_bytes())
    shards = TarShards("memory://bucket/shard-{000..003}.tar")
    first = iter(shards)
    seen = [number_of(next(first)) for _ in range(7)]
    seen += [number_of(one) for one in shards.iterate_from(first.position)]
    assert sorted(seen) == list(range(NUM_EXAMPLES))
    with pytest.raises(
        ConnectionError, match=r"memory://bucket/absent\.tar: cannot be read in attempt 1 at byte 0"
    ):
        next(iter(TarShards("memory://bucket/absent.tar")))


def test_random_archives_equal_those_of_tarfile(tmp_path: Path) -> None:
    draw = random.Random(0)
    for round in range(20):
        names = [f"{'d/' * draw.randrange(3)}{row}{'n' * draw.choice([0, 90, 200])}" for row in range(12)]
        members = [
            (f"{name}.{kind}", draw.randbytes(draw.choice([0, 1, 511, 512, 513, 3000])))
            for name in names
            for kind in ("a", "b.c")
        ]
        write_tar(tmp_path / "a.tar", members, format=draw.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
        contents = dict(members)
        assert list(TarShards(tmp_path / "a.tar")) == [
            {"__key__": name, "a": contents[f"{name}.a"], "b.c": contents[f"{name}.b.c"]} for name in names
        ], round
