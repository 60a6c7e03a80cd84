"""What both sides of ``echo_small_arrays`` share; imports neither torch nor TensorFlow."""

import statistics
import time
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


def copy_us(source: dict[str, Any]) -> float:
    """A processor's microseconds to copy a batch of images from memory, no cache, to memory in use before."""
    batches = source["image"][: 128 * BATCH_SIZE].reshape(128, BATCH_SIZE, -1)
    into, took = np.zeros_like(batches), []
    for batch, copy in zip(batches, into, strict=True):
        start = time.thread_time()
        np.copyto(copy, batch)
        took.append(time.thread_time() - start)
    return 1e6 * statistics.median(took)
