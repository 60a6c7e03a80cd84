"""What tells files from those that lay there before: a digest of each, whole or of samples.

A checkpoint holds them, so that a run is never continued with other data in silence.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path

from adaecho.datasets.storage import storage_errors
from adaecho.masking import masked
from adaecho.shards.remote import Retries, Transfer, is_remote

_WHOLE = 1 << 28  # bytes: of files that have less together every byte is read
_END = 1 << 16  # bytes read at both ends of a larger one
_BLOCK = 1 << 12  # bytes of a sample between them
_SAMPLES = 1 << 14  # of all files together, at most 16 of each
_NAMED = 1 << 12  # files: of more, those of a folder have one digest
_THREADS = 8  # storage is waited for, not worked on


def fingerprint_of(files: Iterable[str | os.PathLike[str]]) -> dict[str, str]:
    """A digest of each file, by its name; by its folder where they are more than 4,096.

    Files that have less than 256 MiB together are read whole; of larger ones size, both ends and samples
    count, of http(s) and stores of fsspec length, ETag (or time of modification) and the beginning. Of more
    than 4,096 files the names of all count, and sizes and contents of 4,096 that are spread evenly.

    Args:
        files: paths, or urls as ``adaecho.shards`` reads them.

    Raises:
        DataError: a file can't be read.
    """
    names = sorted({str(file).removeprefix("file://") for file in files})
    step = -(-len(names) // _NAMED) or 1
    looked_at = names[::step]
    with storage_errors():
        sizes = {name: os.stat(name).st_size for name in looked_at if not is_remote(name)}
        samples = 0 if step == 1 and sum(sizes.values()) < _WHOLE else max(2, min(16, _SAMPLES // len(names)))
        with ThreadPoolExecutor(_THREADS) as threads:
            digests = dict(
                zip(looked_at, threads.map(lambda name: _of_file(name, samples), looked_at), strict=True)
            )
    found: dict[str, str] = {}
    for name, digest in (digests if step == 1 else _by_folder(names, digests)).items():
        shown = masked(name)  # of urls that differ in their query alone, several digests
        found[shown] = f"{found[shown]}; {digest}" if shown in found else digest
    return found


def without_secrets(fingerprint: dict[str, str]) -> dict[str, str]:
    """What a checkpoint may hold of a task's: of secrets in a url no more than whether they are others."""
    kept = {}
    for name, value in fingerprint.items():
        shown = masked(value)
        digest = hashlib.sha256(str(value).encode()).hexdigest()[:8]
        kept[masked(name)] = value if shown == value else f"{shown} (sha256 {digest})"
    return kept


def _of_file(name: str, samples: int) -> str:
    if is_remote(name):
        return _of_remote(name)
    about = os.stat(name)
    return _of_local(name, samples, about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns)


@cache  # a sweep's worker looks at the same files for each of its trials
def _of_local(name: str, samples: int, size: int, *_state_of_file: int) -> str:
    with Path(name).open("rb") as file:
        if not samples or size <= 2 * _END:
            return f"{size} bytes, sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
        digest = hashlib.sha256()
        between = range(1, samples + 1)
        starts = [_END + (size - 2 * _END - _BLOCK) * number // (samples + 1) for number in between]
        for start, length in [
            (0, _END),
            *((max(start, _END), _BLOCK) for start in starts),
            (size - _END, _END),
        ]:
            file.seek(start)
            digest.update(file.read(length))
    return f"{size} bytes, sha256 of samples {digest.hexdigest()[:16]}"


def _of_remote(url: str) -> str:
    with closing(Transfer(url, retries=Retries())) as transfer:
        beginning = transfer.read(_END)
    return f"{transfer.version}, sha256 of its beginning {hashlib.sha256(beginning).hexdigest()[:16]}"


def _by_folder(names: Sequence[str], digests: dict[str, str]) -> dict[str, str]:
    folders: dict[str, list[str]] = {}
    for name in names:
        folders.setdefault(name.rpartition("/")[0], []).append(f"{name} {digests.get(name, '')}")
    found = {}
    for folder, lines in folders.items():
        digest = hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()[:16]
        found[f"{folder}/"] = f"{len(lines)} files, sha256 {digest}"
    return found
