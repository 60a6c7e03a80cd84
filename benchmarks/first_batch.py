"""Seconds from making a loader to its first batch: EchoLoader beside DataLoader, in turns.

Small images lie in memory as arrays (50,000 of 32x32, batches of 128); photographs as JPEGs of 500x375 in
memory, to batches of 64 after random resized crop to 224 and flip. Each loader is made anew for each round.
DataLoader shuffles by a permutation, as EchoLoader does with ``shuffle_buffer=0``; the paper's buffer of
10,000 examples is filled before the first batch, and stands beside it for small images, one of 256 for
photographs.

    python -m benchmarks.first_batch
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
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
from benchmarks.peers.echo_jpegs import RATIO, SCALE, SIZE, read_images, write_images
from benchmarks.peers.echo_small_data import PADDING, images

SMALL, PHOTOGRAPHS = "arrays, 32x32", "JPEG, 500x375"
BUFFERS = {SMALL: 10_000, PHOTOGRAPHS: 256}
Make = Callable[[], Any]


def small_sides(workers: int) -> dict[str, Make]:
    """What makes each loader of small images."""
    source = images(50_000)
    transformed = Transformed(source)

    def echo_loader(shuffle_buffer: int) -> Make:
        return lambda: EchoLoader(
            source,
            128,
            shuffle_buffer=shuffle_buffer,
            augment=PadCropFlip(PADDING, flip=True),
            num_workers=workers,
        )

    return {
        "DataLoader": lambda: torch.utils.data.DataLoader(
            transformed, 128, shuffle=True, num_workers=workers
        ),
        "EchoLoader": echo_loader(0),
        "EchoLoader_with_buffer": echo_loader(BUFFERS[SMALL]),
    }


def photograph_sides(encoded: list[bytes], workers: int) -> dict[str, Make]:
    """What makes each loader of photographs."""
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(SIZE, SCALE, RATIO)
    transformed = Encoded(encoded, v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()]))

    def echo_loader(shuffle_buffer: int) -> Make:
        return lambda: EchoLoader(
            Encoded(encoded), 64, shuffle_buffer=shuffle_buffer, decode=DecodeImage(), place="encoded",
            augment=RandomResizedCrop(SIZE, SCALE, RATIO), num_workers=workers,
        )  # fmt: skip

    return {
        "DataLoader": lambda: torch.utils.data.DataLoader(transformed, 64, shuffle=True, num_workers=workers),
        "EchoLoader": echo_loader(0),
        "EchoLoader_with_buffer": echo_loader(BUFFERS[PHOTOGRAPHS]),
    }


def first_batch_s(make: Make) -> float:
    """From making a loader to its first batch; what stops its workers is not counted."""
    begin = time.perf_counter()
    loader = make()
    batches = iter(loader)
    next(batches)
    found = time.perf_counter() - begin
    del batches
    if isinstance(loader, EchoLoader):
        loader.close()
    return found


def measure(kind: str, sides: dict[str, Make], workers: int, rounds: int) -> dict[str, Any]:
    """One row; the first round, which pays for imports, is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, make in sides.items():
            found = first_batch_s(make)
            if number:
                seconds[name].append(found)
    ratios = [a / b for a, b in zip(seconds["EchoLoader"], seconds["DataLoader"], strict=True)]
    return {
        "examples": kind,
        "num_workers": workers,
        **{f"{name}_s": statistics.median(found) for name, found in seconds.items()},
        "shuffle_buffer": BUFFERS[kind],
        "ratio_without_buffer": statistics.median(ratios),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as made:
        write_images(Path(made), 60)
        encoded = read_images(Path(made))
    rows = []
    for workers in (0, 2):
        rows.append(measure(SMALL, small_sides(workers), workers, arguments.rounds))
        rows.append(measure(PHOTOGRAPHS, photograph_sides(encoded, workers), workers, arguments.rounds))
    record.show(rows)
    record.write(
        "first_batch", rows, packages=("torch", "torchvision", "numpy", "opencv-python-headless", "pillow")
    )


if __name__ == "__main__":
    main()
