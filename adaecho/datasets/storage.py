"""What data may do to a command: storage that fails, files that are others now, and examples to skip."""

import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from adaecho.errors import DataError, warn

FILES = "files_sha256"
_LISTED = 3  # lines that tell which examples are bad
_REMEDY = "once that is mended, run the same command again: a run continues where it was"


@contextmanager
def storage_errors() -> Iterator[None]:
    """Tell what storage refuses inside as a ``DataError``: which file, why, what to do."""
    try:
        yield
    except (ConnectionError, tarfile.TarError) as error:
        raise DataError(f"{error}; {_REMEDY}") from error
    except OSError as error:
        if error.filename is None:  # no file's
            raise
        raise DataError(f"{error.filename}: can't be read ({error.strerror}); {_REMEDY}") from error


def fingerprint_of(files: Iterable[str | os.PathLike[str]]) -> dict[str, str]:
    """One digest of the files' names (with that of their folder) and sizes; of urls the names alone.

    A checkpoint holds it, so that a run is not continued in silence after files were added, removed or
    exchanged; contents are not read. Empty for no files.

    Raises:
        DataError: a file is gone, or can't be asked for.
    """
    names = sorted(map(str, files))
    if not names:
        return {}
    with storage_errors():
        told = "\n".join(map(_told, names))
    return {FILES: hashlib.sha256(os.fsencode(told)).hexdigest()[:16]}


def _told(name: str) -> str:
    path = Path(name.partition("?")[0])
    size = "" if "://" in name else os.stat(name).st_size
    return f"{path.parent.name}/{path.name} {size}"


class SkippedExamples:
    """Examples that can't be used: skipped and listed within a budget, an error beyond it.

    Args:
        budget: ``data.max_bad_examples``.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self._found = budget, list[str]()

    def add(self, origin: str, reason: str) -> None:
        """Count one more, and say so on stderr.

        Args:
            origin: file and row.
            reason: why it can't be used.

        Raises:
            DataError: it exceeds the budget.
        """
        self._found.append(f"{origin}: {reason}")
        if len(self._found) > self._budget:
            raise DataError(
                f"more bad examples than data.max_bad_examples={self._budget} allows to skip; mend the "
                "files, or allow more:\n  " + "\n  ".join(self._found[-_LISTED:])
            )
        warn(f"bad example skipped: {self._found[-1]}")

    @property
    def count(self) -> int:
        """How many were skipped."""
        return len(self._found)
