"""Encoded pictures for tests, made on the spot."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIZES = [(48, 64), (64, 48), (40, 40), (30, 90), (61, 47)]


def picture(row: int, height: int = 0, width: int = 0) -> NDArray[np.uint8]:
    """A gradient with noise."""
    if not height:
        height, width = SIZES[row % len(SIZES)]
    rng = np.random.default_rng(row)
    ramp = np.add.outer(np.linspace(0, 150, height), np.linspace(0, 60, width))[..., None]
    return np.clip(ramp + rng.integers(0, 46, (height, width, 3)), 0, 255).astype(np.uint8)


def encoded(row: int, kind: str = "JPEG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(picture(row)).save(stream, kind)
    return stream.getvalue()


class Jpegs:
    """Map-style; some rows are damaged."""

    thread_safe = True

    def __init__(self, length: int, damaged: tuple[int, ...] = ()) -> None:
        self._length, self._damaged = length, damaged

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> dict[str, Any]:
        content = encoded(row)
        return {"image": content[: len(content) // 2] if row in self._damaged else content, "label": row}
