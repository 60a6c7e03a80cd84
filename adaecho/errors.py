"""Errors that are the user's to mend: each says what is wrong, why, and what to do."""

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn

from adaecho.masking import presentable


class UserError(Exception):
    """Shown as one message without a traceback; the command exits with 2.

    Attributes:
        told_elsewhere: another rank of the same run shows it.
    """

    told_elsewhere = False

    def __str__(self) -> str:
        return presentable(super().__str__())


class ConfigError(UserError):
    """A config value that can't be: names the key, the value, the reason and the remedy."""


class DataError(UserError):
    """Data that is missing, empty, of the wrong schema or corrupt: names the path and the record."""


class ExampleError(DataError, ValueError):
    """One example that can't be used: counted where bad examples may be skipped, else the end of a run."""


class RankError(UserError):
    """Another rank failed, is gone, or sees something else; names it."""


class FolderError(UserError):
    """A run folder that can't be used: written by another process or config, read-only, or full."""


class DiskError(FolderError):
    """The system refused to read or write, perhaps for a moment: says nothing about what lies there."""


class ChangedDataError(FolderError):
    """The data is not what a checkpoint was trained with; nothing is wrong with the checkpoint."""


def fail(message: object) -> NoReturn:
    """End a command with one message on standard error, unless another rank shows it, and exit code 2."""
    if isinstance(message, UserError) and message.told_elsewhere:
        sys.exit(2)
    rank = os.environ.get("RANK")
    of = "" if rank is None else f"rank {rank}: "  # under torchrun, which mixes what they print
    text = with_notes(message) if isinstance(message, BaseException) else presentable(message)
    print(f"error: {of}{text}", file=sys.stderr)
    sys.exit(2)


def say(text: object) -> None:
    """Print a line of a command; see ``presentable``."""
    print(presentable(text), flush=True)


def warn(text: object) -> None:
    """Print a warning that nobody needs to catch, on standard error; see ``presentable``."""
    print(f"warning: {presentable(text)}", file=sys.stderr, flush=True)


def with_notes(error: BaseException) -> str:
    """Its message, and the notes that were added on its way: of which example it is, say."""
    return presentable("\n".join([str(error), *getattr(error, "__notes__", [])]))


def how_to_install(extra: str) -> str:
    """How one gets an optional part: no version has been released, so it is installed from a checkout."""
    return f"pip install '.[{extra}]' in the checkout of adaecho"


@contextmanager
def about_one_example() -> Iterator[None]:
    """Raise the ValueErrors inside, which tell what is wrong with an example's content, as ExampleErrors."""
    try:
        yield
    except ValueError as error:
        raise ExampleError(str(error)) from error


def how_they_differ(of_training: Sequence[str], of_validation: Sequence[str]) -> str:
    """Which names two splits don't share, the first few of them, for a message."""
    pairs = (("training", of_training, of_validation), ("validation", of_validation, of_training))
    parts = []
    for split, mine, others in pairs:
        only = [name for name in mine if name not in {*others}]
        if only:
            more = f" and {len(only) - 5} more" if len(only) > 5 else ""
            parts.append(f"only in {split}: {', '.join(only[:5])}{more}")
    return "; ".join(parts) or "the same names in another order"


@contextmanager
def told() -> Iterator[None]:
    """End a command like that at a ``UserError`` inside, or a thread too many; all else is a crash."""
    sys.excepthook = _tell_crash
    try:
        yield
    except UserError as error:
        fail(error)
    except RuntimeError as error:
        if "can't start new thread" not in str(error):  # CPython's words
            raise
        fail(
            "can't start new thread: too little memory for one more, or too low a limit (ulimit -u, or a "
            "container's of processes); raise it, or lower data.num_workers"
        )


def _tell_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(presentable("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
