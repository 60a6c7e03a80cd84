"""Tar archives as a stream: member by member, and the members of one example together.

Files that follow one another and have the same name up to the first dot of its last part are one example, as
in WebDataset: ``0001.jpg`` and ``0001.cls`` are ``{"__key__": "0001", "jpg": bytes, "cls": bytes}``.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from adaecho.shards.remote import Transfer

_BLOCK = 512


@dataclass(frozen=True)
class Member:
    """A regular file: name, byte at which its headers begin, length in bytes."""

    name: str
    start: int
    size: int


@dataclass
class Group:
    """The members of one example.

    Attributes:
        key: their name up to the extension.
        start, end: bytes of the archive from its first header to the header of the next example.
        contents: by extension, in lower case; nothing where they were passed over.
    """

    key: str
    start: int
    end: int = 0
    contents: dict[str, bytes] = field(default_factory=dict)

    @property
    def example(self) -> dict[str, str | bytes]:
        """As a source gives it."""
        return {"__key__": self.key, **self.contents}


def groups(transfer: Transfer, *, read: bool) -> Iterator[Group]:
    """The examples of an archive from where a transfer stands, which must be at a header.

    Args:
        transfer: of the archive.
        read: give contents too; otherwise they are passed over.

    Raises:
        ValueError: it is no tar archive, or a damaged one; the message names url and byte.
    """
    group: Group | None = None
    for member in _members(transfer):
        folder, slash, file = member.name.rpartition("/")
        stem, dot, extension = file.partition(".")
        if not dot or not stem:
            continue
        key = f"{folder}{slash}{stem}"
        if group is None or group.key != key:
            if group is not None:
                group.end = member.start
                yield group
            group = Group(key, member.start)
        extension = extension.lower()
        if extension in group.contents:
            raise ValueError(f"{transfer.url}: two files are called {member.name} (byte {member.start})")
        group.contents[extension] = _exactly(transfer, member.size) if read else b""
    if group is not None:
        group.end = transfer.offset
        yield group


def _members(transfer: Transfer) -> Iterator[Member]:
    """Regular files; whoever takes one may read its content before asking for the next."""
    start, renamed = transfer.offset, ""
    sized: int | None = None
    while True:
        offset = transfer.offset
        header = transfer.read(_BLOCK)
        if not header or not any(header):  # the end: blocks of zeros, which some writers leave out
            return
        found = _header(header, transfer.url, offset)
        content = transfer.offset
        if found.type == tarfile.GNUTYPE_LONGNAME:
            renamed = _text(_exactly(transfer, found.size).rstrip(b"\0"))
        elif found.type == tarfile.XHDTYPE:
            records = _pax_records(_exactly(transfer, found.size))
            renamed = records.get("path", renamed)
            sized = int(records["size"]) if "size" in records else None
        else:
            size = found.size if sized is None else sized
            if transfer.length is not None and content + size > transfer.length:
                raise _ends_within(transfer, transfer.length, content, size)
            if found.type in tarfile.REGULAR_TYPES:
                yield Member(renamed or found.name, start, size)
            elif found.type in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
                size = 0
            content, renamed, sized = content + size, "", None
            transfer.skip(_padded(content, offset) - transfer.offset)
            start = transfer.offset
            continue
        transfer.skip(_padded(transfer.offset, offset) - transfer.offset)


def _padded(end: int, header: int) -> int:
    """The next header after content that ends there: archives are whole blocks."""
    return end + (header - end) % _BLOCK


def _header(block: bytes, url: str, offset: int) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        kind = "it is compressed; shards must be plain tar" if block[:2] == b"\x1f\x8b" else str(error)
        raise ValueError(f"{url}: no tar header at byte {offset}: {kind}") from error


def _exactly(transfer: Transfer, size: int) -> bytes:
    start = transfer.offset
    content = transfer.read(size)
    if len(content) < size:
        raise _ends_within(transfer, transfer.offset, start, size)
    return content


def _ends_within(transfer: Transfer, end: int, start: int, size: int) -> ValueError:
    return ValueError(
        f"{transfer.url}: the archive ends at {end}, within a file of {size} bytes that begins at {start}"
    )


def _pax_records(content: bytes) -> dict[str, str]:
    """Extended header records, each ``length key=value`` and a newline (POSIX.1-2001, pax)."""
    records = {}
    while content:
        length = int(content.partition(b" ")[0])
        key, _, value = content[:length].partition(b" ")[2].rstrip(b"\n").partition(b"=")
        records[_text(key)] = _text(value)
        content = content[length:]
    return records


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
