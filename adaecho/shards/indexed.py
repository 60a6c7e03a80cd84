"""Tar shards with random access: an index of where each example lies, and range requests."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.shards.remote import Retries, Transfer, Version
from adaecho.shards.sequential import shard_urls
from adaecho.shards.tar import groups

_LONGEST_READ = 1 << 26  # bytes: neighbours are read at once up to here
_INDEXED_AT_ONCE = 8  # shards: their headers are waited for, not worked on


class IndexedTarShards:
    """Examples of tar archives by number, read by byte range; a map-style dataset.

    An EchoLoader can permute them (``order="permutation"``), or shuffle the shards and read each through
    (``order="shards"``: neighbours come with one request). Its state holds identities, and restoring reads
    again only what the buffer held. Examples are those of ``TarShards``.

    Args:
        shards: as for ``TarShards``.
        index: a local file for the index, which is made in one pass over the archives' headers: used where it
            exists, written where it doesn't. None makes it anew, in memory (16 bytes for each example).
        retries: of network reads.

    Raises:
        ValueError: an archive is damaged, or ``index`` is of other shards.
        TransferError: an archive could not be read, or is another one than when it was indexed.
    """

    def __init__(
        self,
        shards: str | Sequence[str],
        *,
        index: str | os.PathLike[str] | None = None,
        retries: Retries | None = None,
    ) -> None:
        self.urls = shard_urls(shards)
        self._retries = retries or Retries()
        path = None if index is None else Path(index)
        if path is not None and path.exists():
            self._load(path)
        else:
            self._make()
            if path is not None:
                self._save(path)
        self._first = np.concatenate([[0], np.cumsum(self.shard_lengths)])

    def _make(self) -> None:
        with ThreadPoolExecutor(_INDEXED_AT_ONCE, "adaecho-index") as pool:
            found = list(pool.map(self._index_of, self.urls))
        self.shard_lengths = np.array([len(spans) for spans, _ in found], dtype=np.int64)
        self._spans = np.concatenate([spans for spans, _ in found])
        self._versions = [version for _, version in found]

    def _index_of(self, url: str) -> tuple[NDArray[np.int64], Version]:
        transfer = Transfer(url, retries=self._retries)
        try:
            spans = [(group.start, group.end) for group in groups(transfer, read=False)]
        finally:
            transfer.close()
        return np.array(spans, dtype=np.int64).reshape(-1, 2), transfer.version or Version(None)

    def _save(self, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with temporary.open("wb") as file:
            np.savez(
                file,
                urls=np.array(self.urls),
                shard_lengths=self.shard_lengths,
                spans=self._spans,
                lengths=np.array([-1 if one.length is None else one.length for one in self._versions]),
                tags=np.array([one.tag for one in self._versions]),
            )
        temporary.replace(path)

    def _load(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as saved:
            if saved["urls"].tolist() != self.urls:
                raise ValueError(
                    f"index={str(path)!r}: it is of other shards; delete it, or name another file"
                )
            self.shard_lengths, self._spans = saved["shard_lengths"], saved["spans"]
            pairs = zip(saved["lengths"].tolist(), saved["tags"].tolist(), strict=True)
            self._versions = [Version(None if length < 0 else length, tag) for length, tag in pairs]

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row}: must lie in [0, {len(self)})")
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Many examples; neighbours with one request."""
        examples: list[dict[str, Any]] = []
        while len(examples) < len(rows):
            examples += self._run(rows[len(examples) :])
        return examples

    def _run(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The first of some rows, and those after it that follow it in its archive."""
        shard = int(np.searchsorted(self._first, rows[0], "right")) - 1
        count, start = 1, int(self._spans[rows[0], 0])
        while (
            count < len(rows)
            and rows[count] == rows[0] + count < self._first[shard + 1]
            and self._spans[rows[count], 1] - start <= _LONGEST_READ
        ):
            count += 1
        end = int(self._spans[rows[count - 1], 1])
        transfer = Transfer(
            self.urls[shard], start, end, retries=self._retries, version=self._versions[shard]
        )
        try:
            found = [group.example for group in groups(transfer, read=True)]
        finally:
            transfer.close()
        if len(found) != count:
            raise ValueError(
                f"{self.urls[shard]}: {len(found)} examples from byte {start}, {count} were indexed"
            )
        return found

    def origin(self, row: int) -> str:
        """What to call an example in a message."""
        shard = int(np.searchsorted(self._first, row, "right")) - 1
        return f"example {row - self._first[shard]} of {self.urls[shard]} (byte {self._spans[row, 0]})"
