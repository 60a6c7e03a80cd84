"""``headroom.watch``: what it costs in a loop, and whether R is right around loaders of known pace.

Overhead: loops of steps that are busy for 5 ms, over batches in memory, with and without ``watch``, in
turns; and the time of ``watch`` itself for each batch, over steps of nothing. R: a loader that takes 5, 20
or 60 ms a batch (it sleeps), in the loop's thread or in a worker beside it, and steps that sleep 20 ms; R as
found beside R as paced: the sleeps of that very run, loader over step. Medians over rounds.

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
    """Batches that take a while, and for how long they did, also where a worker reads them."""

    def __init__(self, batch_s: float, number: int) -> None:
        self.batch_s, self.number = batch_s, number
        self.slept_s = torch.zeros((), dtype=torch.float64).share_memory_()

    def __iter__(self) -> Iterator[int]:
        for batch in range(self.number):
            begin = time.perf_counter()
            time.sleep(self.batch_s)
            self.slept_s += time.perf_counter() - begin
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


def ratio(pace: str, workers: int, steps: int, rounds: int) -> dict[str, Any]:
    """One row: R as found and as paced."""
    found, over_paced = [], []
    for _ in range(rounds):
        paced = Paced(PACES[pace], steps)
        seen = headroom.watch(
            torch.utils.data.DataLoader(paced, batch_size=None, num_workers=workers) if workers else paced
        )
        stepped_s = 0.0
        for _ in seen:
            begin = time.perf_counter()
            time.sleep(PACED_STEP_S)
            stepped_s += time.perf_counter() - begin
        found.append(seen.R)
        over_paced.append(seen.R / (float(paced.slept_s) / stepped_s))
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
        ratio(pace, workers, arguments.steps // 2, arguments.rounds) for workers in (0, 1) for pace in PACES
    ]
    record.show(ratios)
    record.write("headroom_watch", costs, ratios=ratios)


if __name__ == "__main__":
    main()
