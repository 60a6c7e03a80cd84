"""EchoLoader's side of ``echo_small_arrays`` in a process of its own, for comparing two checkouts.

Run by path, so that the packages of the checkout in PYTHONPATH are imported. Reads lines
"<variant> <factor> <seconds>" and answers each with examples per second.
"""

import sys
from collections.abc import Iterator
from typing import Any

import cv2
import torch

from adaecho import EchoLoader
from adaecho.tasks.images import PadCropFlip
from benchmarks.peers.echo_small_data import BATCH_SIZE, PADDING, SHUFFLE_BUFFER, images, rate


def batches(source: dict[str, Any], echo: str, factor: int) -> Iterator[Any]:
    """Endless ones, made by one background thread."""
    return iter(
        EchoLoader(
            source, BATCH_SIZE, echo=echo, factor=factor, shuffle_buffer=SHUFFLE_BUFFER,
            augment=PadCropFlip(PADDING, flip=True), num_workers=1,
        )
    )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    source = images(50_000)
    running: dict[str, Iterator[Any]] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        echo, factor, seconds = line.split()
        if echo not in running:
            running[echo] = batches(source, echo, int(factor))
        print(rate(running[echo], float(seconds)), flush=True)


if __name__ == "__main__":
    main()
