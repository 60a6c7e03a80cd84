"""Tar archives member by member, against the standard library's writer."""

import gzip
import io
import random
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from adaecho.shards import remote, tar
from adaecho.shards.remote import Retries, Transfer
from adaecho.shards.tar import groups
from tests.shards.archives import number_of, write_shard
from tests.shards.hostile import archive, mutated, time_limit, verdict, with_sum


def read(path: Path, start: int = 0) -> list[dict[str, str | bytes]]:
    transfer = Transfer(str(path), start, retries=Retries())
    try:
        return [group.example for group in groups(transfer, read=True)]
    finally:
        transfer.close()


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "b\u00fccher.v2/", "long/" * 60], ids=["plain", "folder", "long"])
def test_reads_what_the_standard_library_writes(tmp_path: Path, format: int, prefix: str) -> None:
    if format == tarfile.USTAR_FORMAT:
        prefix = prefix[:200]
    write_shard(tmp_path / "a.tar", list(range(20)), format=format, prefix=prefix)
    examples = read(tmp_path / "a.tar")
    assert [number_of(example) for example in examples] == list(range(20))
    assert examples[3]["__key__"] == f"{prefix}00003"


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_example_can_be_begun_at(tmp_path: Path, format: int) -> None:
    write_shard(tmp_path / "a.tar", list(range(8)), format=format, prefix="" if format == 0 else "name/" * 60)
    transfer = Transfer(str(tmp_path / "a.tar"), retries=Retries())
    found = list(groups(transfer, read=False))
    transfer.close()
    assert [group.example["bin"] for group in found] == [b""] * 8
    for number, group in enumerate(found):
        examples = read(tmp_path / "a.tar", group.start)
        assert [number_of(example) for example in examples] == list(range(number, 8))
        assert number == 7 or group.end == found[number + 1].start


@pytest.mark.parametrize("piece", [1, 7, 511, 513, 5000])
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_pieces_may_end_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: int, piece: int
) -> None:
    write_shard(tmp_path / "a.tar", list(range(8)), format=format, prefix="name/" * 60 if format else "")
    whole = read(tmp_path / "a.tar")
    monkeypatch.setattr(remote, "_PIECE", piece)
    assert read(tmp_path / "a.tar") == whole
    transfer = Transfer(str(tmp_path / "a.tar"), retries=Retries())
    starts = [group.start for group in groups(transfer, read=False)]
    transfer.close()
    assert [read(tmp_path / "a.tar", start) for start in starts] == [whole[n:] for n in range(8)]


def add(archive: tarfile.TarFile, name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = len(content), kind, "00001.a"
    archive.addfile(member, io.BytesIO(content))


def test_other_members_are_passed_over(tmp_path: Path) -> None:
    with tarfile.open(
        tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"}
    ) as archive:
        add(archive, "folder", kind=tarfile.DIRTYPE)
        add(archive, "README", b"no extension")
        add(archive, "folder/.hidden", b"no name")
        add(archive, "00001.a", b"one")
        add(archive, "latest", kind=tarfile.SYMTYPE)
        add(archive, "00001.SEG.png", b"two")
        add(archive, "00002.empty")
    assert read(tmp_path / "a.tar") == [
        {"__key__": "00001", "a": b"one", "seg.png": b"two"},
        {"__key__": "00002", "empty": b""},
    ]


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (tarfile.LNKTYPE, "a hard link.*--hard-dereference"),
        (tarfile.SYMTYPE, "a symbolic link.*--dereference"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file.*without --sparse"),
    ],
)
def test_a_file_that_is_not_stored_as_it_was_is_an_error(tmp_path: Path, kind: bytes, remedy: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "0.jpg", b"one")
        add(archive, "1.jpg", kind=kind)
    with pytest.raises(ValueError, match=rf"a\.tar: 1\.jpg \(byte 1024\) is {remedy}"):
        read(tmp_path / "a.tar")


@pytest.mark.parametrize("version", ["0.0", "0.1", "1.0"])
def test_a_sparse_file_in_an_extended_header_is_an_error(tmp_path: Path, version: str) -> None:
    # As GNU tar writes them (its manual, "Storing Sparse Files").
    headers = {"GNU.sparse.size": "4096"} if version < "1" else {"GNU.sparse.major": "1"}
    headers |= {} if version == "0.0" else {"GNU.sparse.name": "1.jpg"}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("1.jpg" if version == "0.0" else "GNUSparseFile.1/1.jpg")
        member.pax_headers = headers
        archive.addfile(member)
    with pytest.raises(ValueError, match=r"a\.tar: .*\(byte 0\) is a sparse file"):
        read(tmp_path / "a.tar")


@pytest.mark.parametrize("name", ["1.A", "1.__key__"])
def test_a_field_of_a_name_twice_is_an_error(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "1.a")
        add(archive, name)
    with pytest.raises(ValueError, match=rf"a\.tar: {name} \(byte 512\) is the second '.*' of 1;"):
        read(tmp_path / "a.tar")


ZEROS = bytes(512)


def body(path: Path, numbers: list[int]) -> bytes:
    """An archive of these examples without its end."""
    write_shard(path, numbers)
    transfer = Transfer(str(path), retries=Retries())
    *_, last = groups(transfer, read=False)
    transfer.close()
    return path.read_bytes()[: last.end]


@pytest.mark.parametrize("padding", [0, 1, 18, 4000], ids=lambda blocks: f"{blocks} blocks")
def test_an_archive_ends_with_two_blocks_of_zeros_or_more(tmp_path: Path, padding: int) -> None:
    content = body(tmp_path / "a.tar", [1, 2, 3]) + 2 * ZEROS + padding * ZEROS
    (tmp_path / "a.tar").write_bytes(content)
    assert [number_of(example) for example in read(tmp_path / "a.tar")] == [1, 2, 3]
    (tmp_path / "none.tar").write_bytes(20 * ZEROS)
    assert read(tmp_path / "none.tar") == []


@pytest.mark.parametrize("contents", [True, False], ids=["read", "indexed"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda one, two: b"", "the file is empty"),  # noqa: ARG005
        (lambda one, two: one[:700], "the archive ends at 700, within a file"),  # noqa: ARG005
        (lambda one, two: b"x" * 5000, "no tar header at byte 0"),  # noqa: ARG005
        (lambda one, two: gzip.compress(one), "it is compressed; shards must be plain tar"),  # noqa: ARG005
        (lambda one, two: one + two, "ends at byte {end} without its two blocks of zeros"),
        (lambda one, two: one + two + ZEROS, "ends at byte {end} without its two blocks of zeros"),
        (lambda one, two: one + two + ZEROS + ZEROS[:9], "ends at byte {end} without its two blocks"),
        (lambda one, two: one + two[:100], "no tar header at byte {one}: truncated header"),
        (lambda one, two: one + ZEROS + two + 2 * ZEROS, "zeros from byte {one} on, .* and something else"),
        (lambda one, two: one + 2 * ZEROS + two + 2 * ZEROS, "zeros from byte {one} on, .* several archives"),
        (lambda one, two: one + 300 * ZEROS + two + 2 * ZEROS, "zeros from byte {one} on"),
        (lambda one, two: ZEROS + one + two + 2 * ZEROS, "zeros from byte 0 on"),
        (lambda one, two: one + two + 2 * ZEROS + b"\0\0x", "zeros from byte {both} on"),
    ],
    ids=[
        "empty", "cut within a file", "text", "compressed",
        "cut between examples", "one block", "within the second", "within a header", "one within",
        "two within", "many within", "one before", "something after",
    ],
)  # fmt: skip
def test_an_archive_that_is_not_whole_is_an_error(
    tmp_path: Path, damage: Any, message: str, contents: bool
) -> None:
    one, two = body(tmp_path / "a.tar", [1, 2]), body(tmp_path / "b.tar", [3, 4, 5])
    content = damage(one, two)
    path = tmp_path / "damaged.tar"
    path.write_bytes(content)
    message = message.format(one=len(one), both=len(one + two), end=len(content))
    transfer = Transfer(str(path), retries=Retries())
    found = groups(transfer, read=contents)
    seen = []
    with pytest.raises(ValueError, match=rf"damaged\.tar: .*{message}"):
        seen.extend(group.example for group in found)
    transfer.close()
    if contents:
        assert [number_of(example) for example in seen] == list(range(1, len(seen) + 1))


def test_a_damaged_extended_header_names_file_and_byte(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", [1], format=tarfile.PAX_FORMAT, prefix="name/" * 60)
    content = (tmp_path / "a.tar").read_bytes()
    for wrong in (b"nonsense path=", b"0 path=", b"999999 path="):
        at = content.index(b" path=") - 3
        damaged = content[:at] + wrong + content[at + len(wrong) :]
        (tmp_path / "b.tar").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"b\.tar: damaged extended header at byte 0: "):
            read(tmp_path / "b.tar")


def header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> bytes:
    """With a size in base 256, which has a sign."""
    member = tarfile.TarInfo(name)
    member.type = kind
    block = bytearray(member.tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = (size % 256**11).to_bytes(11, "big").rjust(12, b"\xff" if size < 0 else b"\x80")
    return bytes(with_sum(block))


def extended(kind: bytes, content: bytes) -> bytes:
    """An extended header with its content."""
    return header("extended", kind, len(content)) + content.ljust(-(-len(content) // 512) * 512, b"\0")


L, K, X, G = tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE


@pytest.mark.parametrize("contents", [True, False], ids=["read", "indexed"])
@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (header("0.jpg", size=-512), "the header at byte 512 claims a file of -512 bytes"),
        (header("0.jpg", size=-1), "the header at byte 512 claims a file of -1 bytes"),
        (header("0", L, -512), "the header at byte 512 claims a file of -512 bytes"),
        (header("0", X, -(2**60)), "the header at byte 512 claims a file of -1152921504606846976 bytes"),
        (header("0", L, 2**40), "the extended header at byte 512 claims 1099511627776 bytes"),
        (extended(X, b"13 size=-512\n"), "damaged extended header at byte 512: size=-512"),
        (extended(X, b"12 size=1_0\n"), "damaged extended header at byte 512: size=1_0"),
        (extended(X, b"12 path=a.b\0"), "damaged extended header at byte 512: no record at its byte 0"),
        (extended(X, b"5 a=\n99 path=x\n"), "damaged extended header at byte 512: no record at its byte 5"),
        (extended(G, b"12 path=a.b\n"), "the global header at byte 512 gives one name or size to all"),
        (extended(L, b"a.b") + extended(X, b"12 path=c.d\n"), "header at byte 1536 contradicts that at 512"),
        (extended(L, b"a.b") + bytes(1024), "no file follows the extended header at byte 512"),
    ],
    ids=[
        "whole block", "one byte", "long name", "extended", "huge", "pax", "underscore", "no newline",
        "beyond", "global", "two names", "no file",
    ],
)  # fmt: skip
def test_a_header_that_is_hostile_names_file_and_byte(
    tmp_path: Path, headers: bytes, message: str, contents: bool
) -> None:
    (tmp_path / "a.tar").write_bytes(header("before.jpg") + headers + header("after.jpg") + 2 * ZEROS)
    transfer = Transfer(str(tmp_path / "a.tar"), retries=Retries())
    with pytest.raises(ValueError, match=rf"a\.tar: .*{message}"), time_limit():
        list(groups(transfer, read=contents))
    transfer.close()


@pytest.mark.parametrize("contents", [True, False], ids=["read", "indexed"])
@pytest.mark.parametrize(("size", "last"), [(0, "one.4"), (600, "one.3")], ids=["files", "bytes"])
def test_an_example_without_end_names_file_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, last: str, contents: bool
) -> None:
    monkeypatch.setattr(tar, "_MOST_FILES", 4)
    monkeypatch.setattr(tar, "_LARGEST", 3 * 1536)
    endless = (header(f"one.{number}", size=size) + bytes(-(-size // 512) * 512) for number in range(9))
    (tmp_path / "a.tar").write_bytes(header("before.jpg") + b"".join(endless) + 2 * ZEROS)
    transfer = Transfer(str(tmp_path / "a.tar"), retries=Retries())
    found = groups(transfer, read=contents)
    assert next(found).example["__key__"] == "before"
    with pytest.raises(
        ValueError, match=rf"a\.tar: up to {last} \(byte \d+\) one takes \d files and \d+ bytes"
    ):
        next(found)
    transfer.close()


def test_the_name_in_an_extended_header_is_taken_as_it_is(tmp_path: Path) -> None:
    files = [
        extended(L, b"long\0rest") + extended(K, b"link\0") + header("0.jpg"),
        extended(L, b"1.jpg") + header("x"),
        extended(tarfile.SOLARIS_XHDTYPE, b"15 path=2.jpg\n\n") + header("x"),
        extended(G, b"13 comment=x\n") + header("3.jpg"),
    ]
    (tmp_path / "a.tar").write_bytes(b"".join(files) + 2 * ZEROS)
    assert read(tmp_path / "a.tar") == [
        {"__key__": "1", "jpg": b""},
        {"__key__": "2", "jpg\n": b""},
        {"__key__": "3", "jpg": b""},
    ]


def test_mutated_headers_are_read_as_the_standard_library_reads_them_or_refused(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for number in range(2000):
        choose = random.Random(number)
        outcomes[verdict(mutated(archive(choose), choose), tmp_path / "a.tar")] += 1
    assert set(outcomes) == {"same", "refused"}
