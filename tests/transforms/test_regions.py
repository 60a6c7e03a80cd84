"""Decoded regions of JPEGs equal crops of the image; other images are decoded completely."""

import subprocess
import sys
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from adaecho import EchoLoader
from adaecho.transforms import regions
from adaecho.transforms.photographs import (
    CenterCrop,
    DecodeImage,
    EncodedImage,
    RandomResizedCrop,
    decode_for_crop,
    decode_image,
    decoder_for,
)  # fmt: skip
from tests.datasets.files import Jpegs, encode, encoded, picture

needs_nvimgcodec = pytest.mark.skipif(
    not regions.available(), reason="needs nvidia-nvimgcodec-cu13: pip install '.[regions]'"
)
AUGMENT = RandomResizedCrop(16, brightness=0.4, contrast=0.4, saturation=0.4)


def jpeg(row: int, mode: str = "RGB", **options: Any) -> bytes:
    return encode(Image.fromarray(picture(row, 93, 131)).convert(mode), "JPEG", **options)


def with_orientation(number: int) -> Any:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


JPEGS = {
    "4:2:0": {"subsampling": 2},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0},
    "progressive": {"progressive": True},
    "coarse": {"quality": 5},
    "fine": {"quality": 100},
    "restarts": {"restart_marker_rows": 1},
    "upright by its EXIF": {"exif": with_orientation(1)},
    "RGB": {"keep_rgb": True},
    "comment": {"comment": b"x" * 3000},
}


@needs_nvimgcodec
@pytest.mark.parametrize("options", JPEGS.values(), ids=JPEGS)
def test_a_region_equals_the_crop_of_the_image(options: dict[str, Any]) -> None:
    content, rng = jpeg(1, **options), np.random.default_rng(0)
    whole, lazy = decode_image(content), decode_for_crop(content)
    assert isinstance(lazy, EncodedImage)
    assert lazy.shape == whole.shape
    boxes = [(0, 0, 93, 131), (92, 130, 1, 1), (7, 9, 1, 60)]
    for _ in range(40):
        height, width = rng.integers(1, 94), rng.integers(1, 132)
        top, left = rng.integers(0, 94 - height), rng.integers(0, 132 - width)
        boxes.append((int(top), int(left), int(height), int(width)))
    for top, left, height, width in boxes:
        place = slice(top, top + height), slice(left, left + width)
        np.testing.assert_array_equal(lazy[place], whole[place])
        region = regions.decode_region(np.frombuffer(content, np.uint8), top, left, height, width)
        assert region is not None  # so it was no crop of the whole


@needs_nvimgcodec
@pytest.mark.parametrize("kind", ["none", "batch", "example_before_augmentation"])
def test_the_loader_gives_the_same_batches(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    asked: list[Any] = []
    decode_region = regions.decode_region
    monkeypatch.setattr(regions, "decode_region", lambda *of: asked.append(of) or decode_region(*of))
    given: dict[str, Any] = {"echo": kind, "factor": 1 if kind == "none" else 2, "shuffle_buffer": 5}

    def batches() -> list[list[torch.Tensor]]:
        with EchoLoader(
            Jpegs(23),
            4,
            decode=DecodeImage(),
            augment=AUGMENT,
            buffer_format="encoded",
            num_workers=3,
            **given,
        ) as loader:
            return [[batch["image"], batch["label"]] for batch in islice(loader, 6)]

    with_regions, number = batches(), len(asked)
    assert number
    monkeypatch.setattr(regions, "available", lambda: False)
    torch.testing.assert_close(batches(), with_regions, rtol=0, atol=0)
    assert len(asked) == number


@needs_nvimgcodec
def test_damaged_bytes_give_the_same_pixels_or_are_refused() -> None:
    rng, content = np.random.default_rng(0), np.frombuffer(jpeg(2), np.uint8)
    place, refused = (slice(40, 60), slice(0, 30)), 0
    for _ in range(200):
        damaged = content.copy()
        damaged[rng.integers(2, len(content) - 2, 2)] = rng.integers(0, 256, 2)
        try:
            whole = decode_image(damaged)
        except ValueError:
            refused += 1
            with pytest.raises(ValueError, match="not a complete image"):
                decode_for_crop(damaged)[place]
        else:
            np.testing.assert_array_equal(decode_for_crop(damaged)[place], whole[place])
    assert 0 < refused < 100


WHOLE = {
    "PNG": encoded(0, "PNG"),
    "GIF": encoded(0, "GIF"),
    "gray": jpeg(0, mode="L"),
    "CMYK": jpeg(0, mode="CMYK"),
    "trailing": encoded(0) + b"\n",
    **{f"turned by its EXIF, {number}": jpeg(1, exif=with_orientation(number)) for number in (2, 3, 6, 9)},
}


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_other_images_are_decoded_completely(content: bytes) -> None:
    decoded = decode_for_crop(content)
    assert isinstance(decoded, np.ndarray)
    np.testing.assert_array_equal(decoded, decode_image(content))


def test_the_image_is_decoded_if_the_region_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "decode_region", lambda *_: None)
    place = slice(3, 20), slice(5, 31)
    np.testing.assert_array_equal(decode_for_crop(encoded(0))[place], decode_image(encoded(0))[place])


def test_only_crops_of_the_same_field_use_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "available", lambda: True)
    assert decoder_for(AUGMENT, "image") is decode_for_crop
    assert decoder_for(CenterCrop(8), "image") is decode_for_crop
    assert decoder_for(AUGMENT, 0) is decode_image
    assert decoder_for(lambda example, rng: AUGMENT(example, rng), "image") is decode_image
    monkeypatch.setattr(regions, "available", lambda: False)
    assert decoder_for(AUGMENT, "image") is decode_image


def test_without_the_library_nothing_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    if "nvidia" in sys.modules:
        monkeypatch.delattr(sys.modules["nvidia"], "nvimgcodec", raising=False)
    regions._decoders.cache_clear()
    try:
        assert not regions.available()
    finally:
        regions._decoders.cache_clear()


@needs_nvimgcodec
def test_the_import_prints_nothing_and_keeps_stderr() -> None:
    code = "import sys; from adaecho.transforms import regions; sys.exit(f'available: {regions.available()}')"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stderr == "available: True\n"
