"""Archives with headers that no writer makes: read as the standard library reads them, or refused by byte.

``python -m tests.faults.campaign --headers 100000`` reads many.
"""

import io
import random
import signal
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adaecho.shards.remote import Retries, Transfer
from adaecho.shards.tar import ArchiveError, groups

LIMIT_S = 10  # for one small archive, on a machine however busy; what spins takes for ever
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
# Of a header: name, size, type, magic and version, prefix; both readers check its sum, and ours nothing else.
FIELDS = (*range(100), *range(124, 136), 156, *range(257, 265), *range(345, 500))
SIZES = (
    b"-0000001000\0", b"00000000000\0", b"77777777777\0", b"        +12\0", b"0o000000100 ", bytes(12),
    b"9" * 12,
)  # fmt: skip
KINDS = b"0\0\x3123456789DKLMNSVXgx "
Blocks = list[tuple[bytes, bool]]
"""Of an archive, each with whether it is a header."""


def archive(choose: random.Random) -> Blocks:
    """A few examples, and what else archives hold."""
    blocks: Blocks = []
    format = choose.choice(FORMATS)
    for number in range(choose.randrange(1, 4)):
        folder = choose.choice(["", "", "a/b.c/", "long/" * choose.randrange(20, 29)])
        for extension in ("jpg", "cls")[: choose.randrange(1, 3)]:
            member = tarfile.TarInfo(f"{folder}{number}.{extension}")
            if choose.random() < 0.1:
                member.name = choose.choice(["README", f"{number}.txt/", ".hidden"])
                member.type = choose.choice([tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.REGTYPE])
            if choose.random() < 0.2 and format != tarfile.USTAR_FORMAT:
                member.linkname = "link/" * 30
            if choose.random() < 0.2 and format == tarfile.PAX_FORMAT:
                member.pax_headers = {"comment": "x" * choose.randrange(1, 600), "size": "700"}
            member.size = choose.choice([0, 1, 511, 512, 700])
            member.mtime = choose.choice([0, 1e9, 1e9 + 0.5])
            header = member.tobuf(format)
            # An extended header and its content stand before the file's own.
            blocks += [(header[at : at + 512], True) for at in range(0, len(header), 512)]
            content = choose.randbytes(member.size).ljust(-(-member.size // 512) * 512, b"\0")
            blocks += [(content[at : at + 512], False) for at in range(0, len(content), 512)]
    return [*blocks, (bytes(512), False), (bytes(512), False)]


def mutated(blocks: Blocks, choose: random.Random) -> bytes:
    """The same with one to three things that are wrong, the sums of headers put right in most cases."""
    blocks = list(blocks)
    for _ in range(choose.randrange(1, 4)):
        headers = [at for at, (_, is_header) in enumerate(blocks) if is_header]
        at = choose.choice(headers)
        block = bytearray(blocks[at][0])
        match choose.choice(["byte", "size", "size", "size", "type", "type", "name", "text", "blocks"]):
            case "byte":
                block[choose.choice(FIELDS)] = choose.randrange(256)
            case "size":
                block[124:136] = hostile_size(choose)
            case "type":
                block[156] = choose.choice(KINDS)
            case "name":
                start = choose.choice([0, 345])
                names = [b"", b"/", b"x/", b"a\0b.jpg", b"../../a.jpg", b"\xff\n.jpg", b"x" * 100]
                name = choose.choice(names)
                block[start : start + len(name)] = name
            case "text":
                block = bytearray(reworded(bytes(block), choose))
            case "blocks":
                other = choose.randrange(len(blocks))
                match choose.choice(["drop", "double", "swap", "zero", "cut"]):
                    case "drop":
                        del blocks[other]
                    case "double":
                        blocks.insert(at, blocks[other])
                    case "swap":
                        blocks[at], blocks[other] = blocks[other], blocks[at]
                    case "zero":
                        blocks[other] = (bytes(512), False)
                    case "cut":
                        del blocks[max(other, 1) :]
                if not any(is_header for _, is_header in blocks):
                    break
                continue
        blocks[at] = (bytes(block if choose.random() < 0.1 else with_sum(block)), True)
    content = b"".join(block for block, _ in blocks)
    return content[: choose.randrange(len(content) + 1)] if choose.random() < 0.05 else content


def hostile_size(choose: random.Random) -> bytes:
    """Twelve bytes."""
    number = choose.choice([-1, -511, -512, -513, -1024, -(2**60), 0, 512, 2**33, 2**63, 2**80])
    if choose.random() < 0.7:
        return (number % 256**11).to_bytes(11, "big").rjust(12, b"\xff" if number < 0 else b"\x80")
    return choose.choice(SIZES)


def reworded(text: bytes, choose: random.Random) -> bytes:
    """With another number or name in what may be records of an extended header."""
    old, new = choose.choice(
        [
            (b"size=700", b"size=-12"), (b"size=700", b"size=  1"), (b"size=700", b"size=1_0"),
            (b"size=700", b"path=a.b"), (b"comment=", b"GNU.spa="), (b"12 size=", b" 0 size="),
            (b"12 size=", b"13 size="), (b"path=", b"size="), (b"\n", b"\0"), (b" ", b"9"),
            (b".jpg", b".jpg\n"),
        ]
    )  # fmt: skip
    return text.replace(old, new, 1)[:512].ljust(512, b"\0")


def with_sum(header: bytearray) -> bytearray:
    """With the sum that its bytes have (POSIX.1-1988, ustar)."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return header


class _NoNegativeBlocks(tarfile.TarInfo):
    """As the standard library has it from 3.13.6 on; before that, a negative size spins for ever."""

    def _block(self, count: int) -> int:
        if count < 0:
            raise tarfile.HeaderError("invalid offset")
        return int(super()._block(count))  # type: ignore[misc]


Files = list[tuple[str, str, bytes]]
"""Key, extension in lower case and content, in order."""


def read_by_standard_library(content: bytes) -> tuple[Files, Exception | None]:
    """All that it reads, and how it ended."""
    found: Files = []
    try:
        options = {"mode": "r:", "tarinfo": _NoNegativeBlocks, "encoding": "utf-8"}
        with tarfile.open(fileobj=io.BytesIO(content), **options) as opened:
            for member in opened:
                folder, slash, name = member.name.rpartition("/")
                key, dot, extension = name.partition(".")
                if member.isreg() and not member.issparse() and key and dot:
                    data = content[member.offset_data : member.offset_data + member.size]
                    found.append((folder + slash + key, extension.lower(), data))
    except Exception as error:  # it has several, and is an oracle only for what it reads
        return found, error
    return found, None


def read_by_ours(path: Path, *, contents: bool) -> tuple[list[dict[str, Any]], Exception | None]:
    """All that ours reads, and how it ended."""
    transfer = Transfer(str(path), retries=Retries())
    examples: list[dict[str, Any]] = []
    try:
        with time_limit():
            examples.extend(group.example for group in groups(transfer, read=contents))
    except Exception as error:
        return examples, error
    finally:
        transfer.close()
    return examples, None


@contextmanager
def time_limit() -> Iterator[None]:
    """Raises what no reader catches, after ``LIMIT_S``."""

    def end(*_: object) -> None:
        raise TimeoutError(f"more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def verdict(content: bytes, path: Path) -> str:
    """``same``, or ``refused`` with an error that names file and byte; else what is wrong."""
    path.write_bytes(content)
    expected, failure = read_by_standard_library(content)
    examples, error = read_by_ours(path, contents=True)
    indexed, also = read_by_ours(path, contents=False)
    found = [
        (example["__key__"], extension, data)
        for example in examples
        for extension, data in example.items()
        if extension != "__key__"
    ]
    if str(also) != str(error) or [list(x) for x in indexed] != [list(x) for x in examples]:
        return f"different when indexed: {also} and not {error}"
    if error is None:
        return "same" if failure is None and found == expected else f"different: {failure}"
    if found != expected[: len(found)]:
        return "different before the error"
    named = isinstance(error, ArchiveError) and str(path) in str(error)
    return "refused" if named else f"crashed: {error!r}"
