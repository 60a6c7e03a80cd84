"""Tar archives as a stream: member by member, and the members of one example together.

Files that follow one another and have the same name up to the first dot of its last part are one example, as
in WebDataset: ``0001.jpg`` and ``0001.cls`` are ``{"__key__": "0001", "jpg": bytes, "cls": bytes}``.
"""

import re
import struct
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from adaecho.shards.remote import Transfer, rest

_BLOCK = 512
_STORED_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_NOT_READ = {
    tarfile.LNKTYPE: ("a hard link", "with --hard-dereference"),
    tarfile.SYMTYPE: ("a symbolic link", "with --dereference"),
    tarfile.GNUTYPE_SPARSE: ("a sparse file", "without --sparse"),
}
# Extended headers: of the file that follows them (GNU tar's long name and long link, pax), or of all that do.
_OF_THE_NEXT = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE,
)  # fmt: skip
_WITHOUT_CONTENT = (  # whatever size they tell (POSIX.1-2001, ustar)
    tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE,
)  # fmt: skip
# Bytes: names and attributes take a few thousand; what a header claims is no limit.
_LONGEST_EXTENDED = 1 << 20
# Of one example, which is read into memory as a whole: bytes that it spans in the archive, files.
_LARGEST, _MOST_FILES = 1 << 31, 1 << 16
_PAX_RECORD = re.compile(rb"(\d{1,7}) ([^=]+)=")
_REST = 1 << 16  # bytes of one read after the end; tar pads to 10 KiB or more
_MOST_PADDING = 1 << 22  # bytes after the end; a copy that breaks off may leave as many as were to come
# Name, size, sum of the header, type, magic and first byte of the name's prefix (POSIX.1-1988, ustar).
_FIELDS = struct.Struct("100s 24x 12s 12x 8s c 100x 5s 83x c 166x")

# Plain tuples, one for each file: to make them with names takes several times as long.
Member = tuple[str, int, int, int]
"""A regular file: name, bytes at which its headers begin and the next member may, length in bytes."""
_Header = tuple[str, bytes, int]
"""What is needed of a header: name, type, length in bytes."""


class ArchiveError(ValueError):
    """An archive is damaged, or holds what can't be read: its url, the byte, what to do."""


@dataclass(slots=True)
class Group:
    """The members of one example.

    Attributes:
        example: as a source gives it: as ``__key__`` their name up to the extension, and the content of each
            by its extension, in lower case; nothing where they were passed over.
        start, end: bytes of the archive from its first header to the end of its last member's blocks.
    """

    example: dict[str, str | bytes]
    start: int
    end: int


def groups(transfer: Transfer, *, read: bool) -> Iterator[Group]:
    """The examples of an archive from where a transfer stands, which must be at a header.

    A transfer to the end of the file must meet the archive's end: two blocks of zeros (POSIX.1-2001, ustar)
    and nothing but zeros after them. Only that tells a whole archive from one that was cut between two files.

    Args:
        transfer: of the archive.
        read: give contents too; otherwise they are passed over.

    Raises:
        ArchiveError: it is no tar archive, or a damaged one, or its end is missing, or an example has more
            than 65,536 files or spans more than 2 GiB; names url and byte.
    """
    group: Group | None = None
    for name, start, end, size in _members(transfer, read):
        key, extension = _key_and_extension(name)
        if not key:
            continue
        if group is None or group.example["__key__"] != key:
            if group is not None:
                yield group
            group = Group({"__key__": key}, start, end)
        group.end = end
        extension = extension.lower()
        if extension in group.example:
            raise ArchiveError(
                f"{transfer.name}: {name} (byte {start}) is the second {extension!r} of {key}; rename it"
            )
        if end - group.start > _LARGEST or len(group.example) > _MOST_FILES:
            raise ArchiveError(
                f"{transfer.name}: up to {name} (byte {start}) {key} takes {len(group.example)} files and "
                f"{end - group.start} bytes, and an example has at most {_MOST_FILES} and {_LARGEST}: it is "
                "damaged, or to be split"
            )
        group.example[extension] = _exactly(transfer, size) if read else b""
    if group is not None:
        yield group


def _key_and_extension(name: str) -> tuple[str, str]:
    """The two parts of a file's name; nothing where it has no extension, or nothing before it."""
    begin = name.rfind("/") + 1
    dot = name.find(".", begin)
    return (name[:dot], name[dot + 1 :]) if dot > begin else ("", "")


def _members(transfer: Transfer, read: bool) -> Iterator[Member]:
    """Regular files; the content of each may be ``read`` before the next is asked for."""
    start = transfer.offset
    named: str | None = None
    sized: int | None = None
    while True:
        if not read:
            rest(0)  # where Ctrl-C ends what reads headers alone, in archives without any example, too
        offset = transfer.offset
        header = transfer.read(_BLOCK)
        found = _plain_header(header)
        if found is None and not any(header):
            if start != offset:
                raise ArchiveError(f"{transfer.name}: no file follows the extended header at byte {start}")
            if header or not transfer.is_part:
                _check_end(transfer, offset, header)
            return
        name, kind, size = found or _any_header(header, transfer.name, offset)
        if kind in _OF_THE_NEXT:
            other_name, other_size = _extended(transfer, kind, size, offset)
            if None not in (named, other_name) or None not in (sized, other_size):
                raise ArchiveError(
                    f"{transfer.name}: the header at byte {offset} contradicts that at {start}"
                )
            named = other_name if named is None else named
            sized = other_size if sized is None else sized
            continue
        name, size = name if named is None else named, size if sized is None else sized
        content, length = transfer.offset, transfer.length
        end = content if kind in _WITHOUT_CONTENT else content + _padded(size)
        if length is not None and end > content and content + size > length:
            raise _ends_within(transfer, length, content, size)
        if kind in _STORED_TYPES:
            yield name, start, end, size
        elif kind in _NOT_READ and _key_and_extension(name)[0]:
            raise _not_read(transfer.name, start, name, kind)
        named = sized = None
        transfer.skip(end - transfer.offset)
        start = transfer.offset


def _extended(transfer: Transfer, kind: bytes, size: int, offset: int) -> tuple[str | None, int | None]:
    """Name and size that an extended header tells of the file that follows; None for what it doesn't tell."""
    if size > _LONGEST_EXTENDED:
        raise ArchiveError(
            f"{transfer.name}: the extended header at byte {offset} claims {size} bytes, where "
            f"{_LONGEST_EXTENDED} are ample: it is damaged. Write the archive again"
        )
    content = _exactly(transfer, size)
    padding = transfer.read(_padded(size) - size)
    if kind == tarfile.GNUTYPE_LONGLINK:
        return None, None
    if kind == tarfile.GNUTYPE_LONGNAME:  # ended by a zero, which not every writer counts
        return _text((content + padding).partition(b"\0")[0]), None
    name, told_size = _pax_name_and_size(content, transfer.name, offset)
    if kind == tarfile.XGLTYPE and (name, told_size) != (None, None):
        raise ArchiveError(
            f"{transfer.name}: the global header at byte {offset} gives one name or size to all files; write "
            "the archive again without it"
        )
    return name, told_size


def _check_end(transfer: Transfer, offset: int, block: bytes) -> None:
    """Read to the end of the file, which must be that of its archive.

    Args:
        transfer: of the archive.
        offset: where the last member ended.
        block: what was read there: zeros, or nothing.

    Raises:
        ArchiveError: there are no two blocks of zeros, or something else follows them.
    """
    if not block and not offset:
        raise ArchiveError(
            f"{transfer.name}: the file is empty; not even an empty tar archive is. Write it again"
        )
    second = transfer.read(_BLOCK)
    if len(block) < _BLOCK or (len(second) < _BLOCK and not any(second)):
        raise ArchiveError(
            f"{transfer.name}: the archive ends at byte {transfer.offset} without its two blocks of zeros, "
            "so it may have been cut there. Write it again; if it is whole and its writer left them out, "
            "append 1024 bytes of zeros"
        )
    after = offset + _BLOCK
    while second:
        if any(second):
            raise ArchiveError(
                f"{transfer.name}: zeros from byte {offset} on, where an archive ends, and something else "
                f"within the {len(second)} bytes from {after} on: it is damaged, or several archives in one "
                "file (tar --ignore-zeros reads those). Write it again"
            )
        after = transfer.offset
        if after - offset > _MOST_PADDING:
            raise ArchiveError(
                f"{transfer.name}: the archive ends at byte {offset}, and zeros follow for more than "
                f"{_MOST_PADDING >> 20} MiB, as where a copy broke off; fetch it again"
            )
        second = transfer.read(_REST)


def _padded(size: int) -> int:
    """Bytes that content takes: whole blocks."""
    return -(-size // _BLOCK) * _BLOCK


def _any_header(block: bytes, url: str, offset: int) -> _Header:
    try:
        found = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        kind = "it is compressed; shards must be plain tar" if block[:2] == b"\x1f\x8b" else str(error)
        raise ArchiveError(f"{url}: no tar header at byte {offset}: {kind}") from error
    if found.size < 0:  # in base 256, which GNU tar uses for large numbers, and which has a sign
        raise ArchiveError(
            f"{url}: the header at byte {offset} claims a file of {found.size} bytes: it is damaged"
        )
    return found.name, found.type, found.size


def _plain_header(block: bytes) -> _Header | None:
    """The header of a regular file with a short name, read faster than tarfile, which looks at all fields.

    None for whatever isn't exactly that (POSIX.1-1988, ustar; GNU's is alike up to its magic): tarfile
    decides.
    """
    if len(block) != _BLOCK:
        return None
    name, size_field, sum_field, kind, magic, prefix = _FIELDS.unpack(block)
    if kind not in b"0\0" or magic != b"ustar" or prefix != b"\0":
        return None
    try:
        size, checksum = int(size_field.strip(b" \0"), 8), int(sum_field.strip(b" \0"), 8)
    except ValueError:  # a larger size in base 256, or damage
        return None
    name = name.partition(b"\0")[0]
    if checksum != _sum_of_header(block) or size < 0 or name.endswith(b"/"):
        return None
    return _text(name), tarfile.REGTYPE, size


def _sum_of_header(block: bytes) -> int:
    """The sum of its bytes, those of the sum itself taken as blanks.

    The lower half of Adler-32 (RFC 1950) is one more than a sum, modulo 65,521, which 256 bytes don't reach;
    it is many times faster than Python's sum.
    """
    first, second = zlib.adler32(block[:256]) & 0xFFFF, zlib.adler32(block[256:]) & 0xFFFF
    of_itself = zlib.adler32(block[148:156]) & 0xFFFF
    return first + second - of_itself - 1 + 8 * ord(" ")


def _exactly(transfer: Transfer, size: int) -> bytes:
    start = transfer.offset
    content = transfer.read(size)
    if len(content) < size:
        raise _ends_within(transfer, transfer.offset, start, size)
    return content


def _not_read(url: str, start: int, name: str, kind: bytes) -> ArchiveError:
    what, remedy = _NOT_READ[kind]
    return ArchiveError(
        f"{url}: {name} (byte {start}) is {what} without its whole content: an example would lack it, or "
        f"hold something else. Write the archive again, {remedy}"
    )


def _ends_within(transfer: Transfer, end: int, start: int, size: int) -> ArchiveError:
    return ArchiveError(
        f"{transfer.name}: the archive ends at {end}, within a file of {size} bytes that begins at {start}"
    )


def _pax_name_and_size(content: bytes, url: str, offset: int) -> tuple[str | None, int | None]:
    """Name and size of the next file, where extended records tell: ``length key=value`` and a newline each
    (POSIX.1-2001, pax)."""
    records: dict[str, bytes] = {}
    at = 0
    while at < len(content):
        found = _PAX_RECORD.match(content, at)
        end = at + int(found[1]) if found else 0
        if not found or not found.end() < end <= len(content) or content[end - 1 : end] != b"\n":
            raise ArchiveError(f"{url}: damaged extended header at byte {offset}: no record at its byte {at}")
        records[_text(found[2])] = content[found.end() : end - 1]
        at = end
    name, size = records.get("path"), records.get("size")
    if any(key.startswith("GNU.sparse.") for key in records):
        sparse = records.get("GNU.sparse.name", name or b"a file")
        raise _not_read(url, offset, _text(sparse), tarfile.GNUTYPE_SPARSE)
    if size is not None and not re.fullmatch(rb"\d{1,18}", size):
        raise ArchiveError(f"{url}: damaged extended header at byte {offset}: size={_text(size)}")
    return None if name is None else _text(name).rstrip("/"), None if size is None else int(size)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
