"""Tar shards with random access: an index of where each example lies, and range requests."""

import os
import threading
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.shards.remote import Retries, Transfer, Version, is_remote, shown_url
from adaecho.shards.sequential import Names, shard_urls
from adaecho.shards.tar import ArchiveError, groups

_LONGEST_READ = 1 << 26  # bytes: neighbours are read at once up to here
_INDEXED_AT_ONCE = 8  # shards: their headers are waited for, not worked on


class IndexedTarShards:
    """Examples of tar archives by number, read by byte range; a map-style dataset.

    An EchoLoader can permute them (``order="permutation"``), or shuffle the shards and read some side by side
    (``order="shards"``: neighbours come with one request). Its state holds identities, and restoring reads
    again only what the buffer held. Examples are those of ``TarShards``.

    Args:
        shards: as for ``TarShards``.
        index: a local file for the index, which is made in one pass over the archives' headers: used where it
            exists, written where it doesn't. None makes it anew, in memory (16 bytes for each example). Of
            urls it holds what may be shown: one signed anew names the same archive.
        open_shards: that ``order="shards"`` reads side by side, a few neighbours of each at a time.
        retries: of network reads.

    Raises:
        ValueError: an archive is damaged, or ``index`` is, or is of other shards.
        TransferError: an archive could not be read, or is another one than when it was indexed.
    """

    thread_safe = True  # each read is a transfer of its own

    def __init__(
        self,
        shards: Names,
        *,
        index: str | os.PathLike[str] | None = None,
        open_shards: int = 8,
        retries: Retries | None = None,
    ) -> None:
        self.urls, self.open_shards = shard_urls(shards), open_shards
        self._retries = retries or Retries()
        path = None if index is None else Path(index)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"index={str(path)!r}: it is a folder, or lies in none; name a file in one")
        if path is not None and path.is_file():
            self._load(path)
        else:
            self._make()
            if path is not None:
                self._save(path)
        self._first = np.concatenate([[0], np.cumsum(self.shard_lengths)])

    def _make(self) -> None:
        stopping = threading.Event()
        with ThreadPoolExecutor(
            _INDEXED_AT_ONCE, "adaecho-index", initializer=_stop_with, initargs=(stopping,)
        ) as pool:
            try:
                found = list(pool.map(self._index_of, self.urls))
            except BaseException:
                stopping.set()  # Ctrl-C does not wait for a transfer that drips or is to be tried again
                raise
        self.shard_lengths = np.array([len(spans) for spans, _ in found], dtype=np.int64)
        self._spans = np.concatenate([spans for spans, _ in found])
        self._versions = [version for _, version in found]

    def _index_of(self, url: str) -> tuple[NDArray[np.int64], Version]:
        with closing(Transfer(url, retries=self._retries)) as transfer:
            spans = [(group.start, group.end) for group in groups(transfer, read=False)]
        return np.array(spans, dtype=np.int64).reshape(-1, 2), transfer.version

    def _save(self, path: Path) -> None:
        # Not named by process: ranks on two hosts, or in two containers, may have one number.
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        lasting = [astuple(one.lasting(url)) for url, one in zip(self.urls, self._versions, strict=True)]
        try:
            with temporary.open("wb") as file:
                np.savez(
                    file,
                    urls=np.array([shown_url(url) for url in self.urls]),
                    shard_lengths=self.shard_lengths,
                    spans=self._spans,
                    versions=np.array(lasting),
                )
            temporary.replace(path)
        except OSError as error:  # which names no file where the disk is full
            reason = f"{error.strerror or error}; free some space, or name another file in index="
            raise OSError(error.errno, reason, str(path)) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _load(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                # The archive that NumPy writes has a checksum of each array.
                with zipfile.ZipFile(file) as archive:
                    if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                        raise ValueError("its parts are compressed, which those of an index are not")
                with np.load(path, allow_pickle=False) as saved:
                    urls = saved["urls"].tolist()
                    self.shard_lengths, self._spans = saved["shard_lengths"], saved["spans"]
                    self._versions = [Version(*one) for one in saved["versions"].tolist()]
                self._check(len(urls))
            except Exception as error:  # a damaged zip archive raises nearly anything
                raise ValueError(
                    f"index={str(path)!r}: it is damaged, or no index of this version "
                    f"({type(error).__name__}: {error}); delete it, and it is made anew"
                ) from error
        if urls != [shown_url(url) for url in self.urls]:
            raise ValueError(f"index={str(path)!r}: it is of other shards; delete it, or name another file")
        for url in self._grown():
            raise ValueError(f"index={str(path)!r}: {url} holds more examples than it; delete it")

    def _grown(self) -> Iterator[str]:
        """The local shards that go on behind their last example: the padding holds what was appended."""
        lengths = self.shard_lengths
        for url, length, last in zip(self.urls, lengths, np.cumsum(lengths) - 1, strict=True):
            if not is_remote(url) and Path(url.removeprefix("file://")).is_file():
                end = int(self._spans[last, 1]) if length else 0
                with closing(Transfer(url, end, retries=self._retries)) as transfer:
                    if any(groups(transfer, read=False)):
                        yield url

    def _check(self, shards: int) -> None:
        """Raises ValueError where lengths, spans and versions can't be of that many shards."""
        lengths, spans = self.shard_lengths, self._spans
        if lengths.dtype != np.int64 or spans.dtype != np.int64 or spans.shape != (len(spans), 2):
            raise ValueError("its arrays are of another form")
        if not (lengths.shape == (shards,) and len(self._versions) == shards and (lengths >= 0).all()):
            raise ValueError("it has not one length and version for each shard")
        within = np.ones(len(spans), dtype=bool)  # [examples], whether the one before is of the same shard
        within[np.cumsum(lengths)[:-1][lengths[1:] > 0] if lengths.sum() == len(spans) else []] = False
        rising = (spans[1:, 0] >= spans[:-1, 1]) | ~within[1:]
        if lengths.sum() != len(spans) or (spans[:, 0] < 0).any() or (spans[:, 1] <= spans[:, 0]).any():
            raise ValueError("its spans are no bytes of so many examples")
        if not rising.all():
            raise ValueError("its spans overlap")

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row}: must lie in [0, {len(self)})")
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Many examples; neighbours with one request, wherever they stand among the others."""
        places = sorted(range(len(rows)), key=rows.__getitem__)
        rising, found = [rows[place] for place in places], list[dict[str, Any]]()
        while len(found) < len(rows):
            found += self._run(rising[len(found) :])
        return [found[at] for at in sorted(range(len(rows)), key=places.__getitem__)]

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
        url, version = self.urls[shard], self._versions[shard]
        with closing(Transfer(url, start, end, retries=self._retries, version=version)) as transfer:
            found = [group.example for group in groups(transfer, read=True)]
        self._versions[shard] = (
            transfer.version
        )  # an index knows no times of local files: from now on they count
        if len(found) != count:
            raise ArchiveError(
                f"{transfer.name}: {len(found)} examples from byte {start}, {count} were indexed"
            )
        return found

    def identity(self, row: int) -> str:
        """What tells an example from others, wherever the shards lie."""
        url = shown_url(self.urls[int(np.searchsorted(self._first, row, "right")) - 1])
        return f"{url.partition('?')[0].rpartition('/')[2]} {self._spans[row].tolist()}"

    def origin(self, row: int) -> str:
        """What to call an example in a message."""
        shard = int(np.searchsorted(self._first, row, "right")) - 1
        number, url = row - self._first[shard], shown_url(self.urls[shard])
        return f"example {number} of {url} (byte {self._spans[row, 0]})"


class _StoppedError(BaseException):
    """The index is not needed any more."""


def _stop_with(stopping: threading.Event) -> None:
    """Give this thread the ``rest`` that ends it once it is to stop (see ``remote.rest``)."""

    def rest(seconds: float) -> None:
        if stopping.wait(seconds):
            raise _StoppedError

    threading.current_thread().rest = rest  # type: ignore[attr-defined]
