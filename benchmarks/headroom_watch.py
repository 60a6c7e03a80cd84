"""Measure how much ``headroom.watch`` slows a training loop, and how accurate its result is.

``watch`` measures R, the time to produce a batch divided by the time of a training step. The benchmark has
two parts:

* Slowdown: the time of a loop with ``watch`` divided by the time of the same loop without it. A second
  comparison uses loops with empty steps, whose difference is the time of ``watch`` itself.
* Accuracy: the measured R divided by the correct R. Each training step sleeps 20 ms. The loader sleeps 5, 20
  or 60 ms per batch in the same thread, or 20 or 60 ms in a worker process. The correct R is the loader's
  time per batch without training, divided by the time of a step.

    python -m benchmarks.headroom_watch
"""

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
    """A dataset of batches that arrive at a fixed pace."""

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
    """Measure how much ``watch`` slows loops of busy steps and of empty steps, and return one row."""
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
    """Return the seconds per batch of a loader without training steps, after its first batch."""
    batches = iter(loader)
    next(batches)
    begin = time.perf_counter()
    list(batches)
    return (time.perf_counter() - begin) / (steps - 1)


def ratio(pace: str, workers: int, steps: int, rounds: int) -> dict[str, Any]:
    """Measure R for one loader, and return one row with R and its ratio to the correct value."""
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
    parser = record.options(__doc__, rounds=7)
    parser.add_argument("--steps", type=int, default=200, help="steps of a loop (%(default)s)")
    arguments = parser.parse_args()
    costs = [overhead(arguments.steps, arguments.rounds)]
    ratios = [
        ratio(pace, workers, arguments.steps // 4, arguments.rounds)
        for workers in (0, 1)
        for pace in PACES
        if not (workers and pace == "fast")  # R is only a bound if the loop never waits for workers
    ]
    record.write("headroom_watch", costs, ratios=ratios)


if __name__ == "__main__":
    main()
