"""Measure the seconds from the construction of a loader to its first batch, for EchoLoader and DataLoader.

The loaders take turns on 50,000 small arrays (32x32 pixels) and on JPEGs (500x375 pixels) in memory. One
EchoLoader has ``shuffle_buffer=0``, so it shuffles with a permutation, like DataLoader. Another EchoLoader
first fills a shuffle buffer of 10,000 arrays, as in the paper, or of 256 JPEGs.

    python -m benchmarks.first_batch
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import torch

from adaecho import EchoLoader
from adaecho.transforms.photographs import DecodeImage, RandomResizedCrop
from adaecho.transforms.small_images import PadCropFlip
from benchmarks import record
from benchmarks.echo_jpeg import Encoded
from benchmarks.echo_small_arrays import Transformed
from benchmarks.peers import sides
from benchmarks.peers.sides import PADDING, RATIO, SCALE, SIZE

SMALL, PHOTOGRAPHS = "arrays, 32x32", "JPEG, 500x375"
BUFFERS = {SMALL: 10_000, PHOTOGRAPHS: 256}
Make = Callable[[], Any]


def small_sides(workers: int) -> dict[str, Make]:
    """Return functions that construct the loaders of small images."""
    source = sides.images(50_000)
    transformed = Transformed(source)
    augment = PadCropFlip(PADDING, flip=True)
    echo_loader = partial(EchoLoader, source, 128, augment=augment, num_workers=workers)
    return _sides(transformed, 128, workers, echo_loader, BUFFERS[SMALL])


def photograph_sides(encoded: list[bytes], workers: int) -> dict[str, Make]:
    """Return functions that construct the loaders of photographs."""
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(SIZE, SCALE, RATIO)
    transformed = Encoded(encoded, v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()]))
    echo_loader = partial(
        EchoLoader, Encoded(encoded), 64, decode=DecodeImage(), buffer_format="encoded",
        augment=RandomResizedCrop(SIZE, SCALE, RATIO), num_workers=workers,
    )  # fmt: skip
    return _sides(transformed, 64, workers, echo_loader, BUFFERS[PHOTOGRAPHS])


def _sides(dataset: Any, batch: int, workers: int, echo_loader: Any, buffer: int) -> dict[str, Make]:
    data_loader = torch.utils.data.DataLoader
    return {
        "DataLoader": partial(data_loader, dataset, batch, shuffle=True, num_workers=workers),
        "EchoLoader": partial(echo_loader, shuffle_buffer=0),
        "EchoLoader_with_buffer": partial(echo_loader, shuffle_buffer=buffer),
    }


def first_batch_s(make: Make) -> float:
    """Return the seconds to construct a loader and get its first batch."""
    begin = time.perf_counter()
    loader = make()
    batches = iter(loader)
    next(batches)
    found = time.perf_counter() - begin
    del batches
    if isinstance(loader, EchoLoader):
        loader.close()
    return found


def measure(kind: str, made: dict[str, Make], workers: int, rounds: int) -> dict[str, Any]:
    """Measure all loaders of one dataset, and return one row."""
    # Discard the first round, because it includes imports.
    turns = {name: partial(first_batch_s, make) for name, make in made.items()}
    seconds = {name: found[1:] for name, found in sides.take_turns(turns, rounds + 1).items()}
    return {
        "examples": kind,
        "num_workers": workers,
        **{f"{name}_s": statistics.median(found) for name, found in seconds.items()},
        "shuffle_buffer": BUFFERS[kind],
        "ratio_without_buffer": sides.ratio(seconds["EchoLoader"], seconds["DataLoader"]),
    }


def main() -> None:
    rounds = record.options(__doc__, rounds=7).parse_args().rounds
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as made:
        sides.write_jpegs(Path(made), 60)
        encoded = sides.read_jpegs(Path(made))
    rows = []
    for workers in (0, 2):
        rows.append(measure(SMALL, small_sides(workers), workers, rounds))
        rows.append(measure(PHOTOGRAPHS, photograph_sides(encoded, workers), workers, rounds))
    packages = ("torch", "torchvision", "numpy", "opencv-python-headless", "pillow")
    record.write("first_batch", rows, packages=packages)


if __name__ == "__main__":
    main()
