"""SPDL's side of ``echo_jpeg``, in a process of its own: threads that decode and transform by FFmpeg.

    python -m benchmarks.peers.echo_jpeg_spdl <folder>

Needs FFmpeg's libraries. Each image is decoded whole, as FFmpeg does; crop, resize (which averages where it
shrinks), flip and jitter are one filter graph. Reads lines "<seconds>" and answers each with two rates.
"""

import itertools
import math
import random
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import spdl.io
from spdl.pipeline import PipelineBuilder

from benchmarks.peers.echo_jpegs import BATCH_SIZE, JITTER, RATIO, SCALE, SIZE, WORKERS, read_images, serve


def crop(width: int, height: int) -> tuple[int, int, int, int]:
    """Width, height, left and top of a random resized crop."""
    for _ in range(10):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(*map(math.log, RATIO)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if w <= width and h <= height:
            return w, h, random.randint(0, width - w), random.randint(0, height - h)
    side = min(width, height)
    return side, side, (width - side) // 2, (height - side) // 2


def decode(content: bytes) -> Any:
    """One image as frames of FFmpeg."""
    packets = spdl.io.demux_image(content)
    w, h, left, top = crop(packets.codec.width, packets.codec.height)
    brightness, contrast, saturation = (random.uniform(1 - JITTER, 1 + JITTER) for _ in range(3))
    filters = [
        f"crop={w}:{h}:{left}:{top}", f"scale={SIZE}:{SIZE}:flags=bilinear",
        *["hflip"] * (random.random() < 0.5),
        f"eq=brightness={brightness / 2 - 0.5}:contrast={contrast}:saturation={saturation}",
        "format=pix_fmts=rgb24",
    ]  # fmt: skip
    return spdl.io.decode_packets(packets, filter_desc=",".join(filters))


def batch(frames: list[Any]) -> Any:
    """uint8 [n, height, width, 3]."""
    return spdl.io.to_numpy(spdl.io.convert_frames(frames))


def endless(images: list[bytes]) -> Iterator[bytes]:
    """All of them in a new order, again and again."""
    for _ in itertools.count():
        yield from random.sample(images, len(images))


def main() -> None:
    images = read_images(Path(sys.argv[1]))
    builder = PipelineBuilder().add_source(endless(images)).pipe(decode, concurrency=WORKERS)
    builder = builder.aggregate(BATCH_SIZE).pipe(batch).add_sink(2)
    pipeline = builder.build(num_threads=WORKERS)
    with pipeline.auto_stop():
        batches = iter(pipeline.get_iterator())
        next(batches)
        serve(batches, version("spdl"))


if __name__ == "__main__":
    main()
