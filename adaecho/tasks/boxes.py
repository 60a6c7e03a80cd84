"""Augment images with boxes as SSD does, and collate them into padded batches.

Source: W. Liu et al., "SSD: Single Shot MultiBox Detector", 2016, sections 2.2 and 3.6.

An example is a dict with these entries; other entries stay unchanged:

* ``image``: uint8 [H, W, 3].
* ``boxes``: float32 [K, 4], the corners x1, y1, x2, y2 in pixels.
* ``labels``: int64 [K].
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from adaecho.transforms.photographs import Image, adjust_colors, resize

Boxes = NDArray[np.float32]
Window = tuple[float, float, float, float]
"""A rectangle given by x1, y1, x2, y2 in pixels of the image. It may extend beyond the image."""

# Choices for the smallest allowed IoU of a crop with one of the boxes. None stands for the whole image.
IOU_CHOICES = (None, 0.1, 0.3, 0.5, 0.7, 0.9, 0.0)
_TRIES = 40


@dataclass(frozen=True)
class SSDAugment:
    """SSD's augmentation: expand, crop around objects, resize, distort colors, flip.

    The crop follows torchvision's RandomIoUCrop:

    1. Draw a minimum IoU from seven choices.
    2. Draw up to 40 windows. Each side is a fraction of the image's side, drawn from ``crop_scale``, and the
       aspect ratio must lie in ``crop_ratio``.
    3. Accept the first window that contains the center of a box and has at least the minimum IoU with that
       box. Without boxes, accept the first window with an allowed ratio.
    4. If no window is accepted, start over.

    Boxes whose center lies outside the window are dropped, and the others are clipped to it.

    Attributes:
        size: the height and width of the resulting image, in pixels.
        photometric: the probability of each distortion of brightness, contrast, saturation and hue.
        brightness, contrast, saturation: the largest relative change of each.
        hue: the largest change of the hue, as a fraction of the color circle.
        expand: the probability of placing the image at a random position on a larger canvas.
        expand_ratio: the largest ratio of the sides of the canvas to those of the image.
        fill: the color of the canvas outside the image.
        crop: whether to crop.
        flip: the probability of a horizontal flip.
        antialias: as in ``RandomResizedCrop``.
    """

    size: int = 300
    photometric: float = 0.5
    brightness: float = 0.125
    contrast: float = 0.5
    saturation: float = 0.5
    hue: float = 0.05
    expand: float = 0.5
    expand_ratio: float = 4.0
    fill: tuple[int, int, int] = (124, 116, 104)
    crop: bool = True
    crop_scale: tuple[float, float] = (0.3, 1.0)
    crop_ratio: tuple[float, float] = (0.5, 2.0)
    flip: float = 0.5
    antialias: bool = True
    thread_safe: ClassVar[bool] = True

    def __call__(self, example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Return the example with augmented image, boxes and labels. The image has shape [size, size, 3]."""
        image, boxes, labels = example["image"], example["boxes"], example["labels"]
        height, width = image.shape[:2]
        window = self._expand(height, width, rng)
        if self.crop:
            window = self._crop(window, boxes, rng)
        boxes, labels = boxes_in(window, boxes, labels, self.size)
        # As in MLPerf, colors are distorted after resizing, because there are fewer pixels to change.
        image = self._distort(cut(image, window, self.size, self.fill, self.antialias), rng)
        if rng.random() < self.flip:
            image, boxes = np.asarray(cv2.flip(image, 1)), flipped(boxes, self.size)
        return {**example, "image": image, "boxes": boxes, "labels": labels}

    def _distort(self, image: Image, rng: np.random.Generator) -> Image:
        chosen = rng.random(4) < self.photometric
        spans = np.array([self.brightness, self.contrast, self.saturation])
        factors = np.where(chosen[:3], 1 + spans * rng.uniform(-1, 1, 3), 1.0).tolist()
        shift = self.hue * rng.uniform(-1, 1)
        if chosen[:3].any():
            image = adjust_colors(image, *factors)
        return turn_hue(image, shift) if chosen[3] else image

    def _expand(self, height: int, width: int, rng: np.random.Generator) -> Window:
        chosen, ratio, x, y = rng.random(4)
        if chosen >= self.expand:
            return 0, 0, width, height
        larger = 1 + ratio * (self.expand_ratio - 1)
        left, top = x * width * (larger - 1), y * height * (larger - 1)
        return -left, -top, width * larger - left, height * larger - top

    def _crop(self, whole: Window, boxes: Boxes, rng: np.random.Generator) -> Window:
        while True:
            least = IOU_CHOICES[rng.integers(len(IOU_CHOICES))]
            if least is None:
                return whole
            for _ in range(_TRIES):
                window = self._window(whole, rng)
                if window is not None and (not len(boxes) or _holds(window, boxes, least)):
                    return window

    def _window(self, whole: Window, rng: np.random.Generator) -> Window | None:
        x1, y1, x2, y2 = whole
        width, height = rng.uniform(*self.crop_scale, size=2) * (x2 - x1, y2 - y1)
        if not self.crop_ratio[0] <= width / height <= self.crop_ratio[1]:
            return None
        left, top = x1 + rng.random() * (x2 - x1 - width), y1 + rng.random() * (y2 - y1 - height)
        # The window is rounded to whole pixels, so that the pixels that are cut out agree with the boxes.
        left, top = int(np.floor(left)), int(np.floor(top))
        return left, top, left + max(round(width), 1), top + max(round(height), 1)


@dataclass(frozen=True)
class ResizeWithBoxes:
    """Resizes an image and its boxes to ``size`` x ``size`` pixels, for evaluation."""

    size: int = 300
    antialias: bool = True

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        """Return the example with its image and boxes resized."""
        image, boxes, labels = example["image"], example["boxes"], example["labels"]
        window = (0.0, 0.0, float(image.shape[1]), float(image.shape[0]))
        boxes, labels = boxes_in(window, boxes, labels, self.size)
        resized = resize(image, self.size, self.antialias)
        return {**example, "image": resized, "boxes": boxes, "labels": labels}


def collate_boxes(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Combine N examples into a batch, padded to M boxes, the largest number in any image.

    Returns:
        ``image`` [N, S, S, 3], ``boxes`` [N, M, 4] and ``labels`` [N, M]. Label 0 marks padding.
    """
    boxes, labels = (
        pad_sequence([torch.from_numpy(example[name]) for example in examples], batch_first=True)
        for name in ("boxes", "labels")
    )
    images = np.stack([example["image"] for example in examples])
    return {"image": torch.from_numpy(images), "boxes": boxes, "labels": labels}


collate_boxes.thread_safe = True  # type: ignore[attr-defined]


def turn_hue(image: Image, shift: float) -> Image:
    """Shift the hue of all pixels by a fraction of the color circle."""
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
    hsv[..., 0] += np.uint8(round(shift * 256) % 256)  # overflow is intended, since hues are cyclic
    return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL), np.uint8)


def cut(image: Image, window: Window, size: int, fill: tuple[int, int, int], antialias: bool) -> Image:
    """Cut a window out of an image, resize it, and fill the parts outside the image with a color."""
    height, width = image.shape[:2]
    x1, y1, x2, y2 = window
    left, top, right, bottom = max(int(x1), 0), max(int(y1), 0), min(round(x2), width), min(round(y2), height)
    inner = image[top:bottom, left:right]
    if x1 >= 0 and y1 >= 0 and x2 <= width and y2 <= height and inner.size:
        return resize(inner, size, antialias)
    result = np.empty((size, size, 3), np.uint8)
    result[:] = fill
    # Only the part of the window inside the image is resized, since the window may be many times larger.
    columns = [round((x - x1) / (x2 - x1) * size) for x in (left, right)]
    rows = [round((y - y1) / (y2 - y1) * size) for y in (top, bottom)]
    shape = rows[1] - rows[0], columns[1] - columns[0]
    if inner.size and min(shape) > 0:
        result[slice(*rows), slice(*columns)] = resize(inner, shape, antialias)
    return result


def boxes_in(
    window: Window, boxes: Boxes, labels: NDArray[np.int64], size: int
) -> tuple[Boxes, NDArray[np.int64]]:
    """Return the boxes inside a window and their labels, with coordinates in the resized window."""
    # A box is kept if its center lies in the window. It is clipped to the window, which is resized to
    # size x size pixels.
    x1, y1, x2, y2 = window
    kept = _centers_in(window, boxes)
    low, scale = np.array([x1, y1, x1, y1]), size / np.array([x2 - x1, y2 - y1, x2 - x1, y2 - y1])
    moved = np.clip((boxes[kept] - low) * scale, 0, size).astype(np.float32)
    real = (moved[:, 2:] > moved[:, :2]).all(axis=1)
    return moved[real], labels[kept][real]


def flipped(boxes: Boxes, width: float) -> Boxes:
    """Return the boxes after their image, ``width`` pixels wide, has been flipped left to right."""
    x1, y1, x2, y2 = boxes.T
    return np.stack([width - x2, y1, width - x1, y2], axis=1)


def _centers_in(window: Window, boxes: Boxes) -> NDArray[np.bool_]:
    x, y = (boxes[:, 0] + boxes[:, 2]) / 2, (boxes[:, 1] + boxes[:, 3]) / 2
    inside: NDArray[np.bool_] = (x > window[0]) & (x < window[2]) & (y > window[1]) & (y < window[3])
    return inside


def _holds(window: Window, boxes: Boxes, least: float) -> bool:
    """Return whether a window contains the center of a box with an IoU of at least ``least``."""
    boxes = boxes[_centers_in(window, boxes)]
    if not len(boxes):
        return False
    shared = np.minimum(boxes[:, 2:], window[2:]) - np.maximum(boxes[:, :2], window[:2])
    shared_area = shared.clip(min=0).prod(axis=1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) + (window[2] - window[0]) * (window[3] - window[1])
    return bool((shared_area / (areas - shared_area)).max() >= least)
