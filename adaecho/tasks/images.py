"""What image classifiers share: pad-crop-flip, loss, metrics over a whole split.

Images stay uint8 [H, W, C] up to the model, whose first layer is ``adaecho.models.normalise.Normalise``.
"""

import threading
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from adaecho.echo import keys as keyed
from adaecho.echo import recycle
from adaecho.echo.keys import Keys
from adaecho.tasks.base import Batch, Direction

Images = dict[str, NDArray[Any]]
"""``image`` uint8 [N, H, W, C] and ``label`` int64 [N]."""

CLASSIFICATION_METRICS: dict[str, Direction] = {"accuracy": "max", "cross_entropy": "min"}

# Draws of one augmentation; each is independent of the others.
_TOP, _LEFT, _FLIP = range(3)


@dataclass(frozen=True)
class PadCropFlip:
    """Zero padding, a random crop of the original size, and a horizontal flip with probability one half.

    Attributes:
        padding: pixels added on every side; the crop's corner is uniform over (2 * padding + 1)**2 places.
        flip: whether to flip at all.
    """

    padding: int
    flip: bool

    def __call__(self, example: Images, rng: np.random.Generator) -> Images:
        """One example, ``image`` uint8 [H, W, C]."""
        top, left = rng.integers(0, 2 * self.padding + 1, size=(2, 1))
        flipped = rng.integers(0, 2, size=1) == 1
        return {**example, "image": self._apply(example["image"][None], top, left, flipped)[0]}

    def block(self, examples: Images, keys: Keys) -> Images:
        """Many examples at once, ``image`` uint8 [n, H, W, C]; each result depends on its own key alone."""
        places = 2 * self.padding + 1
        top = keyed.integers(keys, _TOP, 0, places)
        left = keyed.integers(keys, _LEFT, 0, places)
        flipped = keyed.integers(keys, _FLIP, 0, 2) == 1
        return {**examples, "image": self._apply(examples["image"], top, left, flipped)}

    def _apply(
        self,
        images: NDArray[np.uint8],
        top: NDArray[np.int64],
        left: NDArray[np.int64],
        flipped: NDArray[np.bool_],
    ) -> NDArray[np.uint8]:
        result = recycle.empty(images.shape, np.uint8)
        for begin in range(0, len(images), _BLOCK):
            rows = slice(begin, begin + _BLOCK)
            cropped = _pad_and_crop(images[rows], self.padding, top[rows], left[rows])
            if self.flip:
                mirrored = flipped[rows]
                cropped[mirrored] = _mirror(cropped[mirrored])
            result[rows] = cropped
        return result


_BLOCK = 128  # images at once, so that what is worked on stays in the processor's cache
_scratch = threading.local()


def _padded(images: NDArray[np.uint8], padding: int) -> NDArray[np.uint8]:
    """The images with a border of zeros, in this thread's scratch memory, whose border stays as it is."""
    number, height, width, channels = images.shape
    layout = (height, width, channels, padding)
    if getattr(_scratch, "layout", None) != layout:
        shape = (_BLOCK, height + 2 * padding, width + 2 * padding, channels)
        _scratch.layout, _scratch.padded = layout, np.zeros(shape, np.uint8)
    padded: NDArray[np.uint8] = _scratch.padded[:number]
    row = np.dtype((np.void, width * channels))
    # Element [n, y] is a row of an image; it is copied as one wide element, not pixel by pixel.
    corner = padding * (padded.strides[1] + padded.strides[2])
    inside = np.ndarray((number, height), row, buffer=padded, offset=corner, strides=padded.strides[:2])
    inside[...] = np.ascontiguousarray(images).reshape(number, height, -1).view(row)[..., 0]
    return padded


def _pad_and_crop(
    images: NDArray[np.uint8], padding: int, top: NDArray[np.int64], left: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Crops of the padded images; a row of a crop is gathered as one wide element, not pixel by pixel."""
    number, height, width, channels = images.shape
    padded = _padded(images, padding)
    row = np.dtype((np.void, width * channels))
    # Element [n, y, x] is the run of `width` pixels of image n that begins at (y, x); they overlap.
    runs = np.ndarray(
        (number, height + 2 * padding, 2 * padding + 1), row, buffer=padded, strides=padded.strides[:3]
    )
    lines = top[:, None] + np.arange(height)
    gathered: NDArray[np.uint8] = runs[np.arange(number)[:, None], lines, left[:, None]]
    return gathered.view(np.uint8).reshape(images.shape)


def _mirror(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images flipped left to right, all rows in one OpenCV call: several times faster than [::-1]."""
    number, height, width, channels = images.shape
    if not number:
        return images
    rows = images.reshape(number * height, width, channels)
    return np.asarray(cv2.flip(rows, 1), np.uint8).reshape(images.shape)


def mean_cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Training loss of an image classifier in nats, a scalar with gradient."""
    return functional.cross_entropy(model(batch["image"]).float(), batch["label"])


def classification_metrics(
    model: nn.Module, split: Images, *, batch_size: int, device: torch.device
) -> dict[str, float]:
    """Accuracy and mean cross entropy (nats) over all examples of a split."""
    number = len(split["label"])
    correct = torch.zeros((), dtype=torch.int64, device=device)
    cross_entropy = torch.zeros((), dtype=torch.float64, device=device)
    for begin in range(0, number, batch_size):
        rows = slice(begin, begin + batch_size)
        images = torch.from_numpy(split["image"][rows]).to(device)
        labels = torch.from_numpy(split["label"][rows]).to(device)
        logits = model(images).float()
        correct += (logits.argmax(1) == labels).sum()
        cross_entropy += functional.cross_entropy(logits, labels, reduction="sum")
    return {"accuracy": correct.item() / number, "cross_entropy": cross_entropy.item() / number}
