"""Measure how much time the echo stage costs.

The benchmark makes three comparisons.

    python -m benchmarks.echo_stage

* throttled: the storage delivers at most one batch per t_upstream, so that R = t_upstream / t_downstream = 6.
  The echoing factor e is 5. The ratio is the wall time per fresh batch divided by the ideal, max(t_upstream,
  5 t_downstream).
* free: the upstream (reading and decoding) runs at full speed, with e = 2. The ratio compares the loop with
  the same steps on batches in memory.
* python_bound: a step takes 10 ms of pure Python, while the loader's thread works too. The ratio compares the
  loop with the step alone.

The two sides of a comparison alternate, and a ratio is the median over turns.
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
    """Measure with R = 6 and e = 5: t_upstream is 60 ms per batch, and t_downstream is 10 ms per step."""
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
            # Consume what the loader read ahead at the start, 10 ms with each fresh batch.
            _train(loader, batches, 30, downstream_s)
            spent = _timed(partial(_train, loader, batches, fresh_batches, downstream_s), 1)
        ratios.append(spent / fresh_batches / max(upstream_s, factor * downstream_s))
    return {"case": f"throttled {echo}", "ratio_to_ideal": statistics.median(ratios)}


def _train(loader: EchoLoader, batches: Iterator[Any], fresh_batches: int, step_s: float) -> None:
    end = loader.fresh_examples + fresh_batches * BATCH_SIZE
    while loader.fresh_examples < end:
        next(batches)
        time.sleep(step_s)  # stands for a step on an accelerator


def free(step_ms: int, rounds: int) -> dict[str, Any]:
    """Measure the cost of e = 2 with an upstream at full speed. The training step is a matrix product."""
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
    """Measure the cost of a loader for a training step of 10 ms in pure Python."""
    iterations = _repeats(step_in_python, 10)

    def step(batches: Iterator[Any]) -> None:
        next(batches)
        step_in_python(iterations)

    with EchoLoader(ZEROS, BATCH_SIZE, echo="batch", factor=2, num_workers=1) as loader:
        alone = partial(step_in_python, iterations)
        ratio = _ratio(partial(step, iter(loader)), alone, 4 * rounds)
    return {"case": "python_bound batch", "ratio_to_ideal": ratio}


def _repeats(call: Callable[[int], Any], milliseconds: int) -> int:
    """Return how often ``call`` must be repeated to take this time."""
    number, spent = 1, 0.0
    while spent < milliseconds / 1000:
        number *= 2
        spent = min(_timed(partial(call, number), 1) for _ in range(5))
    return max(int(number * milliseconds / 1000 / spent), 1)


def _ratio(with_loader: Callable[[], Any], without: Callable[[], Any], pairs: int) -> float:
    """Return the median ratio over pairs of short turns of 50 steps.

    The turns are short, so that other work on the machine slows both turns of a pair. Between turns of the
    loader, its queues are full and its threads wait.
    """
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
    rows += [free(2, rounds), free(10, rounds), python_bound(rounds)]
    record.write("echo_stage", rows)


if __name__ == "__main__":
    main()
