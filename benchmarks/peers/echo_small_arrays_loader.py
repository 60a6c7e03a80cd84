"""An EchoLoader over CIFAR-sized images, also in a process of its own for comparing two commits.

Run by path, so that the package of the checkout in PYTHONPATH is imported. Reads lines
"<variant> <factor> <form> <seconds>" and answers each with examples per second and with the processor's
seconds per example, of all its threads.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import torch

from adaecho import EchoLoader
from adaecho.transforms.small_images import PadCropFlip
from benchmarks.peers.echo_small_data import BATCH_SIZE, PADDING, SHUFFLE_BUFFER, images, rate


def batches(source: Any, echo: str, factor: int) -> Iterator[Any]:
    """Endless ones, made by one background thread; of arrays in blocks, of a list one by one."""
    augment: Any = PadCropFlip(PADDING, flip=True)
    return iter(
        EchoLoader(
            source, BATCH_SIZE, echo=echo, factor=factor, shuffle_buffer=SHUFFLE_BUFFER,
            augment=_mirror if isinstance(source, list) else augment, num_workers=1,
        )
    )  # fmt: skip


def _mirror(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    image = example["image"]
    return {**example, "image": image[:, ::-1].copy() if rng.random() < 0.5 else image}


def main() -> None:
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    arrays = images(50_000)
    sources = {
        "arrays": arrays,
        "list": [{"image": arrays["image"][row], "label": arrays["label"][row]} for row in range(20_000)],
    }
    running: dict[tuple[str, str], Iterator[Any]] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        echo, factor, form, seconds = line.split()
        if (echo, form) not in running:
            running[echo, form] = batches(sources[form], echo, int(factor))
            next(running[echo, form])
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        examples_per_s = rate(running[echo, form], float(seconds))
        used = (time.process_time() - start_cpu_s) / (time.perf_counter() - start_s)
        print(examples_per_s, used / examples_per_s, flush=True)


if __name__ == "__main__":
    main()
