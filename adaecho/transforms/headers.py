"""The size of an encoded image from its header alone, before anything is decoded."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

# Pillow's limit: an image of more pixels is an attack or a mistake. Decoded it would take 512 MiB.
MAX_PIXELS = 178_956_970
MOST_SCANS = 100  # of a JPEG: each, of some ten bytes perhaps, is a pass over the whole image; usual are 10

# JPEG markers that begin a frame: SOF0 to SOF15, without DHT (C4), JPG (C8) and DAC (CC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_SCAN, _APP1 = 0xDA, 0xE1
_STAND_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})


def encoded_size(content: bytes | memoryview) -> tuple[int, int] | None:
    """Height and width in pixels of a JPEG, PNG, GIF, WebP, BMP or TIFF.

    None for other kinds and for damaged headers.

    Raises:
        ValueError: a JPEG of more than ``MOST_SCANS``.
    """
    head = bytes(content[:32])
    if head.startswith(b"\xff\xd8"):
        frame = _jpeg_frame(content)
        # Not looked for in all: that takes a tenth of the time that decoding does.
        scans = bytes(content).count(bytes([0xFF, _SCAN])) if frame is not None and frame.several_scans else 1
        if scans > MOST_SCANS:
            raise ValueError(f"its {len(content)} bytes have {scans} scans; at most {MOST_SCANS} are decoded")
        return None if frame is None else frame[:2]
    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(head) >= 24:
        width, height = struct.unpack(">II", head[16:24])
        return height, width
    if head.startswith((b"GIF87a", b"GIF89a")) and len(head) >= 10:
        width, height = struct.unpack("<HH", head[6:10])
        return height, width
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP" and len(head) >= 30:
        return _webp_size(head)
    if head.startswith(b"BM") and len(head) >= 26:
        old = head[14:18] == b"\x0c\0\0\0"  # OS/2's header of 12 bytes
        width, height = struct.unpack("<HH", head[18:22]) if old else struct.unpack("<ii", head[18:26])
        # A negative height means that rows begin at the top.
        return (abs(height), width) if height and width > 0 else None
    if head.startswith((b"II*\0", b"MM\0*")):
        return _tiff_size(content, "<" if head.startswith(b"II") else ">")
    return None


def _webp_size(head: bytes) -> tuple[int, int] | None:
    """Width and height by the first chunk: extended, lossless or lossy (RFC 9649; RFC 6386, section 9.1)."""
    if head[12:16] == b"VP8X":
        return int.from_bytes(head[27:30], "little") + 1, int.from_bytes(head[24:27], "little") + 1
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if head[12:16] == b"VP8 ":
        width, height = struct.unpack("<HH", head[26:30])
        return height & 0x3FFF, width & 0x3FFF
    return None


_TIFF_WIDTH, _TIFF_HEIGHT, _ORIENTATION = 256, 257, 274  # tags, of type 3 (two bytes) or 4 (four)


def _tiff_size(content: bytes | memoryview, order: str) -> tuple[int, int] | None:
    """Height and width of the first of its images.

    Of a tag that comes twice the larger: OpenCV and Pillow take the first. None for sizes of other types,
    which libtiff would read elsewhere in the file.
    """
    found: dict[int, int] = {}
    try:
        for tag, value in _tiff_tags(content, order):
            if tag in (_TIFF_WIDTH, _TIFF_HEIGHT):
                if value is None:
                    return None
                found[tag] = max(value, found.get(tag, 0))
    except struct.error:  # cut short
        return None
    return (found[_TIFF_HEIGHT], found[_TIFF_WIDTH]) if len(found) == 2 else None


def _tiff_tags(content: bytes | memoryview, order: str) -> Iterator[tuple[int, int | None]]:
    """The tags of the first directory with their values, None where that is no single whole number.

    Raises:
        struct.error: it is cut short.
    """
    (at,) = struct.unpack_from(f"{order}I", content, 4)
    (number,) = struct.unpack_from(f"{order}H", content, at)
    for entry in range(at + 2, at + 2 + 12 * number, 12):
        tag, kind, count = struct.unpack_from(f"{order}HHI", content, entry)
        if kind not in (3, 4) or count != 1:
            yield tag, None
        else:
            yield tag, struct.unpack_from(f"{order}{'H' if kind == 3 else 'I'}", content, entry + 8)[0]


def whole_jpeg_size(content: bytes | memoryview) -> tuple[int, int] | None:
    """Height and width of a JPEG with three components that ends as one and that its EXIF does not turn.

    None for anything else.
    """
    if bytes(content[:2]) != b"\xff\xd8" or bytes(content[-2:]) != b"\xff\xd9":
        return None
    frame = _jpeg_frame(content)
    if frame is None or (frame.components, frame.turned) != (3, False) or not all(frame[:2]):
        return None
    return frame[:2]


def is_cut(content: bytes | memoryview) -> bool:
    """Whether zeros stand where a JPEG would end, which libjpeg takes for the codes of its pixels."""
    if not len(content) or content[-1] or bytes(content[:2]) != b"\xff\xd8":
        return False
    whole = bytes(content)
    return whole.rfind(b"\xff\xd9") < whole.rfind(b"\xff\xda")  # the end, and the last scan


def may_be_turned(content: bytes | memoryview) -> bool:
    """Whether an image may have EXIF that turns it; certain where it may not."""
    if bytes(content[:2]) == b"\xff\xd8":
        frame = _jpeg_frame(content)
        return frame is None or frame.turned
    # PNG's chunk, WebP's, and TIFF, which EXIF is made of.
    return any(mark in bytes(content) for mark in (b"eXIf", b"EXIF", b"II*\0", b"MM\0*"))


class _Frame(NamedTuple):
    """The first of a JPEG, as its header says; whether EXIF turns it, and its first scan may not be all."""

    height: int
    width: int
    components: int
    turned: bool
    several_scans: bool


def _jpeg_frame(content: bytes | memoryview) -> _Frame | None:
    size: tuple[int, int, int] | None = None
    at, turned, progressive, several_scans = 2, False, False, True
    while at + 10 <= len(content) and content[at] == 0xFF:
        marker = content[at + 1]
        if marker == 0xFF:  # padding before a marker
            at += 1
            continue
        if marker in _STAND_ALONE:
            at += 2
            continue
        end = at + 2 + struct.unpack(">H", content[at + 2 : at + 4])[0]
        if marker in _FRAMES and size is None:
            size, progressive = struct.unpack(">HHB", content[at + 5 : at + 10]), marker in _PROGRESSIVE
        elif marker == _SCAN:
            several_scans = progressive or size is None or content[at + 4] < size[2]
            break
        elif marker == _APP1 and content[at + 4 : at + 10] == b"Exif\0\0":
            turned = turned or _turns(content[at + 10 : end])
        at = end
    return None if size is None else _Frame(*size, turned, several_scans)


def _turns(exif: bytes | memoryview) -> bool:
    """Whether EXIF, a TIFF without an image, asks for another orientation than the stored one, or might."""
    try:
        tags = _tiff_tags(exif, ">" if exif[:2] == b"MM" else "<")
        return any(tag == _ORIENTATION and value != 1 for tag, value in tags)
    except struct.error:
        return True
