"""Compare EchoLoader with WebDataset on tar shards over http, in examples per second.

The loaders take turns. They read the same shards from a server on this machine, then shuffle and decode the
examples. Repeats count as examples. Run the benchmark on two idle cores.

The loaders work as follows:

* WebDataset has 2 worker processes, which start curl for each shard.
* EchoLoader has 2 threads. For small images, it is also measured with 1 thread, because reading and decoding
  them mostly holds the GIL, which only one thread can hold at a time.

There are two kinds of images:

* Small images: PNGs of 32x32 pixels become uint8 batches of 128. Both loaders use the same decoder.
* Photographs: JPEGs become uint8 batches of 64 after a random resized crop to 224 pixels and a flip.
  EchoLoader uses OpenCV. WebDataset uses Pillow and torchvision, as in its examples.

    pip install webdataset
    python -m benchmarks.shards_http
"""

import io
import multiprocessing
import statistics
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from adaecho import EchoLoader, TarShards
from adaecho.tasks.images import DecodeLabeled
from adaecho.transforms.photographs import RandomResizedCrop
from benchmarks import record
from benchmarks.peers import sides
from benchmarks.peers.sides import RATIO, SCALE, SIZE, Batches
from scripts.slow_store import make_server

SHARDS, SHUFFLE_BUFFER = 8, 256
WORKERS_OF_WEB_DATASET = 2
SMALL, PHOTOGRAPHS = "PNG, 32x32", "JPEG, 500x375"
KINDS = {SMALL: sides.Kind(128, 8), PHOTOGRAPHS: sides.Kind(64, 8)}
WORKERS = {SMALL: (1, 2), PHOTOGRAPHS: (2,)}
NUMBERS = {SMALL: 16_000, PHOTOGRAPHS: 480}
Ours = tuple[int, int]  # number of workers, echoing factor


def decode(example: dict[str, Any]) -> dict[str, Any]:
    """Return an example with decoded ``image`` and ``label``."""
    return DecodeLabeled(10)(example)


def write_shards(folder: Path) -> None:
    """Write the small images and the photographs, each into ``SHARDS`` archives."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (NUMBERS[SMALL], 8, 8, 3), dtype=np.uint8)
    small = (cv2.imencode(".png", cv2.resize(image, (32, 32)))[1].tobytes() for image in noise)
    _write(folder, "small", "png", small)
    with tempfile.TemporaryDirectory() as made:
        sides.write_jpegs(Path(made), 60)
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
            TarShards(url), KINDS[kind].batch_size, echo=echo, factor=factor, decode=decode, augment=augment,
            shuffle_buffer=SHUFFLE_BUFFER, num_workers=workers,
            buffer_format="auto" if factor == 1 else "decoded",
        )
    )  # fmt: skip


def web_dataset(url: str, kind: str) -> Batches:
    import webdataset

    data = webdataset.WebDataset(
        url, resampled=True, nodesplitter=None, shardshuffle=False, empty_check=False
    ).shuffle(SHUFFLE_BUFFER)
    data = data.map(decode) if kind == SMALL else data.map(_pillow)
    loader = webdataset.WebLoader(data, batch_size=KINDS[kind].batch_size, num_workers=WORKERS_OF_WEB_DATASET)
    return iter(loader)


def _pillow(example: dict[str, Any]) -> dict[str, Any]:
    from PIL import Image

    image = _transform()(Image.open(io.BytesIO(example["jpg"])).convert("RGB"))
    return {"image": image, "label": int(example["cls"])}


@cache
def _transform() -> Callable[[Any], Any]:
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(SIZE, SCALE, RATIO)
    return v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])


def measure(url: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measure all loaders, and return one row per kind of images, workers and echoing factor."""
    arms = [(kind, (workers, factor)) for kind in KINDS for workers in WORKERS[kind] for factor in (1, 2)]
    running: dict[tuple[str, Ours | str], Batches] = {}
    urls = {SMALL: url + "small-{0..7}.tar", PHOTOGRAPHS: url + "photographs-{0..7}.tar"}
    # Fork worker processes first, before other libraries start threads.
    for kind in KINDS:
        running[kind, "WebDataset"] = web_dataset(urls[kind], kind)
        next(running[kind, "WebDataset"])
    running |= {(kind, arm): ours(urls[kind], kind, *arm) for kind, arm in arms}
    turns = {
        side: partial(sides.rates, batches, seconds, KINDS[side[0]]) for side, batches in running.items()
    }
    found = sides.take_turns(turns, rounds)
    rates = {side: [one.per_s for one in of_side] for side, of_side in found.items()}
    return [
        {
            "images": kind,
            "num_workers": workers,
            "echo": "none" if factor == 1 else "example_before_augmentation",
            "factor": factor,
            "examples_per_s": statistics.median(rates[kind, (workers, factor)]),
            "WebDataset_examples_per_s": statistics.median(rates[kind, "WebDataset"]),
            "ratio": sides.ratio(rates[kind, (workers, factor)], rates[kind, "WebDataset"]),
        }
        for kind, (workers, factor) in arms
    ]


def main() -> None:
    options = record.options(__doc__, rounds=5, seconds=2.0).parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as made:
        write_shards(Path(made))
        server = make_server(Path(made), port=0, kilobytes_per_s=1)
        process = multiprocessing.get_context("fork").Process(target=server.serve_forever)
        process.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/fast/"
            rows = measure(url, options.rounds, options.seconds)
        finally:
            process.terminate()
    packages = ("torch", "torchvision", "numpy", "opencv-python-headless", "pillow", "webdataset")
    record.write("shards_http", rows, packages=packages)


if __name__ == "__main__":
    main()
