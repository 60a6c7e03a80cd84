"""Encoded images: geometry against torchvision, colors against the formula."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import v2

from adaecho.transforms.photographs import (
    GRAY,
    DecodeImage,
    RandomResizedCrop,
    adjust_colors,
    crop_box,
    decode_image,
    resize,
)  # fmt: skip
from tests.datasets.files import encode, encoded, picture

TRANSPARENT = np.dstack([picture(0), np.full(picture(0).shape[:2], 99, np.uint8)])
KINDS = {
    "JPEG": encoded(4, "JPEG"),
    "PNG": encoded(4, "PNG"),
    "gray": encode(picture(0)[..., 0], "JPEG"),
    "progressive": encode(picture(0), "JPEG", progressive=True),
    "transparent": encode(TRANSPARENT, "PNG"),
}


@pytest.mark.parametrize("content", KINDS.values(), ids=KINDS)
def test_pixels_equal_pillows(content: bytes) -> None:
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    for form in (content, np.frombuffer(content, np.uint8), {"bytes": content, "path": "a.jpg"}):
        np.testing.assert_array_equal(decode_image(form), expected)


@pytest.mark.parametrize(
    ("example", "has"), [((b"", 1), "tuple"), ({"jpg": b"", "cls": 1}, "keys 'jpg', 'cls'"), (b"", "bytes")]
)
def test_a_missing_field_is_named(example: Any, has: str) -> None:
    for transform in (DecodeImage(), RandomResizedCrop(8)):
        arguments = (np.random.default_rng(0),) if isinstance(transform, RandomResizedCrop) else ()
        with pytest.raises(ValueError, match=rf"field='image': the example has no such field \({has}\)"):
            transform(example, *arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no image bytes"),
        (None, "not a NoneType"),
        (encoded(0)[:-200], "corrupt or truncated"),
        (b"no image at all", "corrupt or truncated"),
        ("photograph.jpg", "not a str: .* let the source read files"),
        (picture(0), "not a ndarray: omit decode="),
    ],
)
def test_other_bytes_and_types_are_refused(content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_image(content)


def boxes(height: int, width: int, scale: Any, ratio: Any, number: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(1)
    draws = ((rng.random(2).tolist(), rng.random(20).tolist()) for _ in range(number))
    return np.array([crop_box(height, width, scale, ratio, *draw) for draw in draws])


def test_crop_boxes_are_distributed_as_torchvisions() -> None:
    number, scale, ratio = 8000, (0.08, 1.0), (3 / 4, 4 / 3)
    ours = boxes(375, 500, scale, ratio, number)
    transform = v2.RandomResizedCrop
    torch.manual_seed(0)
    image, random_crop = torch.zeros(3, 375, 500), transform(224, scale, ratio)
    made = [random_crop.make_params([image]) for _ in range(number)]
    theirs = np.array([[one[name] for name in ("top", "left", "height", "width")] for one in made])
    for column in range(4):
        for quantile in (0.1, 0.25, 0.5, 0.75, 0.9):
            a, b = (np.quantile(side[:, column], quantile) for side in (ours, theirs))
            assert a == pytest.approx(b, abs=10)  # about four standard errors
    inside = ours[:, :2] + ours[:, 2:]
    assert (ours >= 0).all()
    assert (inside <= [375, 500]).all()


@pytest.mark.parametrize(("height", "width"), [(20, 400), (400, 20)])
def test_if_no_crop_fits_the_largest_central_one_is_used(height: int, width: int) -> None:
    """The area of the image never fits at these ratios: torchvision's fallback."""
    random_crop = v2.RandomResizedCrop(8, (1.0, 1.0), (3 / 4, 4 / 3))
    expected = random_crop.make_params([torch.zeros(3, height, width)])
    box = boxes(height, width, (1.0, 1.0), (3 / 4, 4 / 3), 1)[0]
    assert box.tolist() == [expected[name] for name in ("top", "left", "height", "width")]


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize(("height", "width"), [(60, 90), (20, 12), (31, 24), (23, 100)])
def test_resizes_as_torchvision(height: int, width: int, antialias: bool) -> None:
    image, size = picture(0, height, width), 24
    as_float = torch.from_numpy(image).permute(2, 0, 1).double()
    expected = v2.functional.resize(as_float, [size, size], antialias=antialias).permute(1, 2, 0).numpy()
    assert np.abs(resize(image, size, antialias) - expected).max() <= 1.01


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("key", range(6))
def test_the_augmentation_step_by_step(key: int, flip: bool) -> None:
    """Crop, colors and flip of one example, from its random numbers."""
    image = picture(1)
    augment = RandomResizedCrop(24, brightness=0.4, contrast=0.3, saturation=0.2, flip=flip)
    drawn = np.random.Generator(np.random.Philox(key=key)).random(26).tolist()
    top, left, height, width = crop_box(64, 48, (0.08, 1.0), (3 / 4, 4 / 3), drawn[:2], drawn[6:])
    crop = resize(image[top : top + height, left : left + width], 24, antialias=True)
    factors = [1 + spread * (2 * u - 1) for spread, u in zip((0.4, 0.3, 0.2), drawn[3:6], strict=True)]
    expected = adjust_colors(crop, *factors)
    expected = expected[:, ::-1] if flip and drawn[2] < 0.5 else expected
    result = augment({"image": image, "label": 3}, np.random.Generator(np.random.Philox(key=key)))
    assert result["label"] == 3
    np.testing.assert_array_equal(result["image"], expected)


def slow_colors(image: NDArray[np.uint8], b: float, c: float, s: float) -> NDArray[np.float64]:
    """One step after another, without clipping."""
    pixels = image.astype(float) * b
    pixels = c * pixels + (1 - c) * (pixels @ GRAY).mean()
    return s * pixels + (1 - s) * (pixels @ GRAY)[..., None]


@pytest.mark.parametrize("factors", [(1.4, 1, 1), (1, 0.6, 1), (1, 1, 0.6), (0.7, 1.3, 1.4), (1.4, 1.4, 0)])
def test_colors_follow_the_formula(factors: tuple[float, float, float]) -> None:
    image = picture(2)
    expected = np.clip(np.rint(slow_colors(image, *factors)), 0, 255)
    assert np.abs(adjust_colors(image, *factors) - expected).max() <= 1
