"""Grain's side of ``echo_jpeg``, in a process of its own, with worker processes and Pillow.

    python -m benchmarks.peers.echo_jpeg_grain <folder>

Needs pillow beside grain. Reads lines "<seconds>" and answers each with two rates.
"""

import io
import math
import sys
from importlib.metadata import version
from pathlib import Path

import grain
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from benchmarks.peers.echo_jpegs import BATCH_SIZE, JITTER, RATIO, SCALE, SIZE, WORKERS, read_images, serve

_JITTERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


class Transform(grain.transforms.RandomMap):
    """Random resized crop, flip and jitter, of Pillow as torchvision's."""

    def random_map(self, element: bytes, rng: np.random.Generator) -> NDArray[np.uint8]:
        image = Image.open(io.BytesIO(element)).convert("RGB")
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=self._box(*image.size, rng))
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for jitter in rng.permutation(len(_JITTERS)):
            image = _JITTERS[jitter](image).enhance(rng.uniform(1 - JITTER, 1 + JITTER))
        return np.asarray(image)

    def _box(self, width: int, height: int, rng: np.random.Generator) -> tuple[float, float, float, float]:
        for _ in range(10):
            area = width * height * rng.uniform(*SCALE)
            ratio = math.exp(rng.uniform(*map(math.log, RATIO)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if w <= width and h <= height:
                left, top = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
                return left, top, left + w, top + h
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        return left, top, left + side, top + side


def main() -> None:
    images = read_images(Path(sys.argv[1]))
    dataset = grain.MapDataset.source(images).seed(0).shuffle().repeat().random_map(Transform())
    # By default each worker reads up to 500 batches ahead, while other sides are measured.
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    batches = dataset.batch(BATCH_SIZE, drop_remainder=True).to_iter_dataset(ahead)
    iterator = iter(batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=WORKERS)))
    next(iterator)
    serve(iterator, version("grain"))


if __name__ == "__main__":
    main()
