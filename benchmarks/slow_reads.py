"""Reads that take a while and no processor: what share of the ideal rate a loader reaches by default.

Ideal is as many reads at a time as there are workers, each as long as it is. Log-normal reads take 33 ms on
average (sigma 1); of the others 5 % are fifty times as slow as the rest, with the same average. Batches of
16, once the first have come; with echo before augmentation each example is in two batches, so that the ideal
rate of batches is twice that of reads.

    python -m benchmarks.slow_reads [SECONDS]
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from adaecho import EchoLoader
from benchmarks.record import show, write

BATCH, WORKERS, MEAN_S = 16, (4, 8, 16, 32), 0.033
STRAGGLERS, SLOWER = 0.05, 50
WARM_UP_S = 3.0


class Store(Dataset[Any]):
    """Each example is how long it took."""

    thread_safe = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, row: int) -> Any:
        draws = np.random.default_rng(row)
        if self.kind == "log-normal":
            seconds = draws.lognormal(np.log(MEAN_S) - 0.5, 1.0)
        else:
            quick_s = MEAN_S / (1 + STRAGGLERS * (SLOWER - 1))
            seconds = quick_s * (SLOWER if draws.random() < STRAGGLERS else 1)
        time.sleep(seconds)
        return np.float64(seconds)


def loader_of(way: str, kind: str, workers: int) -> Any:
    """A loader with its defaults."""
    if way == "DataLoader":
        return DataLoader(Store(kind), BATCH, shuffle=True, num_workers=workers)
    echo: dict[str, Any] = {}
    if way == "EchoLoader, e=2":
        echo = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 256}
    return EchoLoader(Store(kind), BATCH, num_workers=workers, **echo)


def share_of_ideal(batches: Iterator[Any], workers: int, repeats: int, seconds: float) -> float:
    """Seconds that the reads of the batches would take with all workers busy, by those that it took."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_UP_S:
        next(batches)
    start, reading_s = time.perf_counter(), 0.0
    while (taken := time.perf_counter() - start) < seconds:
        reading_s += float(next(batches).sum()) / repeats
    return reading_s / workers / taken


def main() -> None:
    """Measure all and write the record."""
    torch.set_num_threads(1)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 15.0
    rows = []
    for kind in ("log-normal", "stragglers"):
        for workers in WORKERS:
            row: dict[str, Any] = {"reads": kind, "workers": workers}
            for way in ("DataLoader", "EchoLoader", "EchoLoader, e=2"):
                loader = loader_of(way, kind, workers)
                share = share_of_ideal(iter(loader), workers, 2 if "e=2" in way else 1, seconds)
                row[f"{way}, share of ideal"] = round(share, 3)
                if isinstance(loader, EchoLoader):
                    loader.close()
                del loader
            rows.append(row)
    show(rows)
    write("slow_reads", rows, packages=("torch", "numpy"))


if __name__ == "__main__":
    main()
