"""Errors that the user can fix, and the functions that print messages."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

_USER, _QUERY = re.compile(r"(?<=://)[^\s/@]*@"), re.compile(r"(://[^\s?'\"]+)\?[^\s'\"]+")


class UserError(Exception):
    """An error that the user can fix. A command prints its message without a traceback and exits with 2."""


class ConfigError(UserError):
    """An invalid config value. The message names the key, the value, the reason and the remedy."""


class DataError(UserError):
    """Data that is missing, empty, corrupt or of the wrong schema. The message names the path."""


class ExampleError(DataError, ValueError):
    """One example that cannot be used. The loader skips it within ``data.max_bad_examples``."""


class RankError(UserError):
    """Another rank failed, stopped answering or has different inputs. The message names the rank if known."""


class FolderError(UserError):
    """A run folder that cannot be used: in use, from a different config, read-only, full or damaged."""


def redact_urls(value: Any) -> Any:
    """Remove user, password and query from the urls in a text, or in every text of dicts and lists.

    Returns:
        The value with urls such as ``https://***@host/path?***``.
    """
    if isinstance(value, dict):
        return {key: redact_urls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_urls(item) for item in value]
    return _QUERY.sub(r"\1?***", _USER.sub("***@", value)) if isinstance(value, str) else value


def fail(message: object) -> NoReturn:
    """End a command with one message on standard error and exit code 2.

    All ranks of a run have the same config, so only rank 0 prints a ``ConfigError``.
    """
    rank = os.environ.get("RANK")
    if not (isinstance(message, ConfigError) and rank not in (None, "0")):
        prefix = "" if rank is None else f"rank {rank}: "  # torchrun mixes the output of its processes
        text = with_notes(message) if isinstance(message, BaseException) else str(message)
        print(f"error: {prefix}{redact_urls(text)}", file=sys.stderr)
    sys.exit(2)


def print_line(text: object) -> None:
    """Print a line on standard output, without the credentials of urls."""
    print(redact_urls(str(text)), flush=True)


def warn(text: object) -> None:
    """Print a warning on standard error, without the credentials of urls."""
    print(f"warning: {redact_urls(str(text))}", file=sys.stderr, flush=True)


def with_notes(error: BaseException) -> str:
    """The message of an error, followed by its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def how_to_install(extra: str) -> str:
    """The command that installs an optional extra. No version is released, so it names a checkout."""
    return f"pip install '.[{extra}]' in the checkout of adaecho"


@contextmanager
def about_one_example() -> Iterator[None]:
    """Raise a ValueError inside the block as an ``ExampleError``."""
    try:
        yield
    except ValueError as error:
        raise ExampleError(str(error)) from error


def how_they_differ(of_training: Sequence[str], of_validation: Sequence[str]) -> str:
    """Describe the first five names that each of two splits has alone."""
    pairs = (("training", of_training, of_validation), ("validation", of_validation, of_training))
    only = {split: [name for name in mine if name not in {*others}][:5] for split, mine, others in pairs}
    parts = [f"only in {split}: {', '.join(names)}" for split, names in only.items() if names]
    return "; ".join(parts) or "the same names in a different order"


@contextmanager
def report_errors() -> Iterator[None]:
    """End a command with one message if a ``UserError`` is raised inside the block."""
    try:
        yield
    except UserError as error:
        fail(error)
