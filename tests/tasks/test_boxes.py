"""The augmentation keeps each box around its object."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchvision.transforms.v2 import functional as v2

from adaecho.tasks.boxes import ResizeWithBoxes, SSDAugment, boxes_in, collate_boxes, turn_hue
from tests.datasets.files import picture

COLORS = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]
PLAIN = SSDAugment(size=100, photometric=0, fill=(0, 0, 0))


def example(seed: int, number: int = 3) -> dict[str, Any]:
    """A black image with separate rectangles in the colors of their labels."""
    rng = np.random.default_rng(seed)
    image, boxes = np.zeros((120, 160, 3), np.uint8), []
    for label in range(number):
        left, top = 50 * label + rng.integers(2, 12), rng.integers(2, 60)
        width, height = rng.integers(14, 36), rng.integers(14, 55)
        image[top : top + height, left : left + width] = COLORS[label]
        boxes.append([left, top, left + width, top + height])
    drawn = np.array(boxes, np.float32).reshape(-1, 4)
    return {"image": image, "boxes": drawn, "labels": np.arange(1, number + 1), "name": seed}


def seen(image: NDArray[np.uint8], label: int) -> list[int] | None:
    """The box around a rectangle, from its pixels."""
    mask = image[..., label - 1] > 125
    if not mask.any():
        return None
    rows, columns = np.nonzero(mask.any(axis=1))[0], np.nonzero(mask.any(axis=0))[0]
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


# Edges are known to half a pixel. On a larger canvas the image lies at whole pixels.
@pytest.mark.parametrize(("expand", "error_pixels"), [(0.0, 0.501), (1.0, 1.01)])
def test_every_box_surrounds_its_object(expand: float, error_pixels: float) -> None:
    for seed in range(60):
        result = replace(PLAIN, expand=expand)(example(seed), np.random.default_rng(seed))
        assert (result["image"].shape, result["name"]) == ((100, 100, 3), seed)
        for box, label in zip(result["boxes"], result["labels"], strict=True):
            found = seen(result["image"], int(label))
            assert found is not None
            np.testing.assert_allclose(box, found, rtol=0, atol=error_pixels)


def test_boxes_with_their_center_outside_are_dropped_and_others_are_clipped() -> None:
    boxes = np.array([[0, 0, 10, 10], [8, 8, 30, 30], [18, 18, 50, 50]], np.float32)
    kept, labels = boxes_in((10, 10, 30, 30), boxes, np.array([1, 2, 3]), size=40)
    assert labels.tolist() == [2]
    assert kept.tolist() == [[0, 0, 40, 40]]


def test_crops_keep_at_least_one_box() -> None:
    rng, dropped = np.random.default_rng(0), 0
    for seed in range(100):
        left = len(PLAIN(example(seed), rng)["labels"])
        assert left >= 1
        dropped += left < 3
    assert dropped > 20
    for seed in range(20):
        result = PLAIN(example(seed, number=0), rng)
        assert (result["boxes"].shape, result["image"].shape) == ((0, 4), (100, 100, 3))


def test_half_are_expanded_and_half_flipped() -> None:
    augment = SSDAugment(size=100, photometric=0, crop=False, fill=(9, 9, 9))
    expanded = flips = 0
    for seed in range(200):
        result = augment(example(seed), np.random.default_rng(seed))
        assert len(result["labels"]) == 3
        expanded += bool((result["image"] == 9).all(axis=2).any())
        flips += bool(result["boxes"][0, 0] > result["boxes"][2, 0])
    assert 70 < expanded < 130
    assert 70 < flips < 130


@pytest.mark.parametrize("shift", [-0.05, 0.0, 0.03, 0.4])
def test_hues_equal_torchvisions(shift: float) -> None:
    image = picture(1)
    theirs = v2.adjust_hue(torch.from_numpy(image).permute(2, 0, 1), shift).permute(1, 2, 0).numpy()
    # 256 hues in a byte: up to 1 / 512 of the circle, of which a sixth is the whole range of a channel.
    assert np.abs(turn_hue(image, shift).astype(int) - theirs).max() <= 6


def test_colors_are_distorted_and_boxes_are_not() -> None:
    colors = SSDAugment(size=100, photometric=1, crop=False, expand=0, flip=0)
    one, untouched = example(0), example(0)
    result, plain = colors(one, np.random.default_rng(0)), ResizeWithBoxes(100)(one)
    np.testing.assert_array_equal(result["boxes"], plain["boxes"])
    np.testing.assert_allclose(plain["boxes"], one["boxes"] * ([100 / 160, 100 / 120] * 2), rtol=1e-6)
    assert (result["image"] != plain["image"]).any()
    np.testing.assert_array_equal(one["image"], untouched["image"])
    np.testing.assert_array_equal(one["boxes"], untouched["boxes"])


def test_batches_are_padded_with_label_zero() -> None:
    resized = [ResizeWithBoxes(32)(example(seed, number)) for seed, number in ((0, 3), (1, 0), (2, 1))]
    batch = collate_boxes(resized)
    assert batch["image"].shape == (3, 32, 32, 3)
    assert batch["labels"].tolist() == [[1, 2, 3], [0, 0, 0], [1, 0, 0]]
    assert batch["boxes"].shape == (3, 3, 4)
    assert batch["boxes"][1].abs().sum() == 0
