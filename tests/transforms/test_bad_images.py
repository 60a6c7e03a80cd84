"""Odd and damaged image files: each is decoded right, or refused with a reason."""

import io
import resource
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from adaecho.transforms.headers import MAX_PIXELS, encoded_size
from adaecho.transforms.photographs import (
    CentreCrop,
    DecodeImage,
    decode_both_ways,
    decode_for_crop,
    decode_image,
)
from tests.transforms.pictures import encoded, picture


def saved(image: Image.Image | NDArray[Any], kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, kind, **options)
    return stream.getvalue()


FLAT = np.full((32, 40, 3), (200, 120, 40), np.uint8)
WIDE = (np.arange(32 * 40, dtype=np.uint16).reshape(32, 40) * 51).astype(np.uint16)
ODD = {
    "CMYK": (saved(Image.fromarray(FLAT).convert("CMYK"), "JPEG", quality=95), FLAT),
    "16 bits": (saved(WIDE, "PNG"), np.repeat((WIDE // 256)[..., None], 3, axis=2)),
    "GIF": (saved(FLAT, "GIF"), FLAT),
}


@pytest.mark.parametrize(("content", "expected"), ODD.values(), ids=ODD)
def test_odd_kinds_become_rgb_of_eight_bits(content: bytes, expected: NDArray[np.uint8]) -> None:
    decoded = decode_image(content)
    assert (decoded.shape, decoded.dtype) == (expected.shape, np.uint8)
    assert np.abs(decoded.astype(int) - expected).mean() < 8


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photograph_is_turned_as_its_exif_says(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(picture(1))
    content = saved(image, kind, exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))
    for decoded in (decode_image(content), decode_for_crop(content)):
        shown = decoded[0 : upright.shape[0], 0 : upright.shape[1]]
        assert decoded.shape == upright.shape
        assert np.abs(shown.astype(int) - upright).mean() < 2
    stored = decode_image(saved(image, kind))
    turned, as_stored = decode_both_ways(content)
    np.testing.assert_array_equal(as_stored, stored)
    np.testing.assert_array_equal(turned, decode_image(content))


@pytest.mark.parametrize("decode", [decode_image, decode_for_crop])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.99])
def test_a_truncated_jpeg_is_refused(share: float, decode: Callable[[bytes], Any]) -> None:
    content = encoded(0)
    with pytest.raises(ValueError, match="corrupt or truncated"):
        decode(content[: int(len(content) * share)])


@pytest.mark.parametrize("decode", [decode_image, decode_for_crop])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_a_jpeg_that_zeros_end_is_refused_and_one_that_they_follow_is_not(
    share: float, decode: Callable[[bytes], Any]
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = saved(Image.fromarray(noise), "JPEG", quality=95, subsampling=0)
    kept = int(len(content) * share)
    with pytest.raises(ValueError, match="corrupt or truncated"):
        decode(content[:kept] + bytes(len(content) - kept))
    assert decode(content + bytes(100)).shape == (64, 64, 3)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF"])
def test_opencv_prints_nothing_of_what_is_refused(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    content = encoded(0, kind)
    with suppress(ValueError):
        decode_image(content[: len(content) // 2])
    assert capfd.readouterr().err == ""


def bomb(height: int, width: int) -> bytes:
    """A PNG that claims many pixels and holds none."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        sum_of_it = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + sum_of_it

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in chunks)


def jpeg_bomb(height: int, width: int) -> bytes:
    content = bytearray(encoded(0))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def webp_bomb(height: int, width: int) -> bytes:
    content = bytearray(saved(picture(0), "WEBP", lossless=True))
    at = content.index(b"VP8L") + 9
    content[at : at + 4] = struct.pack("<I", (width - 1) | (height - 1) << 14)
    return bytes(content)


def bmp_bomb(height: int, width: int) -> bytes:
    """Run-length encoded: its end follows its palette."""
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, 2, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1080, 0, 0, 1078) + header + bytes(1024) + b"\x00\x01"


def tiff_bomb(height: int, width: int) -> bytes:
    content = bytearray(saved(picture(0), "TIFF", compression="tiff_adobe_deflate"))
    for tag, value in ((256, width), (257, height)):
        at = content.index(struct.pack("<HHI", tag, 3, 1))
        content[at + 8 : at + 10] = struct.pack("<H", value)
    return bytes(content)


def gif_bomb(height: int, width: int) -> bytes:
    """A large canvas with a small frame on it."""
    content = bytearray(saved(picture(0), "GIF"))
    content[6:10] = struct.pack("<HH", width, height)
    return bytes(content)


def tiff_of_tags(*tags: tuple[int, int, int, int]) -> bytes:
    """Of entries (tag, type, count, value); one row of zeros as its only strip."""
    others = ((258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8), (279, 4, 1, 8))
    entries = sorted([*tags, *others], key=lambda entry: entry[0])  # stable: of equal tags as they came
    directory = b"".join(struct.pack("<HHII", *entry) for entry in entries) + bytes(4)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + directory + bytes(1 << 12)


WIDTH, HEIGHT = 256, 257
BOMBS = {
    "png": bomb(20000, 20000),
    "jpeg": jpeg_bomb(60000, 60000),
    "webp": webp_bomb(16384, 16384),
    "bmp": bmp_bomb(14000, 14000),
    "bmp from the top": bmp_bomb(-14000, 14000),
    "tiff": tiff_bomb(20000, 20000),
    "tiff, width twice": tiff_of_tags((WIDTH, 4, 1, 60000), (WIDTH, 4, 1, 60), (HEIGHT, 4, 1, 60000)),
    "tiff, height twice": tiff_of_tags((WIDTH, 4, 1, 60000), (HEIGHT, 4, 1, 60), (HEIGHT, 3, 1, 60000)),
    "gif": gif_bomb(20000, 20000),
}


@pytest.mark.parametrize("decode", [decode_image, decode_for_crop])
@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_decompression_bomb_is_refused_before_memory_is_taken(
    content: bytes, decode: Callable[[bytes], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cv2, "imdecode", None)
    size = encoded_size(content)
    assert size is not None
    assert size[0] * size[1] > MAX_PIXELS
    with pytest.raises(ValueError, match=r"claim \d+x\d+ pixels, and at most 178,956,970 are decoded"):
        decode(content)


@pytest.mark.parametrize("decode", [decode_image, decode_for_crop])
@pytest.mark.parametrize("options", [{"progressive": True}, {"streamtype": 0}])
def test_a_jpeg_of_many_scans_is_refused(
    decode: Callable[[bytes], Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs ten bytes and a pass over all pixels: 100 kB of them took minutes."""
    content = saved(picture(0), "JPEG", **options)
    scan = content[content.index(b"\xff\xda") :][:10]
    if "progressive" not in options:  # of one of its components
        content = content.replace(scan, b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + scan)
    monkeypatch.setattr(cv2, "imdecode", None)
    with pytest.raises(ValueError, match=r"have 10[0-9] scans; at most 100 are decoded"):
        decode(content[:-2] + scan * 99 + content[-2:])


@pytest.mark.parametrize("tag", [WIDTH, HEIGHT])
@pytest.mark.parametrize(("kind", "count"), [(16, 1), (4, 2), (3, 3), (1, 1), (13, 1)])
def test_a_tiff_that_keeps_its_size_elsewhere_is_refused(tag: int, kind: int, count: int) -> None:
    """libtiff would take 64 bits, and more than one value, from where the entry points to."""
    content = tiff_of_tags((tag, kind, count, 60), (WIDTH + HEIGHT - tag, 4, 1, 60))
    for decode in (decode_image, decode_for_crop):
        with pytest.raises(ValueError, match="no whole image"):
            decode(content)


@pytest.mark.parametrize("ending", [".pbm", ".ppm", ".hdr", ".jp2", ".exr", ".ras", ".pam"])
def test_other_kinds_are_refused_before_they_are_decoded(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = picture(0)
    if ending == ".pbm":
        pixels = pixels[..., :1]
    elif ending in (".hdr", ".exr"):
        pixels = pixels.astype(np.float32)
    try:
        content = cv2.imencode(ending, pixels)[1].tobytes()
    except cv2.error:
        pytest.skip(f"this OpenCV writes no {ending}")
    monkeypatch.setattr(cv2, "imdecode", None)
    with pytest.raises(ValueError, match="none of the kinds that are read: JPEG, PNG"):
        decode_image(content)


def test_too_little_memory_is_no_fault_of_the_image() -> None:
    content = saved(Image.new("L", (13_000, 13_000)), "PNG")  # 484 MiB as RGB
    room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (100 << 20)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
        with pytest.raises(MemoryError, match="too little memory to decode an image: Failed to allocate"):
            decode_image(content)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def tiff_header(order: str, kind: int) -> bytes:
    """Of 50 x 70 pixels, in either byte order, its sizes in two bytes or four."""
    entries = [
        struct.pack(
            f"{order}HHI{'HH' if kind == 3 else 'I'}", tag, kind, 1, *([side, 0] if kind == 3 else [side])
        )
        for tag, side in ((WIDTH, 70), (HEIGHT, 50))
    ]
    begin = b"II*\0" if order == "<" else b"MM\0*"
    return begin + struct.pack(f"{order}IH", 8, 2) + b"".join(entries)


SIZES = {
    **{
        f"{kind} {row}": (encoded(row, kind), picture(row).shape[:2])
        for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
        for row in range(5)
    },
    **{
        f"{kind} {next(iter(options))}": (saved(picture(3), kind, **options), picture(3).shape[:2])
        for kind, options in (
            ("JPEG", {"progressive": True}), ("JPEG", {"comment": b"x" * 3000}), ("JPEG", {"optimize": True}),
            ("WEBP", {"lossless": True}), ("WEBP", {"exif": b"Exif\0\0" + bytes(20)}),
        )
    },
    **{f"TIFF {order} {kind}": (tiff_header(order, kind), (50, 70)) for order in "<>" for kind in (3, 4)},
    **{f"TIFF {order} cut": (tiff_header(order, kind)[:-3], None) for order, kind in (("<", 3), (">", 4))},
    "empty": (b"", None),
    "JPEG of two bytes": (b"\xff\xd8", None),
    "JPEG of five": (b"\xff\xd8\xff\xe0\x00", None),
    "BMP of zeros": (b"BM" + bytes(40), None),
    "JPEG cut": (encoded(0)[:30], None),
    "TIFF of five bytes": (b"II*\0\x08", None),
    "WEBP of no kind": (b"RIFF1234WEBPVP8?" + bytes(20), None),
}  # fmt: skip


@pytest.mark.parametrize(("content", "size"), SIZES.values(), ids=SIZES)
def test_headers_tell_the_size_or_none(content: bytes, size: tuple[int, int] | None) -> None:
    assert encoded_size(content) == size


def test_the_centre_is_cropped_as_by_resizing_first() -> None:
    image = picture(0, 100, 160)
    ours = CentreCrop(28)({"image": image, "label": 1})
    assert ours["label"] == 1
    pillow = Image.fromarray(image).resize((round(160 * 32 / 100), 32), Image.Resampling.BILINEAR)
    left = (pillow.width - 28) // 2
    theirs = np.asarray(pillow.crop((left, 2, left + 28, 30)))
    assert np.abs(ours["image"].astype(int) - theirs).mean() < 8


@pytest.mark.parametrize(
    "image", [np.zeros((8, 8, 3), np.uint8), torch.zeros(3, 8, 8), Image.new("RGB", (8, 8))]
)
def test_an_image_that_is_decoded_already_is_refused_with_what_to_do(image: Any) -> None:
    with pytest.raises(ValueError, match="is decoded already; leave decode= out"):
        DecodeImage()({"image": image})
