"""Tar shards read one after another: a source for an EchoLoader."""

import glob
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np

from adaecho.masking import shown
from adaecho.shards.remote import Retries, Transfer, Version, is_remote, shown_url
from adaecho.shards.tar import Group, groups

Names = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_NAMES = 1_000_000  # that one pattern may stand for
_DRAWN = 1024  # draws made at once


def shard_urls(shards: Names) -> list[str]:
    """The urls or paths that are meant.

    Args:
        shards: one or more; ``{000..127}`` stands for each number, and a local ``*`` for what it matches,
            but in the name of a file that there is.

    Raises:
        ValueError: there are none, a pattern matches none, or stands for more than 1,000,000.
    """
    urls = []
    for one in [shards] if isinstance(shards, str | os.PathLike) else shards:
        if not is_remote(str(one)) and os.path.lexists(one):
            urls.append(str(one))
            continue
        count = math.prod(max(int(last) - int(first) + 1, 0) for first, last in _RANGE.findall(str(one)))
        if count > _MOST_NAMES:
            raise ValueError(
                f"shards={shown_url(str(one))!r}: it stands for {count} names, more than {_MOST_NAMES}; "
                "give the numbers that there are"
            )
        for url in _numbered(str(one)):
            matched = not is_remote(url) and glob.has_magic(url) and not os.path.lexists(url)
            found = sorted(glob.glob(url)) if matched else [url]
            if not found:
                raise ValueError(f"shards={shown_url(url)!r}: no file matches")
            urls += found
    if not urls:
        raise ValueError(f"shards={shown(repr(shards))}: names no file")
    return urls


def _numbered(url: str) -> list[str]:
    found = _RANGE.search(url)
    if found is None:
        return [url]
    first, last = found.groups()
    numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    before, after = url[: found.start()], url[found.end() :]
    return [one for number in numbers for one in _numbered(f"{before}{number}{after}")]


class TarShards:
    """Examples of tar archives, each read through, several at once.

    Files that follow one another and share a name up to the first dot are one example, as in WebDataset:
    ``{"__key__": "0001", "jpg": bytes, "cls": bytes}``. Ranks share out the shards; where there are fewer
    shards than ranks, every rank reads them all and keeps its share of the examples.

    Args:
        shards: paths or urls of plain tar archives: ``http(s)://``, or a protocol of fsspec; ``{000..127}``
            stands for each number and a local ``*`` for what it matches.
        order: ``shards`` shuffles them anew for each pass and mixes the examples of ``open_shards`` of them;
            ``stored`` takes them one after another, as they are given.
        seed: of that order, the same on all ranks.
        open_shards: archives that a rank reads at once, each through a connection of its own, for the order
            ``shards``: each example comes from a random one of them, and the next takes the place of one
            that ends. 1 reads one after another. A position that was told goes on with as many as it had.
        retries: of network reads.

    Raises:
        ValueError: there are no shards, or ``order`` or ``open_shards`` can't be.
    """

    def __init__(
        self,
        shards: Names,
        *,
        order: str = "shards",
        seed: int = 0,
        open_shards: int = 8,
        retries: Retries | None = None,
    ) -> None:
        if open_shards < 1:
            raise ValueError(f"open_shards={open_shards}: must be at least 1")
        if order not in ("shards", "stored"):
            raise ValueError(f"order={order!r}: must be one of shards, stored")
        self.urls = shard_urls(shards)
        self._order, self._seed, self.retries = order, seed, retries or Retries()
        self.open_shards = open_shards if order == "shards" else 1
        self._epoch, self._rank, self._world = 0, 0, 1
        self.versions: dict[str, Version] = {}  # of what has been opened: each must stay what it was

    @property
    def key(self) -> tuple[int, int]:
        """Of what is drawn in a pass: the order of the archives, and from which each example comes."""
        return self._seed & 0xFFFFFFFFFFFFFFFF, self._epoch

    def set_epoch(self, epoch: int) -> None:
        """The pass that the next ``iter()`` gives."""
        self._epoch = epoch

    def set_share(self, rank: int, world_size: int) -> None:
        """Give only this rank's examples; an EchoLoader sets it."""
        self._rank, self._world = rank, world_size

    def __iter__(self) -> "TarPass":
        return self.iterate_from(())

    def iterate_from(self, position: Sequence[int]) -> "TarPass":
        """A pass from a ``TarPass.position`` on; () is its beginning."""
        urls = self.urls
        if self._order == "shards":
            order = np.random.Generator(np.random.Philox(key=self.key)).permutation(len(urls))
            urls = [urls[index] for index in order]
        rank, world = self._rank, self._world
        if len(urls) >= world:
            urls, rank, world = urls[rank::world], 0, 1
        return TarPass(self, urls, position, rank, world)


_ANY = Version()


@dataclass
class _Archive:
    """One that a pass is within: its number, where its next example begins, what it was then."""

    shard: int
    byte: int = 0
    continued: Version = _ANY
    transfer: Transfer | None = None
    groups: Iterator[Group] = field(default_factory=lambda: iter(()))

    def close(self) -> None:
        if self.transfer is not None:
            self.transfer.close()
            self.transfer = None


class TarPass:
    """One pass over archives.

    Args:
        source: whose pass it is; what the archives were when they were first opened is kept there, by url.
        urls: of the archives, in their order.
        position: where to begin.
        rank, world: which examples to keep, by their number within the pass.
    """

    def __init__(
        self, source: "TarShards", urls: list[str], position: Sequence[int], rank: int, world: int
    ) -> None:
        self._urls, self._retries, self._versions = urls, source.retries, source.versions
        self._rank, self._world, self._key = rank, world, source.key
        first = range(min(source.open_shards, len(urls)))
        self._following, self._count, *within = position or (len(first), 0)
        self._within = [_Archive(number) for number in first]
        if position:
            fives = zip(*[iter(within)] * 5, strict=True)
            self._within = [_Archive(shard, byte, Version(*version)) for shard, byte, *version in fives]
        self._block, self._draws = -1, list[int]()

    @property
    def position(self) -> list[int]:
        """Where the next example begins.

        Number of the archive to be opened next, examples passed over so far; and of each archive within which
        it is, number, byte and version, so that a state is never continued in another one.
        """
        at = [self._following, self._count]
        for archive in self._within:
            url = self._urls[archive.shard]
            version = self._expected(archive).lasting(url) if archive.byte else _ANY
            at += [archive.shard, archive.byte, *astuple(version)]
        return at

    def _expected(self, archive: _Archive) -> Version:
        """What an archive was: as first opened, unless this pass continues in another one."""
        known = self._versions.get(self._urls[archive.shard], archive.continued)
        return archive.continued if known.differs(archive.continued) else known

    def _drawn(self) -> int:
        """A random number for the next example."""
        block, at = divmod(self._count, _DRAWN)
        if block != self._block:
            # Apart from the draws of the shards' order, which begin at counter 0.
            bits = np.random.Philox(key=self._key, counter=[0, 0, block, 1])
            self._block, self._draws = block, bits.random_raw(_DRAWN).tolist()
        return self._draws[at]

    def __iter__(self) -> "TarPass":
        return self

    def __next__(self) -> dict[str, Any]:
        while self._within:
            slot = self._drawn() % len(self._within)
            group = self._next_of(self._within[slot])
            if group is None:
                following = range(self._following, min(self._following + 1, len(self._urls)))
                self._within[slot : slot + 1] = [_Archive(number) for number in following]
                self._following += len(following)
                continue
            self._count += 1
            if (self._count - 1) % self._world == self._rank:
                return group.example
        raise StopIteration

    def _next_of(self, archive: _Archive) -> Group | None:
        url = self._urls[archive.shard]
        if archive.transfer is None:
            expected = self._expected(archive)
            archive.transfer = Transfer(url, archive.byte, retries=self._retries, version=expected)
            archive.groups = groups(archive.transfer, read=True)
        try:
            group = next(archive.groups, None)
        except BaseException:
            self.close()  # all: the next call, if there is one, begins where this example does
            raise
        self._versions[url] = archive.transfer.version
        if group is None:
            archive.close()
        else:
            archive.byte = group.end
        return group

    def close(self) -> None:
        """Let go of connections and files."""
        for archive in self._within:
            archive.close()
