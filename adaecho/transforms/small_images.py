"""Pad, crop and flip small images, many images at a time."""

import threading
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from adaecho.echo.memory.pytree import empty
from adaecho.echo.order import keyed
from adaecho.echo.order.keyed import Keys

Images = dict[str, NDArray[Any]]
"""Arrays by name: ``image`` is uint8 [N, H, W, C], and all other arrays have the length N."""

# Indices of the independent random numbers of one augmentation.
_TOP, _LEFT, _FLIP = range(3)


@dataclass(frozen=True)
class PadCropFlip:
    """Pad with zeros, crop randomly to the original size, and flip left to right half of the time.

    For example, ``padding=4`` extends an image from 32 x 32 to 40 x 40 pixels. The crop has 9 x 9 possible
    positions, all with the same probability.

    Attributes:
        padding: number of pixels added on each side.
        flip: whether to flip half of the images. If false, no image is flipped.
        vertical: whether the crop's vertical position is random. If false, the crop is centered vertically.
        horizontal: whether the crop's horizontal position is random. If false, it is centered horizontally.
    """

    padding: int
    flip: bool
    vertical: bool = True
    horizontal: bool = True

    def __call__(self, example: Images, rng: np.random.Generator) -> Images:
        """Augment one example, whose ``image`` is uint8 [H, W, C]."""
        top, left = rng.integers(0, 2 * self.padding + 1, size=(2, 1))
        flipped = rng.integers(0, 2, size=1) == 1
        return {**example, "image": self._apply(example["image"][None], top, left, flipped)[0]}

    def block(self, examples: Images, keys: Keys) -> Images:
        """Augment n examples at once, which is faster than one call for each example.

        Args:
            examples: a dict of arrays. ``image`` is uint8 [n, H, W, C].
            keys: uint64 [n], one random key for each example. The key determines the crop and the flip.
        """
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
        if images.dtype != np.uint8:
            raise ValueError(f"PadCropFlip: images must be uint8 arrays, not {images.dtype}")
        result, flipped = empty(images.shape, np.uint8), flipped & self.flip
        top = top if self.vertical else np.full_like(top, self.padding)
        left = left if self.horizontal else np.full_like(left, self.padding)
        for begin in range(0, len(images), _BLOCK):
            rows = slice(begin, begin + _BLOCK)
            # Put the flipped images last, so that a single OpenCV call can flip them.
            order = np.argsort(flipped[rows], kind="stable")
            upright = len(order) - np.count_nonzero(flipped[rows])
            cropped = _pad_and_crop(images[rows], self.padding, top[rows], left[rows], order)
            result[rows][order[:upright]] = cropped[:upright]
            result[rows][order[upright:]] = _mirror(cropped[upright:])
        return result


_BLOCK = 128  # number of images processed at once, so that they fit in the processor's cache


class _Scratch(threading.local):
    """Reusable memory for images with rows of zeros above and below, separate for each thread."""

    def __init__(self) -> None:
        self._layout: tuple[int, ...] = ()

    def pad(self, images: NDArray[np.uint8], padding: int) -> NDArray[np.void]:
        """Pad images with zeros, and return all crops of each image that have its original size."""
        # Element [i, top * W + left] of the result is a view of one crop of image i, as H * W * C bytes. The
        # memory has no padding between rows, so a crop's columns outside the image contain pixels of adjacent
        # rows. The caller must set these to zero with inside().
        number, height, width, channels = images.shape
        if self._layout != (height, width, channels, padding):
            self._make(height, width, channels, padding)
        self._images[:number] = images.reshape(number, -1)
        return self._runs

    def inside(self, left: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return a mask for crops: 0 left and right of the image, and 255 elsewhere."""
        # left [n] contains the left edges of the crops in the padded image. The mask is uint8 [n, H, W, C].
        # The padding above and below the image needs no mask, because it is zero in memory.
        # Use mode="clip", because mode="raise" would need a second buffer.
        return self._columns.take(left, axis=0, out=self._inside[: len(left)], mode="clip")

    def _make(self, height: int, width: int, channels: int, padding: int) -> None:
        self._layout = height, width, channels, padding
        line, margin = width * channels, padding * channels
        pitch = (height + 2 * padding) * line
        memory = np.zeros(_BLOCK * pitch + 2 * margin, np.uint8)
        padded = memory[margin : margin + _BLOCK * pitch].reshape(_BLOCK, pitch)
        self._images = padded[:, padding * line : (padding + height) * line]
        run, places = np.dtype((np.void, height * line)), 2 * padding * (width + 1) + 1
        self._runs: NDArray[np.void] = np.ndarray((_BLOCK, places), run, memory, strides=(pitch, channels))
        column = np.arange(2 * padding + 1)[:, None] + np.arange(width) - padding
        shown = np.where((column >= 0) & (column < width), np.uint8(255), np.uint8(0))
        self._columns = np.repeat(np.repeat(shown[:, None], height, 1)[..., None], channels, 3)
        self._inside = np.empty((_BLOCK, height, width, channels), np.uint8)


_scratch = _Scratch()


def _pad_and_crop(
    images: NDArray[np.uint8],
    padding: int,
    top: NDArray[np.int64],
    left: NDArray[np.int64],
    order: NDArray[np.int64],
) -> NDArray[np.uint8]:
    """Pad and crop images, and return the crops of ``images[order]``."""
    width = images.shape[2]
    runs = _scratch.pad(images, padding)
    cropped: NDArray[np.uint8] = runs[order, (top * width + left)[order]].view(np.uint8).reshape(images.shape)
    cropped &= _scratch.inside(left[order])
    return cropped


def _mirror(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Flip images left to right in one OpenCV call, which is faster than slicing."""
    number, height, width, channels = images.shape
    if not number:
        return images
    rows = images.reshape(number * height, width, channels)
    return np.asarray(cv2.flip(rows, 1), np.uint8).reshape(images.shape)
