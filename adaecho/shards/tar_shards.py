"""Stream examples from tar shards in WebDataset's layout, with a single request per archive.

Adjacent files of an archive form one example if their names are equal up to the first dot. For example,
``0001.jpg`` and ``0001.cls`` form ``{"__key__": "0001", "jpg": bytes, "cls": bytes}``.
"""

import glob
import os
import re
import struct
import tarfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from adaecho.errors import redact_urls
from adaecho.shards.transfer import Transfer

Names = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_DRAWN = 1024  # number of random numbers drawn at once
_BLOCK = tarfile.BLOCKSIZE
_TEXT = "utf-8", "surrogateescape"
# These fields of a header are unpacked: name, size, type, magic, and first byte of the name's prefix. They
# are at the same offsets in the ustar format (POSIX.1-1988) and in GNU's format.
_HEADER = struct.Struct("100s 24x 11s x 20x c 100x 5s 83x c")
_TELLS_MORE = re.compile(rb" (path|size|GNU\.sparse[.\w]*)=")  # fields of an extended pax header that we need


class TarShards:
    """An iterable over the examples of uncompressed tar archives, which an EchoLoader can resume exactly.

    The archives are split among the ranks. With fewer archives than ranks, every rank reads all archives and
    yields only its share of the examples.

    Args:
        shards: path or url of the archives, or a list of them. A url starts with ``http(s)://`` or an fsspec
            protocol. ``{000..127}`` expands to these numbers. ``*`` in a local path expands to the matching
            files.
        shuffle: whether to shuffle the archives in each epoch, and to mix the examples of the open archives.
            If false, the archives are read in the given order.
        seed: seed of the order; it must be the same on all ranks.
        open_shards: number of archives that a rank reads at the same time. Each example comes from a random
            open archive. When an archive ends, the next one is opened.

    Raises:
        ValueError: there are no shards, or ``open_shards`` is below 1.
        tarfile.ReadError: an archive is truncated, compressed or damaged; raised during iteration.
        ConnectionError: a url cannot be read, even after retries; raised during iteration.
        OSError: a local file cannot be read; raised during iteration.
    """

    def __init__(self, shards: Names, *, shuffle: bool = True, seed: int = 0, open_shards: int = 8) -> None:
        if open_shards < 1:
            raise ValueError(f"open_shards={open_shards}: must be at least 1")
        self.urls, self.open_shards = shard_urls(shards), open_shards if shuffle else 1
        self.shuffle, self.seed, self.epoch, self.share = shuffle, seed, 0, (0, 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next ``iter()`` starts. It determines the order."""
        self.epoch = epoch

    def set_share(self, rank: int, world_size: int) -> None:
        """Restrict later iterations to the examples of one rank. An EchoLoader calls this method."""
        self.share = rank, world_size

    def __iter__(self) -> "TarPass":
        return self.iterate_from(())

    def iterate_from(self, position: Sequence[int]) -> "TarPass":
        """Return an iterator that starts at the ``position`` of an earlier iterator; () starts the epoch."""
        return TarPass(self, position)


class TarPass:
    """Iterator over one epoch of ``TarShards``, from the start or a saved position."""

    # ``position`` is the attribute of an earlier iterator, or empty for the start of the epoch.
    def __init__(self, source: TarShards, position: Sequence[int]) -> None:
        self._key = source.seed & 0xFFFFFFFFFFFFFFFF, source.epoch
        numbers = np.arange(len(source.urls))
        if source.shuffle:
            numbers = np.random.Generator(np.random.Philox(key=self._key)).permutation(numbers)
        self._rank, self._world = source.share
        if len(numbers) >= self._world:
            numbers, self._rank, self._world = numbers[self._rank :: self._world], 0, 1
        self._urls = [source.urls[number] for number in numbers]
        first = range(min(source.open_shards, len(numbers)))
        self._following, self._count, *within = position or (len(first), 0)
        pairs = zip(within[::2], within[1::2], strict=True) if position else ((number, 0) for number in first)
        self._within = [_Archive(self._urls[number], number, byte) for number, byte in pairs]
        self._block, self._draws = -1, list[int]()

    @property
    def position(self) -> list[int]:
        """The position of the next example, to be saved and given to ``TarShards.iterate_from``."""
        # The list begins with the index of the next archive to open, and the number of examples read so far.
        # Each open archive adds its index, and the byte offset of its next example.
        return [self._following, self._count, *(n for one in self._within for n in (one.number, one.byte))]

    def _drawn(self) -> int:
        """Return the random number that chooses the archive of the next example."""
        block, at = divmod(self._count, _DRAWN)
        if block != self._block:
            # The last word of the counter is 1, because the order of the shards uses counters with a 0 there.
            bits = np.random.Philox(key=self._key, counter=[0, 0, block, 1])
            self._block, self._draws = block, bits.random_raw(_DRAWN).tolist()
        return self._draws[at]

    def __iter__(self) -> "TarPass":
        return self

    def __next__(self) -> dict[str, Any]:
        while self._within:
            slot = self._drawn() % len(self._within)
            if (example := self._within[slot].next()) is None:
                self._within.pop(slot).close()
                if self._following < len(self._urls):
                    self._within.insert(slot, _Archive(self._urls[self._following], self._following))
                    self._following += 1
                continue
            self._count += 1
            if (self._count - 1) % self._world == self._rank:
                return example
        raise StopIteration

    def close(self) -> None:
        """Close all open connections and files."""
        for archive in self._within:
            archive.close()


class _Archive:
    """An iterator over the examples of one tar archive.

    Attributes:
        number: index of the archive in the order of the epoch.
        byte: byte offset of the next example.
    """

    def __init__(self, url: str, number: int, byte: int = 0) -> None:
        self.number, self.byte, self._transfer = number, byte, Transfer(url)
        self._examples = self._read()

    def next(self) -> dict[str, Any] | None:
        """Return the next example, or None at the end. After an error, the next call tries again."""
        try:
            return next(self._examples, None)
        except BaseException as error:
            self.close()
            if not isinstance(error, tarfile.TarError):
                raise
            what = f"not a complete plain tar archive, read up to byte {self._offset}"
            raise tarfile.ReadError(f"{self._transfer.name}: {what}: {error}") from error

    def close(self) -> None:
        """Close the connection or file. A later call to ``next`` reopens it."""
        self._transfer.close()
        self._examples = self._read()

    def _read(self) -> Iterator[dict[str, Any]]:
        self._buffer, self._at, self._transfer.byte = b"", 0, self.byte  # bytes read, and how many were used
        for key, members in groupby(self._members(), lambda member: member[0]):
            example: dict[str, Any] = {"__key__": key.decode(*_TEXT)}
            for _, ending, content, end in members:  # noqa: B007 (used below)
                extension = ending.decode(*_TEXT).lower()
                if extension in example:
                    raise tarfile.ReadError(f"{example['__key__']} has two files {extension!r}; rename one")
                example[extension] = content
            self.byte = end
            yield example

    def _members(self) -> Iterator[tuple[bytes, bytes, bytes, int]]:
        """Yield the key, extension and content of each file in the archive, and the file's end offset."""
        while True:
            if self._at + _BLOCK > len(self._buffer):
                self._need(_BLOCK)
            name, octal, kind, magic, prefix = _HEADER.unpack_from(self._buffer, self._at)
            # Plain headers are parsed here, because tarfile parses all fields and takes ten times as long.
            plain = magic == b"ustar" and prefix == b"\0" and kind in b"0\0x" and octal.isdigit()
            name, start, size = name.partition(b"\0")[0], _BLOCK, int(octal, 8) if plain else 0
            if plain and kind == b"x":  # skip a header that has only times and owners
                self._need(_BLOCK + size)
                name, plain = b"", not _TELLS_MORE.search(self._buffer, _BLOCK, _BLOCK + size)
            if not plain:
                self._first = self._offset
                headers = tarfile.TarFile(fileobj=self, encoding="utf-8")  # type: ignore[arg-type]
                if (member := headers.next()) is None:
                    return
                name = member.name.encode(*_TEXT) if member.isreg() else b""
                start, size = 0, member.size if member.isreg() else headers.offset - self.tell()
            length = start + -(-size // _BLOCK) * _BLOCK
            if self._at + length > len(self._buffer):
                self._need(length)
            start, self._at = start + self._at, self._at + length
            base = name.rfind(b"/") + 1
            dot = name.find(b".", base)
            if dot > base:  # skip hidden files
                yield name[:dot], name[dot + 1 :], self._buffer[start : start + size], self._offset

    @property
    def _offset(self) -> int:
        """Byte offset in the archive of the first byte that has not been parsed yet."""
        return self._transfer.byte - len(self._buffer) + self._at

    def _need(self, size: int) -> None:
        """Read from the archive until the buffer contains at least ``size`` bytes to parse."""
        parts, length = [self._buffer[self._at :]], len(self._buffer) - self._at
        while length < size:
            parts.append(self._transfer.read())
            length += len(parts[-1])
            if not parts[-1]:
                raise tarfile.ReadError("the archive is empty or truncated")
        self._buffer, self._at = b"".join(parts), 0

    # read and tell are the file interface that tarfile needs to read the headers of one member. tell starts
    # at 0 for each member, because tarfile raises an error for a damaged header at offset 0. At any other
    # offset it would treat the header as the end of the archive.

    def read(self, size: int) -> bytes:
        self._need(size)
        self._at = size
        return self._buffer[:size]

    def tell(self) -> int:
        return self._offset - self._first


def shard_urls(shards: Names) -> list[str]:
    """Return all urls and paths that ``shards`` describes; raise ValueError if a pattern matches no file."""
    urls = list[str]()
    for one in [shards] if isinstance(shards, str | os.PathLike) else shards:
        for url in _numbered(str(one)):
            found = sorted(glob.glob(url)) if "://" not in url and glob.has_magic(url) else [url]
            if not found:
                raise ValueError(f"shards={redact_urls(url)!r}: no file matches")
            urls += found
    if not urls:
        raise ValueError("shards: the list is empty")
    return urls


def _numbered(url: str) -> list[str]:
    if (found := _RANGE.search(url)) is None:
        return [url]
    first, last = found.groups()
    numbers = (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
    return [one for number in numbers for one in _numbered(url.replace(found[0], number, 1))]
