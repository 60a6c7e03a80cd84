"""Tar shards over http: examples per second of EchoLoader against WebDataset, side by side, on all cores.

Both read the same shards from one server on this machine, shuffle them and their examples, and decode.
WebDataset has 2 worker processes in its WebLoader, which start curl for each shard and give tensors (faster
than batches of arrays). Ours are threads: 2, and for small images also 1, because most work on them holds
the interpreter's lock. Small images: 32x32 PNG to uint8 batches of 128 by the same decoding function.
Photographs: JPEG to uint8 batches of 64 after random resized crop to 224
and flip, antialiased; ours with OpenCV, theirs as their users write it, with Pillow and torchvision. The
sides take turns in short rounds; a ratio is the median over the rounds and per training example, so
echoing's gain counts. The record is of two cores without other work: a busy machine gives other ratios.

    pip install webdataset
    python -m benchmarks.shards_http
"""

import argparse
import io
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from adaecho import EchoLoader, TarShards
from adaecho.tasks.images import decode_labelled
from adaecho.transforms.photographs import RandomResizedCrop
from benchmarks import record
from benchmarks.peers.clock import examples_per_s
from benchmarks.peers.echo_jpegs import RATIO, SCALE, SIZE, write_images

SHARDS, SHUFFLE_BUFFER = 8, 256
WORKERS_OF_WEB_DATASET = 2
SMALL, PHOTOGRAPHS = "PNG, 32x32", "JPEG, 500x375"
STORE = Path(__file__).resolve().parents[1] / "scripts" / "slow_store.py"
BATCH_SIZES = {SMALL: 128, PHOTOGRAPHS: 64}
WORKERS = {SMALL: (1, 2), PHOTOGRAPHS: (2,)}
NUMBERS = {SMALL: 16_000, PHOTOGRAPHS: 480}
Batches = Iterator[Any]
Ours = tuple[int, int]  # number of workers, echoing factor


def decode(example: dict[str, Any]) -> dict[str, Any]:
    """``image`` and ``label``."""
    return decode_labelled(example, 10)


def write_shards(folder: Path) -> None:
    """Both kinds of images, each in ``SHARDS`` archives."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (NUMBERS[SMALL], 8, 8, 3), dtype=np.uint8)
    small = (cv2.imencode(".png", cv2.resize(image, (32, 32)))[1].tobytes() for image in noise)
    _write(folder, "small", "png", small)
    with tempfile.TemporaryDirectory() as made:
        write_images(Path(made), 60)
        files = sorted(Path(made).iterdir())
        _write(
            folder, "photographs", "jpg",
            (files[row % len(files)].read_bytes() for row in range(NUMBERS[PHOTOGRAPHS])),
        )  # fmt: skip


def _write(folder: Path, name: str, ending: str, images: Iterable[bytes]) -> None:
    with ExitStack() as stack:
        archives = [
            stack.enter_context(tarfile.open(folder / f"{name}-{number}.tar", "w"))
            for number in range(SHARDS)
        ]
        for row, image in enumerate(images):
            for part, content in ((ending, image), ("cls", str(row % 10).encode())):
                member = tarfile.TarInfo(f"{row:05}.{part}")
                member.size = len(content)
                archives[row % SHARDS].addfile(member, io.BytesIO(content))


def ours(url: str, kind: str, workers: int, factor: int) -> Batches:
    echo = "none" if factor == 1 else "example_before_augmentation"
    augment = RandomResizedCrop(SIZE, SCALE, RATIO) if kind == PHOTOGRAPHS else None
    return iter(
        EchoLoader(
            TarShards(url), BATCH_SIZES[kind], echo=echo, factor=factor, decode=decode, augment=augment,
            shuffle_buffer=SHUFFLE_BUFFER, num_workers=workers,
            place="auto" if factor == 1 else "decoded",
        )
    )  # fmt: skip


def web_dataset(url: str, kind: str) -> Batches:
    import webdataset

    data = webdataset.WebDataset(
        url, resampled=True, nodesplitter=None, shardshuffle=False, empty_check=False
    ).shuffle(SHUFFLE_BUFFER)
    data = data.map(decode) if kind == SMALL else data.map(_pillow)
    loader = webdataset.WebLoader(data, batch_size=BATCH_SIZES[kind], num_workers=WORKERS_OF_WEB_DATASET)
    return iter(loader)


def _pillow(example: dict[str, Any]) -> dict[str, Any]:
    from PIL import Image

    image = _transform()(Image.open(io.BytesIO(example["jpg"])).convert("RGB"))
    return {"image": image, "label": int(example["cls"])}


_made: list[Callable[[Any], Any]] = []


def _transform() -> Callable[[Any], Any]:
    """Made once in each process."""
    if not _made:
        from torchvision.transforms import v2

        crop = v2.RandomResizedCrop(SIZE, SCALE, RATIO)
        _made.append(v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()]))
    return _made[0]


def serve(folder: Path) -> tuple["subprocess.Popen[bytes]", str]:
    """A server of the folder, and its url."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, STORE, folder, "--port", str(port)]  # ranges, which http.server lacks
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return server, f"http://127.0.0.1:{port}/fast/"
        except OSError:
            if server.poll() is not None:
                raise SystemExit("the server did not start") from None
            time.sleep(0.05)


def measure(url: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One row for each kind of images, number of workers and factor."""
    arms = [
        (kind, (workers, factor)) for kind in BATCH_SIZES for workers in WORKERS[kind] for factor in (1, 2)
    ]
    sides: dict[tuple[str, Ours | str], Batches] = {}
    urls = {SMALL: url + "small-{0..7}.tar", PHOTOGRAPHS: url + "photographs-{0..7}.tar"}
    # Worker processes are forked first, before other libraries have threads.
    for kind in BATCH_SIZES:
        sides[kind, "WebDataset"] = web_dataset(urls[kind], kind)
        next(sides[kind, "WebDataset"])
    sides |= {(kind, arm): ours(urls[kind], kind, *arm) for kind, arm in arms}
    rates: dict[tuple[str, Ours | str], list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, batches in sides.items():
            rates[side].append(examples_per_s(batches, seconds, batch_size=BATCH_SIZES[side[0]], warm_up=8))
    return [_row(kind, arm, rates) for kind, arm in arms]


def _row(kind: str, arm: Ours, rates: dict[tuple[str, Ours | str], list[float]]) -> dict[str, Any]:
    mine, theirs = rates[kind, arm], rates[kind, "WebDataset"]
    workers, factor = arm
    return {
        "images": kind,
        "num_workers": workers,
        "echo": "none" if factor == 1 else "example_before_augmentation",
        "factor": factor,
        "examples_per_s": statistics.median(mine),
        "WebDataset_examples_per_s": statistics.median(theirs),
        "ratio": statistics.median(one / other for one, other in zip(mine, theirs, strict=True)),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as made:
        write_shards(Path(made))
        server, url = serve(Path(made))
        try:
            rows = measure(url, arguments.rounds, arguments.seconds)
        finally:
            server.terminate()
            server.wait()
    record.show(rows)
    record.write(
        "shards_http", rows,
        packages=("torch", "torchvision", "numpy", "opencv-python-headless", "pillow", "webdataset"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
