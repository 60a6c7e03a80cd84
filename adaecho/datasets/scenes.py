"""Generate images for object detection: handwritten digits from scikit-learn on a canvas of 64 x 64 pixels.

The images are identical on all machines.
"""

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from adaecho.datasets.coco import GroundTruth

SIDE = 64
MOST_DIGITS = 4
SIDES_PIXELS = (14, 28)  # smallest and largest side of a pasted glyph
BRIGHTEST = 16
_SEED = 20260101
_TRIES = 20


class Scenes:
    """A map-style dataset of generated images (scenes), each with K handwritten digits.

    An example is ``{"image": uint8 [64, 64, 3], "boxes": float32 [K, 4], "labels": int64 [K] from 1}``.

    Attributes:
        categories, truths, sizes: as in ``DetectionImages``.
    """

    thread_safe = True

    def __init__(self, examples: list[dict[str, Any]]) -> None:
        self.examples, self.categories = examples, [str(digit) for digit in range(10)]
        self.truths, self.sizes = list[GroundTruth](), [(SIDE, SIDE)] * len(examples)
        for example in examples:
            boxes, labels = example["boxes"], example["labels"]
            areas = (boxes[:, 2:] - boxes[:, :2]).astype(float).prod(axis=1)
            self.truths.append(GroundTruth(boxes, labels, labels < 0, areas))

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.examples[row]

    def origin(self, row: int) -> str:
        """Return the name of a scene, for messages."""
        return f"scene {row}"


def make_scenes(glyphs: NDArray[np.uint8], digits: NDArray[np.int64], number: int, *, seed: int) -> Scenes:
    """Generate images (scenes) with 1 to 4 handwritten digits each, whose boxes do not overlap."""
    # glyphs is uint8 [N, 8, 8] with values from 0 to 16, and digits int64 [N]. Each scene has its own random
    # numbers, so that scene i does not depend on the number of scenes.
    rngs = (np.random.default_rng((_SEED, seed, row)) for row in range(number))
    return Scenes([_scene(glyphs, digits, rng) for rng in rngs])


def _scene(glyphs: NDArray[np.uint8], digits: NDArray[np.int64], rng: np.random.Generator) -> dict[str, Any]:
    ground, ink = rng.integers(0, 90, 3), rng.integers(150, 256, 3)
    canvas = np.clip(ground + rng.normal(0, 12, (SIDE, SIDE, 3)), 0, 255)
    boxes, labels = list[list[int]](), list[int]()
    for _ in range(rng.integers(1, MOST_DIGITS + 1)):
        which, side = rng.integers(len(glyphs)), int(rng.integers(SIDES_PIXELS[0], SIDES_PIXELS[1] + 1))
        corner = _free_corner(boxes, side, rng)
        if corner is None:
            continue
        x, y = corner
        shade = cv2.resize(glyphs[which].astype(np.float32) / BRIGHTEST, (side, side))  # bilinear
        patch = canvas[y : y + side, x : x + side]
        patch += shade[..., None] * (ink - patch)
        boxes.append(_tight(shade, x, y))
        labels.append(int(digits[which]) + 1)  # labels begin at 1
    return {
        "image": canvas.astype(np.uint8),
        "boxes": np.array(boxes, np.float32).reshape(-1, 4),
        "labels": np.array(labels, np.int64),
    }


def _free_corner(boxes: list[list[int]], side: int, rng: np.random.Generator) -> tuple[int, int] | None:
    for _ in range(_TRIES):
        x, y = (int(corner) for corner in rng.integers(0, SIDE - side + 1, 2))
        if all(x >= b[2] or x + side <= b[0] or y >= b[3] or y + side <= b[1] for b in boxes):
            return x, y
    return None


def _tight(shade: NDArray[np.float32], x: int, y: int) -> list[int]:
    """Return the smallest box around the ink of a glyph."""
    rows, columns = np.nonzero(shade.max(axis=1) > 0.2)[0], np.nonzero(shade.max(axis=0) > 0.2)[0]
    return [x + int(columns[0]), y + int(rows[0]), x + int(columns[-1]) + 1, y + int(rows[-1]) + 1]
