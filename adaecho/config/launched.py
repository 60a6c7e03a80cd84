"""This process among those of a run, as torchrun or a Slurm job sets the environment."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def launched_rank() -> int:
    """This process's rank; 0 where it was started alone."""
    return int(os.environ.get("RANK") or 0)


def launched_ranks() -> int:
    """How many processes train one run together; 1 where this one was started alone."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def was_restarted() -> bool:
    """Whether torchrun started this process again after a failure (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


@contextmanager
def importing() -> Iterator[None]:
    """Import torch inside: the garbage collector does not scan what stays for the life of the process."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
