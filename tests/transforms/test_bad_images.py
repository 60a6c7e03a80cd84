"""Unusual and damaged image files are decoded correctly or refused with a reason."""

import io
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from adaecho.transforms.photographs import CenterCrop, DecodeImage, decode_for_crop, decode_image
from tests.datasets.files import encode, encoded, picture

FLAT = np.full((32, 40, 3), (200, 120, 40), np.uint8)
WIDE = (np.arange(32 * 40, dtype=np.uint16).reshape(32, 40) * 51).astype(np.uint16)
ODD = {
    "CMYK": (encode(Image.fromarray(FLAT).convert("CMYK"), "JPEG", quality=95), FLAT),
    "16 bits": (encode(WIDE, "PNG"), np.repeat((WIDE // 256)[..., None], 3, axis=2)),
    "GIF": (encode(FLAT, "GIF"), FLAT),
}


@pytest.mark.parametrize(("content", "expected"), ODD.values(), ids=ODD)
def test_other_formats_become_rgb_of_eight_bits(content: bytes, expected: NDArray[np.uint8]) -> None:
    decoded = decode_image(content)
    assert (decoded.shape, decoded.dtype) == (expected.shape, np.uint8)
    assert np.abs(decoded.astype(int) - expected).mean() < 8


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_are_rotated_by_their_exif(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(picture(1))
    content = encode(image, kind, exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))
    for decoded in (decode_image(content), decode_for_crop(content)):
        shown = decoded[0 : upright.shape[0], 0 : upright.shape[1]]
        assert decoded.shape == upright.shape
        assert np.abs(shown.astype(int) - upright).mean() < 2
    np.testing.assert_array_equal(decode_image(content, turned=False), decode_image(encode(image, kind)))


@pytest.mark.parametrize("decode", [decode_image, decode_for_crop])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.99])
def test_a_truncated_jpeg_is_refused(share: float, decode: Callable[[bytes], Any]) -> None:
    content = encoded(0)
    with pytest.raises(ValueError, match="corrupt or truncated"):
        decode(content[: int(len(content) * share)])


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF"])
def test_opencv_prints_nothing(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    content = encoded(0, kind)
    with suppress(ValueError):
        decode_image(content[: len(content) // 2])
    assert capfd.readouterr().err == ""


def test_too_little_memory_is_not_a_bad_image() -> None:
    content = encode(Image.new("L", (13_000, 13_000)), "PNG")  # 484 MiB as RGB
    room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (100 << 20)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
        with pytest.raises(MemoryError, match="too little memory to decode an image: Failed to allocate"):
            decode_image(content)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_the_center_crop_equals_resizing_first() -> None:
    image = picture(0, 100, 160)
    ours = CenterCrop(28)({"image": image, "label": 1})
    assert ours["label"] == 1
    pillow = Image.fromarray(image).resize((round(160 * 32 / 100), 32), Image.Resampling.BILINEAR)
    left = (pillow.width - 28) // 2
    theirs = np.asarray(pillow.crop((left, 2, left + 28, 30)))
    assert np.abs(ours["image"].astype(int) - theirs).mean() < 8


@pytest.mark.parametrize(
    "image", [np.zeros((8, 8, 3), np.uint8), torch.zeros(3, 8, 8), Image.new("RGB", (8, 8))]
)
def test_a_decoded_image_is_refused_with_the_remedy(image: Any) -> None:
    with pytest.raises(ValueError, match="omit decode= if the source gives decoded images"):
        DecodeImage()({"image": image})
