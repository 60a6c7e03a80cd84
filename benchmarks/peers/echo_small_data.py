"""What both sides of ``echo_small_arrays`` share; imports neither torch nor TensorFlow."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

BATCH_SIZE, SHUFFLE_BUFFER, PADDING = 128, 10_000, 4


def images(number: int) -> dict[str, Any]:
    """Random images in CIFAR's shape."""
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8),
        "label": rng.integers(0, 10, number),
    }


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Examples per second, after queues that filled meanwhile have been emptied."""
    for _ in range(24):
        next(batches)
    start, number = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        next(batches)
        number += 1
    return number * BATCH_SIZE / (time.perf_counter() - start)
