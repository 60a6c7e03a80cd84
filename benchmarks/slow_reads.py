"""Measure how well loaders keep several workers busy if reading is slow, for example over a network.

Each read of an example sleeps for 33 ms on average. The times have a log-normal distribution (sigma 1), or 5%
of the reads take fifty times as long as the others.

The result is a fraction of the ideal rate, at which every worker is reading all the time. If EchoLoader uses
each example twice (e = 2), the ideal rate doubles. EchoLoader is measured with worker processes, and with
threads, which it uses if the dataset declares ``thread_safe = True``.

    python -m benchmarks.slow_reads
"""

import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from adaecho import EchoLoader
from benchmarks import record
from benchmarks.peers import sides

BATCH, WORKERS, MEAN_S = 16, (4, 8, 16, 32), 0.033
STRAGGLERS, SLOWER = 0.05, 50
WARM_UP_S = 3.0
E2: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 256}


class Store(Dataset[Any]):
    """A dataset with slow reads. Each example is the duration of its read in seconds."""

    def __init__(self, kind: str, *, declared: bool) -> None:
        self.kind, self.thread_safe = kind, declared

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, row: int) -> Any:
        rng = np.random.default_rng(row)
        if self.kind == "log-normal":
            seconds = rng.lognormal(np.log(MEAN_S) - 0.5, 1.0)
        else:
            quick_s = MEAN_S / (1 + STRAGGLERS * (SLOWER - 1))
            seconds = quick_s * (SLOWER if rng.random() < STRAGGLERS else 1)
        time.sleep(seconds)
        return np.float64(seconds)


def share_of_ideal(way: str, kind: str, workers: int, seconds: float) -> float:
    """Return the share of the workers' time in which they read; the ideal is 1."""
    store, e2 = Store(kind, declared="undeclared" not in way), "e=2" in way
    loader: Any = (
        DataLoader(store, BATCH, shuffle=True, num_workers=workers)
        if way == "DataLoader"
        else EchoLoader(store, BATCH, num_workers=workers, **(E2 if e2 else {}))
    )
    batches, begin = iter(loader), time.perf_counter()
    while time.perf_counter() - begin < WARM_UP_S:
        next(batches)
    start, reading_s = time.perf_counter(), 0.0
    while (spent_s := time.perf_counter() - start) < seconds:
        reading_s += float(next(batches).sum()) / (2 if e2 else 1)
    if isinstance(loader, EchoLoader):
        loader.close()
    return reading_s / workers / spent_s


def main() -> None:
    options = record.options(__doc__, rounds=3, seconds=5.0).parse_args()
    torch.set_num_threads(1)
    rows = []
    ways = ("DataLoader", "undeclared", "undeclared, e=2", "declared", "declared, e=2")
    for kind in ("log-normal", "stragglers"):
        for workers in WORKERS:
            turns = {way: partial(share_of_ideal, way, kind, workers, options.seconds) for way in ways}
            found = sides.take_turns(turns, options.rounds)
            shares = {f"{way}, share of ideal": statistics.median(found[way]) for way in ways}
            ratios = {
                f"{way}, x DataLoader": sides.ratio(found[way], found["DataLoader"]) for way in ways[1:]
            }
            rows.append({"reads": kind, "workers": workers, **shares, **ratios})
    record.write("slow_reads", rows)


if __name__ == "__main__":
    main()
