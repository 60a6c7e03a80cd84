"""What data may do to a command: storage that fails, which is the user's to mend, and examples to skip."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from adaecho.errors import DataError, warn, with_notes
from adaecho.masking import presentable
from adaecho.shards import ArchiveError, TransferError

_LARGEST = 1 << 30  # bytes: the largest image that is decoded has as many unpacked
_UNREAD = (
    ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".rar",
    ".part", ".partial", ".crdownload", ".incomplete", ".aria2", ".dvc",
)  # fmt: skip
_LISTED = 3  # lines that tell which examples are bad
_REMEDY = "once that is mended, run the same command again: a run continues where it was"


@contextmanager
def shard_errors(key: str = "data.path") -> Iterator[None]:
    """Tell what is wrong with tar shards, or can't be read of them, as a ``DataError`` of this key."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise DataError(f"{key}: {error}") from error


@contextmanager
def storage_errors() -> Iterator[None]:
    """Tell what storage refuses inside as a ``DataError``: which file, why, what to do.

    That is a server that was given up on, a shard that has changed or is damaged, a file that is gone or
    can't be read.
    """
    try:
        yield
    except (TransferError, ArchiveError) as error:
        raise DataError(f"{with_notes(error)}; {_REMEDY}") from error
    except OSError as error:
        if error.filename is None:  # no file's
            raise
        _tell(error)


def _tell(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: can't be read ({error.strerror}); {_REMEDY}") from error


# Of a run, of a sweep, of W&B.
_RECORDS = (
    {"config.yaml", "environment.json"}, {"design.json", "data.json"}, {"debug.log", "debug-internal.log"},
)  # fmt: skip


def holds_records(names: Iterable[str]) -> bool:
    """Whether a folder with these names in it is that of a run or a sweep, or W&B's, and so no data."""
    found = {*names}
    return any(record <= found for record in _RECORDS)


def check_links(paths: Iterable[Path], endings: str | tuple[str, ...] = "") -> None:
    """Refuse links to what isn't there, as where a part of a data set was not fetched.

    Args:
        paths: what is hidden is not asked: it may be an editor's.
        endings: of the names of what would be read; of others a warning is given.

    Raises:
        DataError: one is; without a word there would be fewer examples.
    """
    nowhere = [path for path in paths if path.is_symlink() and not path.exists() and path.name[0] != "."]
    for path in nowhere:
        if path.name.lower().endswith(endings):
            raise DataError(f"{path}: a link to what isn't there; fetch it, or remove the link")
    if nowhere:
        left_out = ", ".join(map(str, nowhere[:3]))
        warn(
            f"{len(nowhere)} links to what isn't there are left out ({left_out}); fetch them if they are data"
        )


def files_in(top: Path, endings: tuple[str, ...]) -> list[Path]:
    """The regular files in a folder and all below it, in order; or the file itself.

    Links to folders are followed, into each folder once, and to none that the first lies in. What is hidden
    is left out, and so are folders of runs and sweeps, and W&B's, whose records and figures are no data.

    Args:
        endings: of what would be read: see ``check_links``.

    Raises:
        DataError: a link with such a name leads nowhere, or a folder can't be read.
    """
    if not top.is_dir():
        return [top] if top.is_file() else []
    found, seen = list[Path](), set(map(str, top.resolve().parents))
    for folder, inside, names in os.walk(top, followlinks=True, onerror=_tell):
        inside[:] = sorted(name for name in inside if name[0] != ".")  # of two ways always the same is taken
        here = os.path.realpath(folder)
        if here in seen or holds_records(names):
            inside.clear()
        else:
            seen.add(here)
            found += [Path(folder, name) for name in names if name[0] != "."]
    check_links(found, endings)
    return sorted(filter(Path.is_file, found))


def warn_of_unread(top: Path, files: Iterable[Path]) -> None:
    """Warn of files beside what is read that may hold more of it, packed or not fetched whole."""
    unread = sorted(one for one in files if one.name[0] != "." and one.name.lower().endswith(_UNREAD))
    left_out = [one.name for one in unread if not any(map(Path.exists, _unpacked(one)))]
    if left_out:
        warn(
            f"{top}: {len(left_out)} packed or unfinished files are left out ({', '.join(left_out[:3])}); to "
            "have them read, unpack or fetch them"
        )


def _unpacked(file: Path) -> Iterator[Path]:
    """What may have been made of it: of a.tar.gz a.tar or a."""
    while file.suffix.lower() in _UNREAD:
        file = file.with_suffix("")
        yield file


def identity_of(file: Path) -> str:
    """What tells an image from others, wherever its folder lies."""
    return f"{file.name} {file.stat().st_size}"


def read_image(file: Path) -> bytes:
    """The bytes of an encoded image.

    Raises:
        ValueError: they are more than those of any image, as of a file of holes.
    """
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > _LARGEST:
            raise ValueError(f"its {size:,} bytes are no image's, which has at most {_LARGEST:,}")
        return opened.read()


class SkippedExamples:
    """Examples that can't be used: skipped and listed within a budget, an error beyond it.

    Args:
        budget: ``data.max_bad_examples``.
        at_once: say each as it is met, as of a stream; else all of them at ``report``.
    """

    def __init__(self, budget: int, *, at_once: bool = False) -> None:
        self._budget, self._at_once = budget, at_once
        self._found: list[str] = []

    def add(self, origin: str, reason: str) -> None:
        """Count one more.

        Args:
            origin: file and row.
            reason: why it can't be used.

        Raises:
            DataError: it exceeds the budget.
        """
        self._found.append(presentable(f"{origin}: {reason}"))
        if len(self._found) > self._budget:
            number = len(self._found)
            listed = self._found
            if number > _LISTED:
                listed = [*self._found[: _LISTED - 1], f"and {number - _LISTED + 1} more"]
            raise DataError(
                f"more bad examples than data.max_bad_examples={self._budget} allows to skip; mend the "
                "files, or allow more:\n  " + "\n  ".join(listed)
            )
        if self._at_once:
            warn(f"bad example skipped: {self._found[-1]}")

    @property
    def count(self) -> int:
        """How many were skipped."""
        return len(self._found)

    def report(self) -> None:
        """Say on stderr which were skipped."""
        for found in self._found:
            warn(f"bad example skipped: {found}")
