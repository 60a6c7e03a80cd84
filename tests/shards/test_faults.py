"""Servers and files that fail: every example is as stored, or an error names the shard; none is lost.

The short form of a longer campaign: seeded, and bounded in number and time.
"""

import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader, IndexedTarShards, Retries
from adaecho.shards import TransferError
from adaecho.shards.remote import Transfer
from adaecho.shards.tar import groups
from tests.needs import first_form
from tests.shards.archives import NUM_EXAMPLES, QUICK, label_alone, labels, make, number_of, urls, write_shard
from tests.shards.nginx import Proxy, needs_nginx

KINDS = ["tar", "indexed"]
PATIENT = Retries(tries=8, delay_s=0.001, timeout_s=1)


def loader_of(kind: str, place: str | Path, retries: Retries = QUICK, **options: Any) -> EchoLoader:
    source = make(kind, place, retries, order="stored")
    return EchoLoader(source, 1, order="stored", decode=label_alone, **options)


def replace(path: Path, content: bytes) -> None:
    """Put another file in the place of one; its time differs, as that of a later write does."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.utime(new, (1_000_000_000, 1_000_000_000))
    new.replace(path)


def ends_of_examples(path: Path) -> list[int]:
    transfer = Transfer(str(path), retries=QUICK)
    ends = [group.end for group in groups(transfer, read=False)]
    transfer.close()
    return ends


def other_of_equal_length(path: Path) -> bytes:
    """A whole archive of the same length with other labels: what nothing but its version can tell."""
    content = path.read_bytes()
    write_shard(path.with_suffix(".other"), list(range(50, 50 + 40)))
    other = path.with_suffix(".other").read_bytes()
    return (content[:1024] + other[1024:])[: len(content)].ljust(len(content), b"\0")


@needs_nginx
@pytest.mark.parametrize("seed", first_form(*range(6), also=range(6, 12)))
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_fails_at_random_loses_no_example(
    proxy: Proxy, folder: Path, kind: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    loader = loader_of(kind, proxy.url, PATIENT, epochs=1, num_workers=seed % 3)
    faults = rng.choice(["cut", "reset", "stall"], size=12, p=[0.5, 0.4, 0.1]).tolist()
    proxy.faults = [(fault, int(rng.integers(0, 8000))) for fault in faults]
    victim = folder / f"shard-{rng.integers(4):03d}.tar"
    content, cut = victim.read_bytes(), int(rng.choice(ends_of_examples(victim)))
    changed = (
        content, b"", content[:cut], content[: cut - 700], content[:cut] + bytes(512) + content[cut:],
        other_of_equal_length(victim),
    )[seed % 6]  # fmt: skip
    change_at = int(rng.integers(NUM_EXAMPLES))
    seen: list[int] = []
    message = ""
    try:
        with loader:
            for batch in loader:
                seen += labels([batch])
                if len(seen) == change_at and changed != content:
                    replace(victim, changed)
                    loader.stop()
    except (TransferError, ValueError) as error:
        message = str(error)
    if message:
        assert changed != content  # connections alone are never the end
        assert victim.name in message
    assert seen == list(range(len(seen) if message else NUM_EXAMPLES))


def change(path: Path, length: str) -> None:
    content = path.read_bytes()
    shorter, longer = content[:1024] + bytes(1024), content + bytes(10240)
    replace(path, {"shorter": shorter, "longer": longer}.get(length) or other_of_equal_length(path))


HAS_CHANGED = r"shard-000\.tar: .*the file has changed: it was \d+ bytes"
OVER_HTTP = [pytest.param(f"http {length}", marks=needs_nginx) for length in ("equal", "longer", "shorter")]


@pytest.mark.parametrize("form", [*OVER_HTTP, "local equal"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_changed_after_stop_is_refused(
    request: pytest.FixtureRequest, folder: Path, kind: str, form: str
) -> None:
    place, length = form.split()
    with loader_of(kind, request.getfixturevalue("proxy").url if place == "http" else folder) as loader:
        assert labels(islice(loader, 2)) == [0, 1]
        loader.stop()
        change(folder / "shard-000.tar", length)
        with pytest.raises(TransferError, match=HAS_CHANGED):
            list(islice(loader, NUM_EXAMPLES))


def test_a_shard_that_changed_behind_a_loaded_index_is_refused(folder: Path, tmp_path: Path) -> None:
    """An index file knows no times of local files, which copies of them have anew."""
    shards, index = str(folder / "shard-{000..003}.tar"), tmp_path / "index.npz"
    IndexedTarShards(shards, index=index)
    source = IndexedTarShards(shards, index=index)
    assert label_alone(source[0]) == {"label": 0}
    change(folder / "shard-000.tar", "equal")
    with pytest.raises(TransferError, match=HAS_CHANGED):
        source[1]


def test_an_index_knows_shards_without_examples(tmp_path: Path) -> None:
    for name, member, content in (("a", "1.cls", b""), ("b", "README", b"x" * 600), ("c", "2.cls", b"")):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            about = tarfile.TarInfo(member)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    index = tmp_path / "index.npz"
    for _ in range(2):
        assert IndexedTarShards(str(tmp_path / "*.tar"), index=index).shard_lengths.tolist() == [1, 0, 1]
    with tarfile.open(tmp_path / "b.tar", "a") as archive:
        archive.addfile(tarfile.TarInfo("more.cls"))
    with pytest.raises(ValueError, match=r"b\.tar holds more examples than it"):
        IndexedTarShards(str(tmp_path / "*.tar"), index=index)


def test_an_index_notices_what_was_appended_into_the_padding(tmp_path: Path) -> None:
    shard, index = tmp_path / "a.tar", tmp_path / "index.npz"
    for mode in ("w", "a"):
        with tarfile.open(shard, mode) as archive:
            archive.addfile(tarfile.TarInfo(f"{mode}.cls"))
            if mode == "w":  # what is no example may follow the last
                archive.addfile(tarfile.TarInfo("README"))
        if mode == "w":
            assert [len(IndexedTarShards(str(shard), index=index)) for _ in range(2)] == [1, 1]
    assert shard.stat().st_size == tarfile.RECORDSIZE
    with pytest.raises(ValueError, match=r"a\.tar holds more examples than it; delete it"):
        IndexedTarShards(str(shard), index=index)


@pytest.mark.parametrize("form", [*OVER_HTTP, "local longer"])
def test_a_shard_that_changed_before_a_resume_is_refused(
    request: pytest.FixtureRequest, folder: Path, form: str
) -> None:
    place, length = form.split()
    at = request.getfixturevalue("proxy").url if place == "http" else folder
    with loader_of("tar", at) as first:
        assert labels(islice(first, 2)) == [0, 1]
        state = first.state_dict()
    with loader_of("tar", at) as unchanged:
        unchanged.load_state_dict(state)
        assert labels(islice(unchanged, 2)) == [2, 3]
    change(folder / "shard-000.tar", length)

    def go_on(loader: EchoLoader) -> None:
        loader.load_state_dict(state)
        next(iter(loader))

    with loader_of("tar", at) as restored, pytest.raises(TransferError, match=HAS_CHANGED):
        go_on(restored)
    write_shard(folder / "shard-000.tar", [0, 1, 2])
    with loader_of("tar", at) as anew:  # a new source takes the file as it is
        assert labels(islice(anew, 2)) == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_local_shard_is_the_same_shard(folder: Path, tmp_path: Path, kind: str) -> None:
    def loader() -> EchoLoader:
        source = make("tar", folder, order="stored")
        if kind == "indexed":
            source = IndexedTarShards(urls(folder), index=tmp_path / "index.npz")
        return EchoLoader(source, 1, order="stored", decode=label_alone)

    with loader() as first:
        assert labels(islice(first, 2)) == [0, 1]
        state = first.state_dict()
    for path in folder.glob("*.tar"):
        replace(path, path.read_bytes())  # another time, as a copy to a node's own disk has
    with loader() as restored:
        restored.load_state_dict(state)
        assert labels(islice(restored, 3)) == [2, 3, 4]


_INDEX = """
import sys
from adaecho import IndexedTarShards
print("begun", flush=True)
try:
    IndexedTarShards(sys.argv[1])
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@needs_nginx
def test_ctrl_c_ends_the_making_of_an_index_from_a_server_that_drips(proxy: Proxy) -> None:
    proxy.faults = 100 * [("drip", 0)]
    command = [sys.executable, "-c", _INDEX, urls(proxy.url)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.dripped.wait(240)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert output.splitlines() == ["begun", "interrupted"]


@pytest.mark.parametrize("kind", [tarfile.DIRTYPE, tarfile.XGLTYPE, tarfile.REGTYPE])
def test_ctrl_c_ends_the_reading_of_headers_where_no_example_is_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes
) -> None:
    member, asked = tarfile.TarInfo("without-an-extension"), []
    member.type = kind
    (tmp_path / "shard.tar").write_bytes(100 * member.tobuf(tarfile.USTAR_FORMAT) + bytes(1024))

    def rest(seconds: float) -> None:
        asked.append(seconds)
        if len(asked) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("adaecho.shards.tar.rest", rest)
    with pytest.raises(KeyboardInterrupt):
        IndexedTarShards(str(tmp_path / "shard.tar"))


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Where one is kept."""
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept" / "index.npz"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("8192 requested and 0 written")])
def test_an_index_that_can_not_be_written_leaves_nothing(
    folder: Path, index: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    save = np.savez

    def fail(file: Any, **arrays: Any) -> None:
        save(file, **arrays)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(np, "savez", fail)
        with pytest.raises(type(error), match=r"index\.npz" if isinstance(error, OSError) else None):
            IndexedTarShards(urls(folder), index=index)
    assert not list(index.parent.iterdir())
    assert len(IndexedTarShards(urls(folder), index=index)) == NUM_EXAMPLES


# Bytes that are no archive, and sound archives that are no index.
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: whole[:0],
    "cut": lambda whole: whole[:700],
    "text": lambda _: b"not an index at all",
    "zeros within": lambda whole: whole[:60] + bytes(60) + whole[120:],
}
ARRAYS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "lengths": lambda of: {"shard_lengths": of["shard_lengths"] + 1},
    "overlap": lambda of: {"spans": np.repeat(of["spans"][:1], len(of["spans"]), 0)},
    "form": lambda of: {"spans": of["spans"].astype(float)},
}
PARTS = ("urls", "shard_lengths", "spans", "versions")


@pytest.mark.parametrize("damage", [*BYTES, *ARRAYS, *PARTS, "compressed"])
def test_a_damaged_index_is_refused_with_the_remedy(folder: Path, index: Path, damage: str) -> None:
    kept = IndexedTarShards(urls(folder), index=index)
    assert kept[3] == IndexedTarShards(urls(folder), index=index)[3]
    with np.load(index) as saved:
        arrays = dict(saved)
    if damage in BYTES:
        index.write_bytes(BYTES[damage](index.read_bytes()))
    elif damage == "compressed":
        np.savez_compressed(index, **arrays)
    else:
        arrays |= ARRAYS[damage](arrays) if damage in ARRAYS else {}
        np.savez(index, **{name: array for name, array in arrays.items() if name != damage})
    with pytest.raises(ValueError, match=r"index\.npz.*: it is damaged, or no index of this version.*delete"):
        IndexedTarShards(urls(folder), index=index)
    index.unlink()
    anew = IndexedTarShards(urls(folder), index=index)
    assert [number_of(example) for example in anew] == list(range(NUM_EXAMPLES))


@pytest.mark.parametrize("name", [".", "absent/index.npz"])
def test_where_no_index_can_lie_is_told_before_anything_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"index='.*': it is a folder, or lies in none"):
        IndexedTarShards(tmp_path / "absent.tar", index=tmp_path / name)


def test_a_bit_of_an_index_that_is_another_is_noticed_or_changes_nothing(folder: Path, index: Path) -> None:
    def origins(shards: IndexedTarShards) -> list[str]:
        return [shards.origin(row) for row in range(len(shards))]

    kept = IndexedTarShards(urls(folder), index=index)
    whole, refused = index.read_bytes(), 0
    for at in range(0, len(whole), 3):
        index.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            found = IndexedTarShards(urls(folder), index=index)
        except ValueError as error:
            assert "index.npz" in str(error)  # noqa: PT017 (others may be read as they were)
            refused += 1
            continue
        assert origins(found) == origins(kept)
        assert found[NUM_EXAMPLES - 1] == kept[NUM_EXAMPLES - 1]
    assert refused > len(whole) // 6
