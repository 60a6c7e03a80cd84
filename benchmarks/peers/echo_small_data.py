"""What both sides of ``echo_small_arrays`` share; imports neither torch nor TensorFlow."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers.clock import examples_per_s

BATCH_SIZE, SHUFFLE_BUFFER, PADDING = 128, 10_000, 4


def images(number: int) -> dict[str, Any]:
    """Random images in CIFAR's shape."""
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8),
        "label": rng.integers(0, 10, number),
    }


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Examples per second; see ``examples_per_s``."""
    return examples_per_s(batches, seconds, batch_size=BATCH_SIZE, warm_up=24)
