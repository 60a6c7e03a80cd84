"""Pad-crop-flip against a pixel-by-pixel version; metrics against their definitions."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from adaecho.echo.order import keyed
from adaecho.ranks import SINGLE_PROCESS
from adaecho.tasks import build_task
from adaecho.tasks.images import classification_metrics, cross_entropy, predictions_in_memory
from adaecho.transforms.small_images import Images, PadCropFlip
from tests.conftest import Compose
from tests.datasets.files import random_images, write_cifar10, write_labeled


def _examples(number: int, side: int, channels: int) -> Images:
    rng = np.random.default_rng(1)
    return {
        "image": rng.integers(0, 256, (number, side, side, channels), dtype=np.uint8),
        "label": np.arange(number),
    }


def _keys(number: int, seed: int = 0) -> keyed.Keys:
    return keyed.item_keys(seed, np.arange(number))


def _slow_crop(image: NDArray[np.uint8], padding: int, top: int, left: int, flip: bool) -> NDArray[np.uint8]:
    side = len(image)
    crop = np.zeros_like(image)
    for y in range(side):
        for x in range(side):
            source_y, source_x = y + top - padding, (side - 1 - x if flip else x) + left - padding
            if 0 <= source_y < side and 0 <= source_x < side:
                crop[y, x] = image[source_y, source_x]
    return crop


@pytest.mark.parametrize(
    ("number", "padding", "flip", "side", "channels"),
    [(40, 1, False, 8, 1), (40, 4, True, 32, 3), (40, 0, True, 5, 2), (0, 4, True, 32, 3)],
)
def test_block_equals_a_pixel_by_pixel_version(
    number: int, padding: int, flip: bool, side: int, channels: int
) -> None:
    examples, keys = _examples(number, side, channels), _keys(number)[::-1]
    before = examples["image"].copy()
    result = PadCropFlip(padding, flip).block(examples, keys)
    top = keyed.integers(keys, 0, 0, 2 * padding + 1)
    left = keyed.integers(keys, 1, 0, 2 * padding + 1)
    flipped = keyed.integers(keys, 2, 0, 2) * flip
    slow = [
        _slow_crop(examples["image"][i], padding, top[i], left[i], bool(flipped[i])) for i in range(number)
    ]
    np.testing.assert_array_equal(result["image"], np.array(slow).reshape(number, side, side, channels))
    np.testing.assert_array_equal(result["label"], examples["label"])
    np.testing.assert_array_equal(examples["image"], before, err_msg="the input must stay as it was")


def test_each_direction_can_be_fixed() -> None:
    examples, keys = _examples(50, 8, 1), _keys(50)
    down = PadCropFlip(1, False, horizontal=False)
    across = PadCropFlip(1, False, vertical=False)
    crops = {_slow_crop(examples["image"][0], 1, top, 1, False).tobytes() for top in range(3)}
    first = {"image": examples["image"][[0] * 50]}
    assert {image.tobytes() for image in down.block(first, keys)["image"]} == crops
    both = across.block(down.block(examples, keys), keys)["image"]
    np.testing.assert_array_equal(both, PadCropFlip(1, False).block(examples, keys)["image"])


def test_one_example_with_a_generator_is_one_of_the_crops() -> None:
    example = {"image": _examples(1, 8, 3)["image"][0], "label": 7}
    augment = PadCropFlip(1, True)
    crops = {
        _slow_crop(example["image"], 1, top, left, flip).tobytes()
        for top in range(3)
        for left in range(3)
        for flip in (False, True)
    }
    rng = np.random.default_rng(0)
    results = [augment(example, rng) for _ in range(300)]
    assert {result["image"].tobytes() for result in results} == crops
    assert all(result["label"] == 7 for result in results)
    floats = {"image": np.full((4, 4, 3), 0.7, np.float32)}
    for refused in (
        lambda: augment(floats, rng),
        lambda: augment.block({"image": floats["image"][None]}, _keys(1)),
    ):
        with pytest.raises(ValueError, match="PadCropFlip: images must be uint8 arrays, not float32"):
            refused()


class _Table(nn.Module):
    """Logits looked up by the first pixel."""

    def __init__(self, logits: list[list[float]]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits[images[:, 0, 0, 0].long()]


def test_metrics_are_means_over_examples_for_any_batches() -> None:
    # Probability of the right class: 1/2 for pixel 0, 3/4 for pixel 1 with label 1, 1/4 with label 0.
    model = _Table([[0.0, 0.0], [0.0, math.log(3.0)]])
    split = {
        "image": np.array([0, 1, 1, 1, 1], np.uint8).reshape(5, 1, 1, 1),
        "label": np.array([0, 1, 1, 0, 1]),
    }
    expected = -(math.log(1 / 2) + 3 * math.log(3 / 4) + math.log(1 / 4)) / 5
    for batch_size in (1, 2, 5, 100):
        predictions = predictions_in_memory(lambda _: split, batch_size)
        metrics = classification_metrics(
            predictions(model, "validation", torch.device("cpu"), SINGLE_PROCESS)
        )
        assert metrics["accuracy"] == pytest.approx(4 / 5)
        assert metrics["cross_entropy"] == pytest.approx(expected, rel=1e-6)
    batch = {name: torch.from_numpy(array) for name, array in split.items()}
    loss, weight = cross_entropy(model, batch)
    assert loss.item() / weight == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["digits", "cifar10", "imagenet"])
def test_the_key_of_label_smoothing_reaches_the_loss(
    compose_config: Compose, tmp_path: Path, name: str
) -> None:
    batch = {"image": torch.tensor([[4.0, 0.0]]), "label": torch.tensor([0])}
    overrides = [f"task={name}"]
    if name == "cifar10":
        write_cifar10(tmp_path, random_images(3), [0, 1, 2])
        overrides += [f"data.path={tmp_path}", "data.validation_examples=1"]
    elif name == "imagenet":
        write_labeled("folders", tmp_path)
        overrides += [f"data.path={tmp_path}"]
    tasks = (build_task(compose_config(*overrides, f"task.label_smoothing={share}")) for share in (0, 0.3))
    plain, smoothed = (task.loss(nn.Identity(), batch)[0].item() for task in tasks)
    assert smoothed - plain == pytest.approx(4 * 0.3 / 2, rel=1e-5)
