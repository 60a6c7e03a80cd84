"""Photographs: EchoLoader against DataLoader, tf.data, SPDL and Grain, side by side, on all cores.

JPEGs lie encoded in memory; every side gives uint8 batches of 64 after random resized crop to 224, horizontal
flip and jitter of brightness, contrast and saturation by 0.4. The sides take turns in short rounds; a ratio
is the median over the rounds, of the rate and of what a second of a processor gives. Like is compared with
like: DataLoader and Grain (2 worker processes, Pillow) and SPDL (2 threads, FFmpeg) average where they shrink
(antialias), tf.data (decoding only what the crop needs) interpolates linearly. EchoLoader (2 threads) is
measured decoding only that, too, as it does by default, and decoding all of each image.
A ratio is per training example, so echoing's gain counts.

    pip install -e '.[regions]'
    # Optional, each side is left out without; also in another environment: --peers-python path/to/python
    pip install tensorflow-cpu grain pillow spdl  # and FFmpeg's libraries
    python -m benchmarks.echo_jpeg [folder of JPEGs, else synthetic ones are made]
"""

import argparse
import io
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from adaecho import EchoLoader
from adaecho.transforms import regions
from adaecho.transforms.photographs import DecodeImage, RandomResizedCrop
from benchmarks import record
from benchmarks.peers.echo_jpegs import (
    BATCH_SIZE,
    JITTER,
    RATIO,
    SCALE,
    SHUFFLE_BUFFER,
    SIZE,
    WORKERS,
    rates,
    read_images,
    write_images,
)
from benchmarks.peers.process import Peer

Batches = Iterator[Any]
Rates = tuple[float, float]  # examples per second, and per second of a processor
NUMBER = 300
PEERS = {"tf.data": "echo_jpeg_tf_data", "SPDL": "echo_jpeg_spdl", "Grain": "echo_jpeg_grain"}
# echo, factor, antialias, whether only the crop is decoded, peer
CASES = [
    ("none", 1, True, True, "DataLoader"),
    ("none", 1, True, True, "SPDL"),
    ("none", 1, True, True, "Grain"),
    ("none", 1, False, True, "tf.data"),
    ("none", 1, True, False, "DataLoader"),
    ("none", 1, False, False, "tf.data"),
    ("example_before_augmentation", 2, True, False, "DataLoader"),
    ("example_before_augmentation", 2, False, False, "tf.data"),
    ("batch", 2, True, True, "DataLoader"),
]


class Encoded(torch.utils.data.Dataset[Any]):
    """Photographs as they are stored, or as a torchvision user would write it."""

    def __init__(self, images: list[bytes], transform: Any = None) -> None:
        self._images, self._transform = images, transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, row: int) -> Any:
        if self._transform is None:
            return {"image": self._images[row]}
        from PIL import Image

        return self._transform(Image.open(io.BytesIO(self._images[row])).convert("RGB"))


def echo_loader(images: list[bytes], echo: str, factor: int, antialias: bool, crop_only: bool) -> Batches:
    augment = RandomResizedCrop(
        SIZE, SCALE, RATIO, brightness=JITTER, contrast=JITTER, saturation=JITTER, antialias=antialias
    )
    # A bound method knows nothing of the augment.
    decode = DecodeImage() if crop_only else DecodeImage().__call__
    loader = EchoLoader(
        Encoded(images), BATCH_SIZE, echo=echo, factor=factor, shuffle_buffer=SHUFFLE_BUFFER,
        decode=decode, augment=augment, num_workers=WORKERS,
    )  # fmt: skip
    return iter(loader)


def data_loader(images: list[bytes]) -> Batches:
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, SCALE, RATIO),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(JITTER, JITTER, JITTER),
            v2.PILToTensor(),
        ]
    )
    loader = torch.utils.data.DataLoader(
        Encoded(images, transform), batch_size=BATCH_SIZE, shuffle=True, num_workers=WORKERS, drop_last=True,
        persistent_workers=True,
    )  # fmt: skip
    while True:
        yield from loader


def measure(folder: Path, rounds: int, seconds: float, peers_python: str) -> list[dict[str, Any]]:
    """One row for each case."""
    images = read_images(folder)
    # Workers of DataLoader are forked first, before other libraries have threads.
    sides: dict[Any, Batches] = {"DataLoader": data_loader(images)}
    next(sides["DataLoader"])
    sides |= {case[:4]: echo_loader(images, *case[:4]) for case in CASES}
    peers = {
        name: Peer(peers_python, f"benchmarks.peers.{module}", str(folder)) for name, module in PEERS.items()
    }
    found: dict[Any, list[Rates]] = {side: [] for side in [*sides, *peers]}
    for _ in range(rounds):
        for side, batches in sides.items():
            found[side].append(rates(batches, seconds))
        for name, peer in peers.items():
            if peer.found:
                of_s, of_cpu_s = peer.numbers(seconds)
                found[name].append((of_s, of_cpu_s))
    for peer in peers.values():
        peer.close()
    return [_row(case, found, peers) for case in CASES]


def _row(
    case: tuple[str, int, bool, bool, str], found: dict[Any, list[Rates]], peers: dict[str, Peer]
) -> dict[str, Any]:
    echo, factor, antialias, crop_only, peer = case
    ours, theirs = found[case[:4]], found[peer]

    def ratio(of: int) -> float | str:
        ratios = [one[of] / other[of] for one, other in zip(ours, theirs, strict=True)] if theirs else []
        return statistics.median(ratios) if ratios else "absent"

    return {
        "echo": echo,
        "factor": factor,
        "antialias": antialias,
        "decodes_crop_only": crop_only,
        "examples_per_s": statistics.median(rate for rate, _ in ours),
        "peer": f"{peer} {peers[peer].version}" if peer in peers else peer,
        "peer_examples_per_s": statistics.median(rate for rate, _ in theirs) if theirs else "absent",
        "ratio": ratio(0),
        "ratio_per_cpu_s": ratio(1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--peers-python", default=sys.executable, help="a Python that has the others")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not regions.available():
        raise SystemExit("needs the extra regions: pip install -e '.[regions]'")
    with tempfile.TemporaryDirectory() as made:
        if arguments.folder is None:
            write_images(Path(made), NUMBER)
        folder = arguments.folder or Path(made)
        rows = measure(folder, arguments.rounds, arguments.seconds, arguments.peers_python)
    record.show(rows)
    record.write(
        "echo_jpeg", rows,
        packages=(
            "torch", "torchvision", "numpy", "opencv-python-headless", "nvidia-nvimgcodec-cu13", "pillow",
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
