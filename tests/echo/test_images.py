"""Encoded images: geometry against torchvision, colours against the formula, and both inside EchoLoader."""

import io
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import v2

from adaecho import EchoLoader
from adaecho.echo.images import (
    GREY,
    DecodeImage,
    RandomResizedCrop,
    adjust_colours,
    crop_box,
    decode_image,
    resize,
)

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

    def __init__(self, length: int, damaged: tuple[int, ...] = ()) -> None:
        self._length, self._damaged = length, damaged

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> dict[str, Any]:
        content = encoded(row)
        return {"image": content[: len(content) // 2] if row in self._damaged else content, "label": row}


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_decodes_to_the_pixels_of_pillow(kind: str) -> None:
    content = encoded(4, kind)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    for form in (content, np.frombuffer(content, np.uint8), {"bytes": content, "path": "a.jpg"}):
        np.testing.assert_array_equal(decode_image(form), expected)


def test_decodes_grey_images_as_three_equal_channels() -> None:
    stream = io.BytesIO()
    Image.fromarray(picture(0)[..., 0]).save(stream, "JPEG")
    image = decode_image(stream.getvalue())
    assert image.shape == (48, 64, 3)
    assert (image == image[..., :1]).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no image bytes"),
        (None, "no image bytes"),
        (encoded(0)[:-200], "corrupt or truncated"),
        (b"no image at all", "corrupt or truncated"),
        ("photograph.jpg", "let the source read the file"),
        (picture(0), "not an array uint8"),
    ],
)
def test_what_is_no_image(content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_image(content)


def slow_box(
    height: int, width: int, scale: Any, ratio: Any, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """torchvision's rule, with draws of its own."""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = np.exp(rng.uniform(*np.log(ratio)))
        w, h = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.integers(0, height - h + 1), rng.integers(0, width - w + 1), h, w
    return -1, -1, -1, -1


def boxes(height: int, width: int, scale: Any, ratio: Any, number: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(1)
    drawn = [
        crop_box(height, width, scale, ratio, rng.random(2).tolist(), rng.random(20).tolist())
        for _ in range(number)
    ]
    return np.array(drawn)


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
def test_where_no_try_fits_the_largest_central_crop_is_taken(height: int, width: int) -> None:
    """A whole image's area at these ratios never fits: torchvision's fallback."""
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


def test_crops_what_lies_in_the_box() -> None:
    """The whole augmentation of one example, from its own draws."""
    image, key = picture(1), 5
    augment = RandomResizedCrop(24, brightness=0.4, contrast=0.3, saturation=0.2)
    drawn = np.random.Generator(np.random.Philox(key=key)).random(26).tolist()
    top, left, height, width = crop_box(64, 48, (0.08, 1.0), (3 / 4, 4 / 3), drawn[:2], drawn[6:])
    crop = resize(image[top : top + height, left : left + width], 24, antialias=True)
    factors = [1 + spread * (2 * u - 1) for spread, u in zip((0.4, 0.3, 0.2), drawn[3:6], strict=True)]
    expected = adjust_colours(crop, *factors)
    expected = expected[:, ::-1] if drawn[2] < 0.5 else expected
    result = augment({"image": image, "label": 3}, np.random.Generator(np.random.Philox(key=key)))
    assert result["label"] == 3
    np.testing.assert_array_equal(result["image"], expected)


def test_flips_half_of_the_crops_left_to_right() -> None:
    ramp = np.repeat(np.arange(64, dtype=np.uint8)[None, :, None], 64, axis=0).repeat(3, axis=2)
    rng, flips = np.random.default_rng(0), 0
    for _ in range(200):
        first, *_, last = RandomResizedCrop(8)({"image": ramp}, rng)["image"][0, :, 0].tolist()
        flips += first > last
    assert 70 < flips < 130
    assert RandomResizedCrop(8, flip=False)({"image": ramp}, rng)["image"][0, 0, 0] < 32


def slow_colours(image: NDArray[np.uint8], b: float, c: float, s: float) -> NDArray[np.float64]:
    """One step after another, without clipping."""
    pixels = image.astype(float) * b
    pixels = c * pixels + (1 - c) * (pixels @ GREY).mean()
    return s * pixels + (1 - s) * (pixels @ GREY)[..., None]


@pytest.mark.parametrize("factors", [(1.4, 1, 1), (1, 0.6, 1), (1, 1, 0.6), (0.7, 1.3, 1.4), (1.4, 1.4, 0)])
def test_colours_follow_the_formula(factors: tuple[float, float, float]) -> None:
    image = picture(2)
    expected = np.clip(np.rint(slow_colours(image, *factors)), 0, 255)
    assert np.abs(adjust_colours(image, *factors) - expected).max() <= 1


def test_colours_are_near_torchvisions_where_nothing_clips() -> None:
    image = (picture(3) // 2 + 50).astype(np.uint8)
    theirs = torch.from_numpy(image).permute(2, 0, 1)
    for adjust, factor in (
        (v2.functional.adjust_saturation, 0.8),
        (v2.functional.adjust_contrast, 1.2),
        (v2.functional.adjust_brightness, 1.1),
    ):
        theirs = adjust(theirs, factor)
    ours = adjust_colours(image, 1.1, 1.2, 0.8).astype(int)
    assert np.abs(ours - theirs.permute(1, 2, 0).numpy()).max() <= 3


def batches(number: int = 6, length: int = 23, **arguments: Any) -> list[dict[str, torch.Tensor]]:
    settings = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 5, **arguments}
    augment = RandomResizedCrop(16, brightness=0.4, contrast=0.4, saturation=0.4)
    with EchoLoader(Jpegs(length), 4, decode=DecodeImage(), augment=augment, **settings) as loader:
        return list(islice(loader, number))


def assert_equal(ones: list[dict[str, torch.Tensor]], others: list[dict[str, torch.Tensor]]) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert one["image"].dtype == torch.uint8
        assert one["image"].shape == (4, 16, 16, 3)
        assert torch.equal(one["image"], other["image"])
        assert torch.equal(one["label"], other["label"])


@pytest.mark.parametrize("num_workers", [1, 8])
@pytest.mark.parametrize("place", ["decoded", "encoded"])
def test_batches_are_the_same_for_any_workers_and_place(num_workers: int, place: str) -> None:
    assert_equal(batches(), batches(num_workers=num_workers, place=place))


@pytest.mark.parametrize("echo", ["none", "batch"])
def test_place_changes_no_batch_of_other_variants(echo: str) -> None:
    factor = 1 if echo == "none" else 2
    assert_equal(batches(echo=echo, factor=factor), batches(echo=echo, factor=factor, place="encoded"))


@pytest.mark.parametrize("places", [("decoded", "encoded"), ("encoded", "decoded"), ("encoded", "encoded")])
def test_restores_from_either_place(places: tuple[str, str]) -> None:
    def loader(place: str) -> EchoLoader:
        return EchoLoader(
            Jpegs(11), 4, decode=DecodeImage(), augment=RandomResizedCrop(16), place=place,
            echo="example_before_augmentation", factor=2, shuffle_buffer=5,
        )  # fmt: skip

    with loader(places[0]) as one, loader(places[1]) as other:
        list(islice(one, 3))
        other.load_state_dict(one.state_dict())
        assert_equal(list(islice(one, 5)), list(islice(other, 5)))


def test_repeats_are_augmented_anew_from_an_image_nobody_can_change() -> None:
    image = DecodeImage()({"image": encoded(0)})["image"]
    with pytest.raises(ValueError, match="read-only"):
        image[0] = 0
    with EchoLoader(
        Jpegs(1), 2, decode=DecodeImage(), augment=RandomResizedCrop(16), factor=2,
        echo="example_before_augmentation",
    ) as loader:  # fmt: skip
        first, second = next(iter(loader))["image"]
    assert not torch.equal(first, second)


def test_damaged_images_are_skipped_within_the_budget_and_named() -> None:
    with EchoLoader(
        Jpegs(12, damaged=(3, 7)), 5, decode=DecodeImage(), augment=RandomResizedCrop(16), order="stored",
        max_bad_examples=2, epochs=1, num_workers=2,
    ) as loader:  # fmt: skip
        labels = [label for batch in loader for label in batch["label"].tolist()]
        assert labels == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
        assert [bad["index"] for bad in loader.bad_examples] == [3, 7]
        assert "example 3 of Jpegs" in loader.bad_examples[0]["origin"]
        assert "truncated" in loader.bad_examples[0]["error"]


@pytest.mark.parametrize("source", ["map", "stream"])
def test_a_damaged_image_after_the_buffer_stops_with_its_origin(source: str) -> None:
    jpegs = Jpegs(6, damaged=(4,))
    given: Any = jpegs if source == "map" else lambda: iter([jpegs[row] for row in range(6)])
    augment = RandomResizedCrop(16)
    with (
        EchoLoader(
            given, 3, decode=DecodeImage(), augment=augment, place="encoded", order="stored"
        ) as loader,
        pytest.raises(ValueError, match="truncated") as raised,
    ):
        list(islice(loader, 2))
    assert "while decoding example 4" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"place": "raw"}, "place='raw': must be one of"),
        ({"decode": None}, "without decode="),
        ({"echo": "example_after_augmentation"}, "what is echoed there is decoded"),
        ({"max_bad_examples": 1}, "can't be skipped any more"),
        ({"batch_size": None}, "whole batches"),
    ],
)
def test_where_the_buffer_cannot_hold_encoded_examples(arguments: dict[str, Any], message: str) -> None:
    given = {"batch_size": 2, "place": "encoded", "decode": DecodeImage(), **arguments}
    with pytest.raises(ValueError, match=message):
        EchoLoader(Jpegs(3), **given)


@pytest.mark.parametrize(
    "arguments", [{"size": 0}, {"scale": (0.5, 0.2)}, {"ratio": (0, 1)}, {"contrast": 1.5}]
)
def test_wrong_attributes_are_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(arguments))}="):
        RandomResizedCrop(**arguments)


def test_tuples_and_bare_images_keep_their_form() -> None:
    rng = np.random.default_rng(0)
    content = encoded(0)
    image, label = RandomResizedCrop(8, field=0)(DecodeImage(0)((content, 7)), rng)
    assert (image.shape, label) == ((8, 8, 3), 7)
    assert RandomResizedCrop(8, field=None)(DecodeImage(None)(content), rng).shape == (8, 8, 3)


def test_large_examples_travel_one_by_one_and_are_checked_against_memory() -> None:
    big = {"x": np.zeros(1 << 20, np.uint8)}
    with (
        EchoLoader(lambda: iter([big] * 4), 2, shuffle_buffer=10**9) as loader,
        pytest.raises(ValueError, match="shuffle_buffer"),
    ):
        next(iter(loader))
