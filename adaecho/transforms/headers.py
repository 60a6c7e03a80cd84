"""The size of an encoded image from its header alone, before anything is decoded."""

import struct

# Pillow's limit: an image of more pixels is an attack or a mistake. Decoded it would take 512 MiB.
MAX_PIXELS = 178_956_970

# JPEG markers that begin a frame: SOF0 to SOF15, without DHT (C4), JPG (C8) and DAC (CC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_STAND_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})


def encoded_size(content: bytes | memoryview) -> tuple[int, int] | None:
    """Height and width in pixels of a JPEG, PNG or GIF; None for other kinds and for damaged headers."""
    head = bytes(content[:32])
    if head.startswith(b"\xff\xd8"):
        frame = _jpeg_frame(content)
        return None if frame is None else frame[:2]
    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(head) >= 24:
        width, height = struct.unpack(">II", head[16:24])
        return height, width
    if head.startswith((b"GIF87a", b"GIF89a")) and len(head) >= 10:
        width, height = struct.unpack("<HH", head[6:10])
        return height, width
    return None


def whole_jpeg_size(content: bytes | memoryview) -> tuple[int, int] | None:
    """Height and width of a JPEG with three components that ends as one; None for anything else."""
    if bytes(content[:2]) != b"\xff\xd8" or bytes(content[-2:]) != b"\xff\xd9":
        return None
    frame = _jpeg_frame(content)
    return None if frame is None or frame[2] != 3 or not all(frame) else frame[:2]


def _jpeg_frame(content: bytes | memoryview) -> tuple[int, int, int] | None:
    """Height, width and number of components, as the first frame's header says."""
    at = 2
    while at + 10 <= len(content):
        if content[at] != 0xFF:
            return None
        marker = content[at + 1]
        if marker == 0xFF:  # padding before a marker
            at += 1
        elif marker in _STAND_ALONE:
            at += 2
        elif marker in _FRAMES:
            height, width, components = struct.unpack(">HHB", content[at + 5 : at + 10])
            return height, width, components
        else:
            at += 2 + struct.unpack(">H", content[at + 2 : at + 4])[0]
    return None
