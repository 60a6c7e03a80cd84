"""How a run stands, as its summary says: the one field that decides whether there is more to do."""

from enum import StrEnum


class Status(StrEnum):
    """The values of ``status`` in ``summary.json`` and in the rows of ``trials.json``."""

    RUNNING = "running"  # or its process is gone, and the same command continues it
    PREEMPTED = "preempted"  # a signal ended it, after a checkpoint
    REACHED = "reached"  # the target
    BUDGET_SPENT = "budget_spent"
    DIVERGED = "diverged"
    PRUNED = "pruned"  # it could not be the best of its search any more
    FAILED = "failed"  # an error ended it


# What a run ends with; one that failed, was preempted or is running is still to be done.
FINISHED = frozenset({Status.REACHED, Status.BUDGET_SPENT, Status.DIVERGED, Status.PRUNED})
ENDED = FINISHED | {Status.FAILED}  # nothing is at work on it
