"""This process: which of how many, as torchrun or a Slurm job of ours told it, and how it imports torch."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from adaecho.errors import ConfigError


def launched_rank() -> int:
    """This process's rank; 0 where it was started alone.

    Raises:
        ConfigError: the variable holds no such number.
    """
    return _number("RANK", 0)


def launched_ranks() -> int:
    """How many processes train one run together; 1 where this one was started alone.

    Raises:
        ConfigError: the variable holds no such number.
    """
    return max(_number("WORLD_SIZE", 1), 1)


def local_rank() -> int:
    """This process's number among the ranks of its host; the first speaks for what all see alike."""
    return _number("LOCAL_RANK", 0)


def started_by_torchrun() -> bool:
    """Whether torchrun is this process's parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def was_restarted() -> bool:
    """Whether torchrun started this process again after a failure (``--max-restarts``)."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0) > 0


@contextmanager
def importing() -> Iterator[None]:
    """Keep garbage collection from scanning what torch makes on its first import, inside: it stays."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    if not value:
        return default
    if not value.isdecimal():
        raise ConfigError(
            f"{name}={value!r} in the environment: must be a whole number; unset it, or use torchrun"
        )
    return int(value)
