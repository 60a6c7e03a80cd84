"""Rank and world size from the environment that torchrun or a Slurm job sets."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def launched_rank() -> int:
    """Return the rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK") or 0)


def launched_ranks() -> int:
    """Return the number of processes that train one run together; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def local_rank() -> int:
    """Return the rank of this process on its host."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def was_restarted() -> bool:
    """Return whether torchrun restarted this process after a failure (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


@contextmanager
def importing() -> Iterator[None]:
    """Import torch inside, without garbage collection: the objects of modules are never freed."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
