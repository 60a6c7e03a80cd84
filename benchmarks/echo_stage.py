"""Measure how much time EchoLoader adds to a training loop.

    python -m benchmarks.echo_stage

In each of three cases, every example is read once and used e times:

* throttled: reading a batch takes 60 ms, a training step takes 10 ms, and e = 5. The ideal time is
  max(60, 5 * 10) = 60 ms per batch read, because reading and training overlap. The result is the measured
  time divided by the ideal time.
* free: reading is as fast as possible, and e = 2. The result is the loop's time divided by the time of the
  same loop on batches in memory.
* python_bound: a training step is 10 ms of pure Python, which competes with the loader's thread. The result
  is the loop's time divided by the time of the steps alone.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from adaecho import EchoLoader
from benchmarks import record

BATCH_SIZE = 128
ZEROS = {"image": np.zeros((20_000, 32, 32, 3), np.uint8)}


def step_in_python(iterations: int) -> float:
    total = 0.0
    for number in range(iterations):
        total += number * 0.5
    return total


def throttled(echo: str, rounds: int) -> dict[str, Any]:
    """Measure the time per batch read, relative to the ideal time, when reading is the bottleneck."""
    upstream_s, downstream_s, factor, fresh_batches = 0.060, 0.010, 5, 20
    images = np.zeros((BATCH_SIZE, 32, 32, 3), np.uint8)

    def source() -> Iterator[dict[str, Any]]:
        due = time.perf_counter()
        while True:
            # The next batch is delivered while the loader works on this one, as if it arrived in a network
            # buffer.
            due = max(due + upstream_s, time.perf_counter())
            time.sleep(max(due - time.perf_counter(), 0))
            for image in images:
                yield {"image": image}

    ratios = []
    for _ in range(rounds):
        with EchoLoader(source, BATCH_SIZE, echo=echo, factor=factor, num_workers=1) as loader:
            batches = iter(loader)
            next(batches)
            # Use up what the loader has read ahead, by 10 ms (60 - 50) per fresh batch.
            _train(loader, batches, 30, downstream_s)
            spent = _timed(partial(_train, loader, batches, fresh_batches, downstream_s), 1)
        ratios.append(spent / fresh_batches / max(upstream_s, factor * downstream_s))
    return {"case": f"throttled {echo}", "ratio_to_ideal": statistics.median(ratios)}


def _train(loader: EchoLoader, batches: Iterator[Any], fresh_batches: int, step_s: float) -> None:
    end = loader.fresh_examples + fresh_batches * BATCH_SIZE
    while loader.fresh_examples < end:
        next(batches)
        time.sleep(step_s)  # stands for a step on an accelerator


def unthrottled(step_ms: int, rounds: int) -> dict[str, Any]:
    """Compare a loop with EchoLoader to a loop on batches in memory, with steps of ``step_ms``."""
    matrix = torch.ones(256, 256)
    products = _repeats(lambda number: [matrix @ matrix for _ in range(number)], step_ms)
    resident = itertools.cycle(
        [{"image": torch.zeros(BATCH_SIZE, 32, 32, 3, dtype=torch.uint8)} for _ in range(8)]
    )

    def step(batches: Iterator[Any]) -> None:
        next(batches)["image"].sum()
        for _ in range(products):
            matrix @ matrix

    with EchoLoader(ZEROS, BATCH_SIZE, echo="batch", factor=2, num_workers=1) as loader:
        pairs = 40 * rounds // step_ms
        ratio = _ratio(partial(step, iter(loader)), partial(step, resident), pairs)
    return {"case": f"free batch, {step_ms} ms step", "ratio_to_ideal": ratio}


def python_bound(rounds: int) -> dict[str, Any]:
    """Measure how much EchoLoader slows a training loop whose steps take 10 ms of pure Python."""
    iterations = _repeats(step_in_python, 10)

    def step(batches: Iterator[Any]) -> None:
        next(batches)
        step_in_python(iterations)

    with EchoLoader(ZEROS, BATCH_SIZE, echo="batch", factor=2, num_workers=1) as loader:
        alone = partial(step_in_python, iterations)
        ratio = _ratio(partial(step, iter(loader)), alone, 4 * rounds)
    return {"case": "python_bound batch", "ratio_to_ideal": ratio}


def _repeats(call: Callable[[int], Any], milliseconds: int) -> int:
    """Return the number n for which ``call(n)`` takes about the given time."""
    number, spent = 1, 0.0
    while spent < milliseconds / 1000:
        number *= 2
        spent = min(_timed(partial(call, number), 1) for _ in range(5))
    return max(int(number * milliseconds / 1000 / spent), 1)


def _ratio(with_loader: Callable[[], Any], without: Callable[[], Any], pairs: int) -> float:
    """Return the median ratio of 50 steps with the loader to 50 steps without it."""
    # The measurements are short, so that other work slows both kinds of steps equally. While the steps
    # without the loader run, its queues fill up, so every measurement starts with full queues.
    _timed(with_loader, 50)
    return statistics.median(_timed(with_loader, 50) / _timed(without, 50) for _ in range(pairs))


def _timed(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def main() -> None:
    rounds = record.options(__doc__, rounds=5).parse_args().rounds
    torch.set_num_threads(1)
    rows = [throttled("batch", rounds), throttled("example_before_augmentation", rounds)]
    rows += [unthrottled(2, rounds), unthrottled(10, rounds), python_bound(rounds)]
    record.write("echo_stage", rows)


if __name__ == "__main__":
    main()
