"""Read the rank and the number of ranks from the environment variables of torchrun or a Slurm job."""

import os


def launched_rank() -> int:
    """Return the rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK") or 0)


def launched_ranks() -> int:
    """Return the number of processes that train one run together; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def local_rank() -> int:
    """Return the rank of this process among the processes on the same host."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def was_restarted() -> bool:
    """Return whether torchrun has restarted this process after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
