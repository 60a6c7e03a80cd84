"""The clock of both sides of a comparison."""

import time
from collections.abc import Iterator
from typing import Any


def examples_per_s(batches: Iterator[Any], seconds: float, *, batch_size: int, warm_up: int) -> float:
    """Examples per second, after queues that filled meanwhile have been emptied by ``warm_up`` batches."""
    for _ in range(warm_up):
        next(batches)
    start, number = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        next(batches)
        number += 1
    return number * batch_size / (time.perf_counter() - start)
