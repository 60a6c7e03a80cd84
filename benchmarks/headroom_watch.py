"""``headroom.watch``: what it costs in a loop, and whether R is right around loaders of known pace.

Overhead: loops of steps that are busy for 5 ms, over batches in memory, with and without ``watch``, in
turns; and the time of ``watch`` itself for each batch, over steps of nothing. R: a loader that takes 5, 20
or 60 ms a batch (it sleeps), in the loop's thread or in a worker process beside it, and steps that sleep 20
ms; R as found beside what a pass over the loader with no steps takes for a batch, over the steps of the loop.
Medians over rounds.

    python -m benchmarks.headroom_watch
"""

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from adaecho import headroom
from benchmarks import record

STEP_S, PACED_STEP_S = 0.005, 0.02
PACES = {"fast": 0.005, "balanced": 0.02, "slow": 0.06}


class Paced(torch.utils.data.IterableDataset[int]):
    """Batches that take a while."""

    def __init__(self, batch_s: float, number: int) -> None:
        self.batch_s, self.number = batch_s, number

    def __iter__(self) -> Iterator[int]:
        for batch in range(self.number):
            time.sleep(self.batch_s)
            yield batch


def _loop_s(batches: Iterable[Any], step_s: float) -> float:
    begin = time.perf_counter()
    for _ in batches:
        end = time.perf_counter() + step_s
        while time.perf_counter() < end:
            pass
    return time.perf_counter() - begin


def overhead(steps: int, rounds: int) -> dict[str, Any]:
    """One row: loops of busy steps, and of no work at all, in turns."""
    ratios, own = [], []
    for _ in range(rounds):
        plain = _loop_s(range(steps), STEP_S)
        ratios.append(_loop_s(headroom.watch(range(steps)), STEP_S) / plain)
        many = range(100 * steps)
        own.append((_loop_s(headroom.watch(many), 0) - _loop_s(many, 0)) / len(many))
    return {
        "step_s": STEP_S,
        "steps": steps,
        "ratio_with_watch": statistics.median(ratios),
        "watch_s_per_step": statistics.median(own),
        "share_of_step": statistics.median(own) / STEP_S,
    }


def _alone_s(loader: Iterable[int], steps: int) -> float:
    """Seconds a batch of a pass with no steps, but for the first batch, which starts workers."""
    batches = iter(loader)
    next(batches)
    begin = time.perf_counter()
    for _ in batches:
        pass
    return (time.perf_counter() - begin) / (steps - 1)


def ratio(pace: str, workers: int, steps: int, rounds: int) -> dict[str, Any]:
    """One row: R as found and as paced."""
    found, over_paced = [], []
    for _ in range(rounds):
        loader: Any = Paced(PACES[pace], steps)
        if workers:
            loader = torch.utils.data.DataLoader(loader, batch_size=None, num_workers=workers)
        seen = headroom.watch(loader)
        stepped_s = 0.0
        for _ in seen:
            begin = time.perf_counter()
            time.sleep(PACED_STEP_S)
            stepped_s += time.perf_counter() - begin
        found.append(seen.R)
        over_paced.append(seen.R * stepped_s / steps / _alone_s(loader, steps))
    return {
        "loader": pace,
        "workers": workers,
        "R": statistics.median(found),
        "R_over_paced": statistics.median(over_paced),
        "R_over_paced_min": min(over_paced),
        "R_over_paced_max": max(over_paced),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    costs = [overhead(arguments.steps, arguments.rounds)]
    record.show(costs)
    ratios = [
        ratio(pace, workers, arguments.steps // 4, arguments.rounds)
        for workers in (0, 1)
        for pace in PACES
        if not (workers and pace == "fast")  # of workers that are never waited for R is a bound
    ]
    record.show(ratios)
    record.write("headroom_watch", costs, ratios=ratios)


if __name__ == "__main__":
    main()
