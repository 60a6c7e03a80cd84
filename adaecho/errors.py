"""Errors that the user can fix, and functions that print messages."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

_USER, _QUERY = re.compile(r"(?<=://)[^\s/@]*@"), re.compile(r"(://[^\s?'\"]+)\?[^\s'\"]+")


class UserError(Exception):
    """An error that the user can fix. Commands print its message without a traceback and exit with code 2."""


class ConfigError(UserError):
    """A config value is invalid. The message names the key, the value, the reason and the remedy."""


class DataError(UserError):
    """Data is missing, empty, corrupt or has the wrong schema. The message names its path."""


class ExampleError(DataError, ValueError):
    """A single example cannot be used. The loader skips up to ``data.max_bad_examples`` of them."""


class RankError(UserError):
    """Another rank failed, does not respond, or has different inputs. The message names it if known."""


class FolderError(UserError):
    """A run folder cannot be used: it is locked, has a different config, or is read-only, full or damaged."""


def redact_urls(value: Any) -> Any:
    """Replace user names, passwords and queries of urls with ``***``, even in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: redact_urls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_urls(item) for item in value]
    return _QUERY.sub(r"\1?***", _USER.sub("***@", value)) if isinstance(value, str) else value


def fail(message: object) -> NoReturn:
    """Print one message on standard error and end the command with exit code 2."""
    rank = os.environ.get("RANK")
    if not (isinstance(message, ConfigError) and rank not in (None, "0")):
        # Name the rank, because torchrun mixes the output of all its processes.
        prefix = "" if rank is None else f"rank {rank}: "
        text = with_notes(message) if isinstance(message, BaseException) else str(message)
        print(f"error: {prefix}{redact_urls(text)}", file=sys.stderr)
    sys.exit(2)


def print_line(text: object) -> None:
    """Print a line on standard output, without the secrets in urls."""
    print(redact_urls(str(text)), flush=True)


def warn(text: object) -> None:
    """Print a warning on standard error, without the secrets in urls."""
    print(f"warning: {redact_urls(str(text))}", file=sys.stderr, flush=True)


def with_notes(error: BaseException) -> str:
    """Return the message of an error, followed by its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def how_to_install(extra: str) -> str:
    """Return the command that installs an optional extra from a checkout."""
    return f"pip install '.[{extra}]' in the checkout of adaecho"


@contextmanager
def about_one_example() -> Iterator[None]:
    """Turn a ValueError that is raised in the ``with`` block into an ``ExampleError``."""
    try:
        yield
    except ValueError as error:
        raise ExampleError(str(error)) from error


def how_they_differ(of_training: Sequence[str], of_validation: Sequence[str]) -> str:
    """Describe how the names in two splits differ, with up to five names from each split."""
    pairs = (("training", of_training, of_validation), ("validation", of_validation, of_training))
    only = {split: [name for name in mine if name not in {*others}][:5] for split, mine, others in pairs}
    parts = [f"only in {split}: {', '.join(names)}" for split, names in only.items() if names]
    return "; ".join(parts) or "the same names in a different order"


@contextmanager
def report_errors() -> Iterator[None]:
    """End the command with one message if a ``UserError`` is raised in the ``with`` block."""
    try:
        yield
    except UserError as error:
        fail(error)
