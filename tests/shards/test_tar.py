"""Tar archives member by member, against the standard library's writer."""

import gzip
import random
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaecho.shards import remote, tar
from adaecho.shards.remote import Retries, Transfer
from adaecho.shards.tar import Group, groups
from tests.shards.archives import contents, number_of, write_shard
from tests.shards.hostile import FORMATS, archive, mutated, time_limit, verdict, with_sum

ZEROS = bytes(512)
END = 2 * ZEROS


def found(path: Path, start: int = 0, *, contents: bool = True) -> Iterator[Group]:
    transfer = Transfer(str(path), start, retries=Retries())
    try:
        yield from groups(transfer, read=contents)
    finally:
        transfer.close()


def read(path: Path, start: int = 0) -> list[dict[str, str | bytes]]:
    return [group.example for group in found(path, start)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("prefix", ["", "b\u00fccher.v2/", "long/" * 60], ids=["plain", "folder", "long"])
def test_reads_what_the_standard_library_writes(tmp_path: Path, format: int, prefix: str) -> None:
    if format == tarfile.USTAR_FORMAT:
        prefix = prefix[:200]
    write_shard(tmp_path / "a.tar", list(range(20)), format=format, prefix=prefix)
    examples = read(tmp_path / "a.tar")
    assert [number_of(example) for example in examples] == list(range(20))
    assert examples[3]["__key__"] == f"{prefix}00003"


@pytest.mark.parametrize("piece", [remote._PIECE, 1, 7, 511, 513, 5000])
@pytest.mark.parametrize("format", FORMATS)
def test_every_example_can_be_begun_at_and_pieces_may_end_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: int, piece: int
) -> None:
    monkeypatch.setattr(remote, "_PIECE", piece)
    path = tmp_path / "a.tar"
    write_shard(path, list(range(8)), format=format, prefix="name/" * 60 if format else "")
    indexed = list(found(path, contents=False))
    assert [group.example["bin"] for group in indexed] == [b""] * 8
    for number, group in enumerate(indexed):
        assert [number_of(example) for example in read(path, group.start)] == list(range(number, 8))
        assert number == 7 or group.end == indexed[number + 1].start


def padded(content: bytes) -> bytes:
    return content.ljust(-(-len(content) // 512) * 512, b"\0")


def member(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, pax: dict[str, str] | None = None
) -> bytes:
    """A file of an archive as the standard library writes it."""
    about = tarfile.TarInfo(name)
    about.size, about.type, about.linkname, about.pax_headers = len(content), kind, "00001.a", pax or {}
    return about.tobuf(tarfile.PAX_FORMAT if pax else tarfile.USTAR_FORMAT) + padded(content)


def header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> bytes:
    """With a size in base 256, which has a sign."""
    block = bytearray(member(name, kind=kind))
    block[124:136] = (size % 256**11).to_bytes(11, "big").rjust(12, b"\xff" if size < 0 else b"\x80")
    return bytes(with_sum(block))


def extended(kind: bytes, content: bytes) -> bytes:
    """An extended header with its content."""
    return header("extended", kind, len(content)) + padded(content)


def body(*numbers: int) -> bytes:
    """An archive of these examples without its end."""
    return b"".join(member(f"{n:05d}.{kind}", one) for n in numbers for kind, one in contents(n).items())


def test_other_members_are_passed_over(tmp_path: Path) -> None:
    global_header = tarfile.TarInfo.create_pax_global_header({"comment": "all"})
    members = (
        member("folder", kind=tarfile.DIRTYPE), member("README", b"no extension"),
        member("folder/.hidden", b"no name"), member("00001.a", b"one"),
        member("latest", kind=tarfile.SYMTYPE), member("00001.SEG.png", b"two"), member("00002.empty"),
    )  # fmt: skip
    (tmp_path / "a.tar").write_bytes(global_header + b"".join(members) + END)
    assert read(tmp_path / "a.tar") == [
        {"__key__": "00001", "a": b"one", "seg.png": b"two"},
        {"__key__": "00002", "empty": b""},
    ]


@pytest.mark.parametrize("padding", [0, 1, 18, 4000], ids=lambda blocks: f"{blocks} blocks")
def test_an_archive_ends_with_two_blocks_of_zeros_or_more(tmp_path: Path, padding: int) -> None:
    (tmp_path / "a.tar").write_bytes(body(1, 2, 3) + END + padding * ZEROS)
    assert [number_of(example) for example in read(tmp_path / "a.tar")] == [1, 2, 3]
    (tmp_path / "none.tar").write_bytes(20 * ZEROS)
    assert read(tmp_path / "none.tar") == []


ONE, TWO = body(1, 2), body(3, 4, 5)
AT_ONE, BOTH = len(ONE), len(ONE + TWO)
NOT_WHOLE = {
    "empty": (b"", "the file is empty"),
    "cut within a file": (ONE[:700], "the archive ends at 700, within a file"),
    "text": (b"x" * 5000, "no tar header at byte 0"),
    "compressed": (gzip.compress(ONE), "it is compressed; shards must be plain tar"),
    "cut between examples": (ONE + TWO, f"ends at byte {BOTH} without its two blocks of zeros"),
    "one block": (ONE + TWO + ZEROS, f"ends at byte {BOTH + 512} without its two blocks of zeros"),
    "within the second": (ONE + TWO + ZEROS + bytes(9), f"ends at byte {BOTH + 521} without its two blocks"),
    "within a header": (ONE + TWO[:100], f"no tar header at byte {AT_ONE}: truncated header"),
    "one within": (ONE + ZEROS + TWO + END, f"zeros from byte {AT_ONE} on, .* and something else"),
    "two within": (ONE + END + TWO + END, f"zeros from byte {AT_ONE} on, .* several archives"),
    "many within": (ONE + 300 * ZEROS + TWO + END, f"zeros from byte {AT_ONE} on"),
    "one before": (ZEROS + ONE + TWO + END, "zeros from byte 0 on"),
    "something after": (ONE + TWO + END + b"\0\0x", f"zeros from byte {BOTH} on"),
}
L, K, X, G = tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE
SPARSE = "GNU.sparse."  # as GNU tar writes them (its manual, "Storing Sparse Files")
NO_RECORD = "damaged extended header at byte 512: no record at its byte"
# What follows a file of one block without content.
WITHIN = {
    **{
        what: (member("1.jpg", kind=kind), rf"1\.jpg \(byte 512\) is a {what}.*{remedy}")
        for what, kind, remedy in (
            ("hard link", tarfile.LNKTYPE, "--hard-dereference"),
            ("symbolic link", tarfile.SYMTYPE, "--dereference"),
            ("sparse file", tarfile.GNUTYPE_SPARSE, "without --sparse"),
        )
    },
    "sparse of 0.0": (member("1.jpg", pax={f"{SPARSE}size": "9"}), r"\(byte 512\) is a sparse file"),
    "sparse of 0.1": (
        member("GNUSparseFile.1/1.jpg", pax={f"{SPARSE}size": "9", f"{SPARSE}name": "1.jpg"}),
        r"\(byte 512\) is a sparse file",
    ),
    "sparse of 1.0": (
        member("GNUSparseFile.1/1.jpg", pax={f"{SPARSE}major": "1", f"{SPARSE}name": "1.jpg"}),
        r"\(byte 512\) is a sparse file",
    ),
    "field twice": (member("1.a") + member("1.A"), r"1\.A \(byte 1024\) is the second 'a' of 1;"),
    "field of the key": (member("1.__key__"), r"1\.__key__ \(byte 512\) is the second '__key__' of 1;"),
    "size of a block": (header("0.jpg", size=-512), "the header at byte 512 claims a file of -512 bytes"),
    "size of a byte": (header("0.jpg", size=-1), "the header at byte 512 claims a file of -1 bytes"),
    "size of a long name": (header("0", L, -512), "the header at byte 512 claims a file of -512 bytes"),
    "size of pax": (header("0", X, -(2**60)), f"the header at byte 512 claims a file of -{2**60} bytes"),
    "huge": (header("0", L, 2**40), f"the extended header at byte 512 claims {2**40} bytes"),
    "pax": (extended(X, b"13 size=-512\n"), "damaged extended header at byte 512: size=-512"),
    "underscore": (extended(X, b"12 size=1_0\n"), "damaged extended header at byte 512: size=1_0"),
    "no newline": (extended(X, b"12 path=a.b\0"), f"{NO_RECORD} 0"),
    "no length": (extended(X, b"nonsense path="), f"{NO_RECORD} 0"),
    "length of 0": (extended(X, b"0 path=a.b\n"), f"{NO_RECORD} 0"),
    "beyond": (extended(X, b"5 a=\n99 path=x\n"), f"{NO_RECORD} 5"),
    "global": (extended(G, b"12 path=a.b\n"), "the global header at byte 512 gives one name or size to all"),
    "two names": (
        extended(L, b"a.b") + extended(X, b"12 path=c.d\n"), "header at byte 1536 contradicts that at 512",
    ),
    "no file": (extended(L, b"a.b") + END, "no file follows the extended header at byte 512"),
}  # fmt: skip
DAMAGED = NOT_WHOLE | {
    name: (header("before.jpg") + content + header("after.jpg") + END, message)
    for name, (content, message) in WITHIN.items()
}


@pytest.mark.parametrize("contents", [True, False], ids=["read", "indexed"])
@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged_or_hostile_names_file_and_byte(
    tmp_path: Path, content: bytes, message: str, contents: bool
) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    seen = []
    with pytest.raises(ValueError, match=rf"a\.tar: .*{message}"), time_limit():
        seen.extend(group.example for group in found(tmp_path / "a.tar", contents=contents))
    if contents:
        numbers = [number_of(example) for example in seen if "cls" in example]
        assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("contents", [True, False], ids=["read", "indexed"])
@pytest.mark.parametrize(("size", "last"), [(0, "one.4"), (600, "one.3")], ids=["files", "bytes"])
def test_an_example_without_end_names_file_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, last: str, contents: bool
) -> None:
    monkeypatch.setattr(tar, "_MOST_FILES", 4)
    monkeypatch.setattr(tar, "_LARGEST", 3 * 1536)
    endless = b"".join(member(f"one.{number}", bytes(size)) for number in range(9))
    (tmp_path / "a.tar").write_bytes(member("before.jpg") + endless + END)
    given = found(tmp_path / "a.tar", contents=contents)
    assert next(given).example["__key__"] == "before"
    message = rf"a\.tar: up to {last} \(byte \d+\) one takes \d files and \d+ bytes"
    with pytest.raises(ValueError, match=message):
        next(given)


def test_the_name_in_an_extended_header_is_taken_as_it_is(tmp_path: Path) -> None:
    files = [
        extended(L, b"long\0rest") + extended(K, b"link\0") + header("0.jpg"),
        extended(L, b"1.jpg") + header("x"),
        extended(tarfile.SOLARIS_XHDTYPE, b"15 path=2.jpg\n\n") + header("x"),
        extended(G, b"13 comment=x\n") + header("3.jpg"),
    ]
    (tmp_path / "a.tar").write_bytes(b"".join(files) + END)
    assert [(one["__key__"], *one) for one in read(tmp_path / "a.tar")] == [
        ("1", "__key__", "jpg"), ("2", "__key__", "jpg\n"), ("3", "__key__", "jpg"),
    ]  # fmt: skip


def test_mutated_headers_are_read_as_the_standard_library_reads_them_or_refused(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for number in range(2000):
        choose = random.Random(number)
        outcomes[verdict(mutated(archive(choose), choose), tmp_path / "a.tar")] += 1
    assert set(outcomes) == {"same", "refused"}
