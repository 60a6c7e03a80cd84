"""What both sides of ``echo_jpeg`` share; imports neither torch nor TensorFlow."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.clock import cpu_s, examples_per_s

BATCH_SIZE, SHUFFLE_BUFFER, SIZE, WORKERS = 64, 256, 224, 2
SCALE, RATIO, JITTER = (0.08, 1.0), (3 / 4, 4 / 3), 0.4
# Height and width; ImageNet's median is 375 x 500.
_SIZES = [(375, 500), (375, 500), (333, 500), (500, 375), (400, 500)]


def write_images(folder: Path, number: int) -> None:
    """Synthetic photographs: noise with the 1/f spectrum of natural images, about 100 kB at quality 90."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for row in range(number):
        image = _noise(*_SIZES[row % len(_SIZES)], rng)
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "JPEG", quality=90)
        (folder / f"{row:05}.jpg").write_bytes(stream.getvalue())


def _noise(height: int, width: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    amplitude = np.maximum(frequency, 1 / width) ** -1.15
    phases = np.exp(2j * np.pi * rng.random((4, *frequency.shape)))
    fields = np.fft.irfft2(amplitude * phases, s=(height, width))
    fields /= fields.std(axis=(1, 2), keepdims=True)
    # Colours of a photograph vary together.
    channels = np.moveaxis(fields[0] + 0.35 * fields[1:], 0, -1)
    return np.clip(120 + 50 * channels, 0, 255).astype(np.uint8)


def read_images(folder: Path) -> list[bytes]:
    """Every JPEG under a folder, encoded, again and again until they are a few batches."""
    images = [path.read_bytes() for path in sorted(folder.rglob("*.jp*g"))]
    if not images:
        raise SystemExit(f"{folder} holds no file *.jpg or *.jpeg")
    return images * -(-4 * BATCH_SIZE // len(images))


def rates(batches: Iterator[Any], seconds: float) -> tuple[float, float]:
    """Examples per second, after queues that filled meanwhile are empty; per second of a processor."""
    for _ in range(8):
        next(batches)
    start_cpu_s, number = cpu_s(), 0

    def counted() -> Iterator[Any]:
        nonlocal number
        for batch in batches:
            number += BATCH_SIZE
            yield batch

    examples_per_s_ = examples_per_s(counted(), seconds, batch_size=BATCH_SIZE, warm_up=0)
    return examples_per_s_, number / (cpu_s() - start_cpu_s)


def serve(batches: Iterator[Any], version: str) -> None:
    """Say that a peer is ready, and answer each line of seconds with its two rates."""
    print("ready", version, flush=True)
    for line in sys.stdin:
        print(*rates(batches, float(line)), flush=True)
