"""Storage that fails while a command works with its data is the user's to mend, in every command alike."""

from collections.abc import Iterator
from contextlib import contextmanager

from adaecho.errors import DataError, with_notes
from adaecho.shards import ArchiveError, TransferError

_REMEDY = "once that is mended, run the same command again: a run continues where it was"


@contextmanager
def shard_errors(key: str = "data.path") -> Iterator[None]:
    """Tell what is wrong with tar shards, or can't be read of them, as a ``DataError`` of this key."""
    try:
        yield
    except (ValueError, OSError) as error:
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
        raise DataError(f"{error.filename}: can't be read ({error.strerror}); {_REMEDY}") from error
