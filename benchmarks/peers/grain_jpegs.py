"""Measure Grain in the benchmark ``echo_jpeg``, with worker processes and Pillow.

Run: python -m benchmarks.peers.grain_jpegs FOLDER
"""

import io
import sys
from importlib.metadata import version
from pathlib import Path

import grain
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from benchmarks.peers.sides import JITTER, JPEGS, SIZE, WORKERS, random_box, read_jpegs, serve

_JITTERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


class Transform(grain.transforms.RandomMap):
    """Random resized crop, flip and jitter with Pillow, as in torchvision."""

    def random_map(self, element: bytes, rng: np.random.Generator) -> NDArray[np.uint8]:
        image = Image.open(io.BytesIO(element)).convert("RGB")
        left, top, width, height = random_box(*image.size, rng)
        box = (left, top, left + width, top + height)
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for jitter in rng.permutation(len(_JITTERS)):
            image = _JITTERS[jitter](image).enhance(rng.uniform(1 - JITTER, 1 + JITTER))
        return np.asarray(image)


def main() -> None:
    encoded = read_jpegs(Path(sys.argv[1]))
    dataset = grain.MapDataset.source(encoded).seed(0).shuffle().repeat().random_map(Transform())
    # Limit reading ahead. By default, each worker reads up to 500 batches ahead while other sides are
    # measured.
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    batches = dataset.batch(JPEGS.batch_size, drop_remainder=True).to_iter_dataset(ahead)
    processes = grain.MultiprocessingOptions(num_workers=WORKERS)
    serve(iter(batches.mp_prefetch(processes)), version("grain"), JPEGS)


if __name__ == "__main__":
    main()
