"""Errors that are the user's to mend: each says what is wrong, why, and what to do."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class UserError(Exception):
    """Shown as one message without a traceback; the command exits with 2.

    Attributes:
        told_elsewhere: another rank of the same run shows it.
    """

    told_elsewhere = False


class ConfigError(UserError):
    """A config value that can't be: names the key, the value, the reason and the remedy."""


class DataError(UserError):
    """Data that is missing, empty, of the wrong schema or corrupt: names the path and the record."""


class RankError(UserError):
    """Another rank failed, is gone, or sees something else; names it."""


class FolderError(UserError):
    """A run folder that can't be used: written by another process or config, read-only, or full."""


def fail(message: object) -> NoReturn:
    """End a command with one message on standard error, unless another rank shows it, and exit code 2."""
    if isinstance(message, UserError) and message.told_elsewhere:
        sys.exit(2)
    rank = os.environ.get("RANK")
    of = "" if rank is None else f"rank {rank}: "  # under torchrun, which mixes what they print
    print(f"error: {of}{message}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def told() -> Iterator[None]:
    """End a command like that at a ``UserError`` inside; any other exception is a crash."""
    try:
        yield
    except UserError as error:
        fail(error)
