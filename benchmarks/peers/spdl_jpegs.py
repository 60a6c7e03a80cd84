"""Measure the speed of SPDL, a data-loading library, for the benchmark ``benchmarks/echo_jpeg.py``.

The benchmark starts this script in a separate process, with a folder of JPEGs:

    python -m benchmarks.peers.spdl_jpegs FOLDER

SPDL's threads decode whole images with FFmpeg, then crop and resize them with antialiasing. FFmpeg's
libraries must be installed.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import spdl.io
from spdl.pipeline import PipelineBuilder

from benchmarks.peers.sides import JITTER, JPEGS, SIZE, WORKERS, random_box, read_jpegs, serve

Keyed = tuple[bytes, int]  # an image, and the seed of its augmentation


def decode(keyed: Keyed) -> Any:
    """Decode and augment one image with FFmpeg."""
    packets, rng = spdl.io.demux_image(keyed[0]), np.random.default_rng(keyed[1])
    left, top, w, h = random_box(packets.codec.width, packets.codec.height, rng)
    brightness, contrast, saturation = rng.uniform(1 - JITTER, 1 + JITTER, 3)
    filters = [
        f"crop={w}:{h}:{left}:{top}", f"scale={SIZE}:{SIZE}:flags=bilinear",
        *["hflip"] * (rng.random() < 0.5),
        f"eq=brightness={brightness / 2 - 0.5}:contrast={contrast}:saturation={saturation}",
        "format=pix_fmts=rgb24",
    ]  # fmt: skip
    return spdl.io.decode_packets(packets, filter_desc=",".join(filters))


def batch(frames: list[Any]) -> Any:
    """Combine the frames of several images into a batch, uint8 [n, height, width, 3]."""
    return spdl.io.to_numpy(spdl.io.convert_frames(frames))


def endless(encoded: list[bytes]) -> Iterator[Keyed]:
    """Yield all images in a new random order in every epoch, each with a random seed."""
    rng = np.random.default_rng(0)
    while True:
        for row in rng.permutation(len(encoded)):
            yield encoded[row], int(rng.integers(2**32))


def main() -> None:
    encoded = read_jpegs(Path(sys.argv[1]))
    builder = PipelineBuilder().add_source(endless(encoded)).pipe(decode, concurrency=WORKERS)
    builder = builder.aggregate(JPEGS.batch_size).pipe(batch).add_sink(2)
    pipeline = builder.build(num_threads=WORKERS)
    with pipeline.auto_stop():
        serve(iter(pipeline.get_iterator()), version("spdl"), JPEGS)


if __name__ == "__main__":
    main()
