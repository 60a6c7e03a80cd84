"""Tar shards read one after another: a source for an EchoLoader."""

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from adaecho.shards.remote import Retries, Transfer, Version, is_remote
from adaecho.shards.tar import Group, groups

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def shard_urls(shards: str | Sequence[str]) -> list[str]:
    """The urls or paths that are meant.

    Args:
        shards: one or more; ``{000..127}`` stands for each number, and a local ``*`` for what it matches.

    Raises:
        ValueError: there are none.
    """
    urls = []
    for one in [shards] if isinstance(shards, str) else shards:
        for url in _numbered(str(one)):
            matched = not is_remote(url) and glob.has_magic(url)
            urls += sorted(glob.glob(url)) if matched else [url]
    if not urls:
        raise ValueError(f"shards={shards!r}: no file matches")
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
    """Examples of tar archives, read through one after another.

    Files that follow one another and share a name up to the first dot are one example, as in WebDataset:
    ``{"__key__": "0001", "jpg": bytes, "cls": bytes}``. Ranks share out the shards; where there are fewer
    shards than ranks, every rank reads them all and keeps its share of the examples.

    Args:
        shards: paths or urls of plain tar archives: ``http(s)://``, or a protocol of fsspec; ``{000..127}``
            stands for each number and a local ``*`` for what it matches.
        order: ``shards`` shuffles them anew for each pass and reads each through; ``stored`` takes them as
            they are given.
        seed: of that shuffling, the same on all ranks.
        retries: of network reads.

    Raises:
        ValueError: there are no shards, or ``order`` can't be.
    """

    def __init__(
        self,
        shards: str | Sequence[str],
        *,
        order: str = "shards",
        seed: int = 0,
        retries: Retries | None = None,
    ) -> None:
        if order not in ("shards", "stored"):
            raise ValueError(f"order={order!r}: must be one of shards, stored")
        self.urls = shard_urls(shards)
        self._order, self._seed, self._retries = order, seed, retries or Retries()
        self._epoch, self._rank, self._world = 0, 0, 1
        self._versions: dict[str, Version] = {}  # of what has been opened: each must stay what it was

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
            key = [self._seed & 0xFFFFFFFFFFFFFFFF, self._epoch]
            order = np.random.Generator(np.random.Philox(key=key)).permutation(len(urls))
            urls = [urls[index] for index in order]
        if len(urls) < self._world:
            return TarPass(urls, position, self._retries, self._versions, self._rank, self._world)
        urls = urls[self._rank :: self._world]
        return TarPass(urls, position, self._retries, self._versions, 0, 1)


class TarPass:
    """One pass over archives.

    Args:
        urls: of the archives, in their order.
        position: where to begin.
        retries: of network reads.
        versions: what the archives were when they were first opened, by url; added to.
        rank, world: which examples to keep, by their number within the pass.
    """

    def __init__(
        self,
        urls: list[str],
        position: Sequence[int],
        retries: Retries,
        versions: dict[str, Version],
        rank: int,
        world: int,
    ) -> None:
        self._urls, self._retries, self._versions = urls, retries, versions
        self._rank, self._world = rank, world
        self._shard, self._byte, self._count, *version = position or (0, 0, 0)
        self._continued = Version(*version)  # the archive in which this pass begins
        self._transfer: Transfer | None = None
        self._groups: Iterator[Group] = iter(())

    @property
    def position(self) -> list[int]:
        """Where the next example begins: number of the archive, byte, examples passed over so far.

        Within an archive also its version, so that a state is never continued in another one.
        """
        at = [self._shard, self._byte, self._count]
        if not self._byte:
            return at
        url = self._urls[self._shard]
        return [*at, *astuple(self._expected(url).lasting(url))]

    def _expected(self, url: str) -> Version:
        """What the archive at hand was: as first opened, unless this pass continues in another one."""
        known = self._versions.get(url, self._continued)
        return self._continued if known.differs(self._continued) else known

    def __iter__(self) -> "TarPass":
        return self

    def __next__(self) -> dict[str, Any]:
        while self._shard < len(self._urls):
            url = self._urls[self._shard]
            if self._transfer is None:
                self._transfer = Transfer(url, self._byte, retries=self._retries, version=self._expected(url))
                self._groups = groups(self._transfer, read=True)
            try:
                group = next(self._groups, None)
            except BaseException:
                self.close()  # the next call begins where this example does
                raise
            self._versions[url] = self._transfer.version
            if group is None:
                self.close()
                self._shard, self._byte, self._continued = self._shard + 1, 0, Version()
                continue
            self._byte = group.end
            self._count += 1
            if (self._count - 1) % self._world == self._rank:
                return group.example
        raise StopIteration

    def close(self) -> None:
        """Let go of the connection or file."""
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
