"""The clocks of both sides of a comparison."""

import multiprocessing
import os
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


def cpu_s() -> float:
    """Of this process and of the workers that it has, so far (Linux)."""
    spent = time.process_time()
    for worker in multiprocessing.active_children():
        with open(f"/proc/{worker.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent
