"""Errors that are the user's to mend: each says what is wrong, why, and what to do."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from adaecho.masking import masked


class UserError(Exception):
    """Shown as one message without a traceback; the command exits with 2."""


class ConfigError(UserError):
    """A config value that can't be: names the key, the value, the reason and the remedy."""


class DataError(UserError):
    """Data that is missing, empty, of the wrong schema or corrupt: names the path and the record."""


class ExampleError(DataError, ValueError):
    """One example that can't be used: counted where bad examples may be skipped, else the end of a run."""


class RankError(UserError):
    """Another rank failed, is gone, or sees something else; names it."""


class FolderError(UserError):
    """A run folder that can't be used: written by another process or config, read-only, full or damaged."""


class ChangedDataError(FolderError):
    """The data is not what a checkpoint was trained with; nothing is wrong with the checkpoint."""


def fail(message: object) -> NoReturn:
    """End a command with one message on standard error and exit code 2.

    All ranks of a run have the same config, so only the first shows what is wrong with it.
    """
    rank = os.environ.get("RANK")
    if not (isinstance(message, ConfigError) and rank not in (None, "0")):
        of = "" if rank is None else f"rank {rank}: "  # torchrun mixes what its processes print
        text = with_notes(message) if isinstance(message, BaseException) else str(message)
        print(f"error: {of}{masked(text)}", file=sys.stderr)
    sys.exit(2)


def say(text: object) -> None:
    """Print a line of a command."""
    print(masked(str(text)), flush=True)


def warn(text: object) -> None:
    """Print a warning on standard error."""
    print(f"warning: {masked(str(text))}", file=sys.stderr, flush=True)


def with_notes(error: BaseException) -> str:
    """Its message, and the notes that were added on its way: of which example it is, say."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


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
    only = {split: [name for name in mine if name not in {*others}][:5] for split, mine, others in pairs}
    parts = [f"only in {split}: {', '.join(names)}" for split, names in only.items() if names]
    return "; ".join(parts) or "the same names in another order"


@contextmanager
def told() -> Iterator[None]:
    """End a command with one message at a ``UserError`` inside; all else is a crash with its traceback."""
    try:
        yield
    except UserError as error:
        fail(error)
