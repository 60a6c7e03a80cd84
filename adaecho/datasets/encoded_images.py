"""Encoded images to arrays: many small ones at once."""

import os
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
from numpy.typing import NDArray

_CHUNK = 500  # images a thread takes at a time


def decode_images(encoded: list[bytes | None], side: int) -> tuple[NDArray[np.uint8], list[tuple[int, str]]]:
    """Decode square RGB images on all cores; OpenCV releases the GIL.

    Args:
        encoded: PNG, WebP, JPEG, ...; None where a row has no bytes.
        side: height and width that every image must have, in pixels.

    Returns:
        uint8 [len(encoded), side, side, 3], and (index, reason) of those that can't be used, in order; their
        pixels are undefined.
    """
    images = np.empty((len(encoded), side, side, 3), np.uint8)

    def decode_chunk(begin: int) -> list[tuple[int, str]]:
        bad = []
        for index in range(begin, min(begin + _CHUNK, len(encoded))):
            try:
                images[index] = _decode(encoded[index], side)
            except (ValueError, cv2.error) as error:
                bad.append((index, str(error).strip()))
        return bad

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        chunks = threads.map(decode_chunk, range(0, len(encoded), _CHUNK))
        return images, [bad for chunk in chunks for bad in chunk]


def _decode(encoded: bytes | None, side: int) -> NDArray[np.uint8]:
    if not encoded:
        raise ValueError("the row holds no image bytes")
    # Unlike Pillow, OpenCV checks PNG checksums to the end; both give the same pixels for whole images.
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if image is None:
        raise ValueError(f"its {len(encoded)} bytes are no whole image (corrupt or truncated)")
    if image.shape[:2] != (side, side):
        height, width = image.shape[:2]
        raise ValueError(f"the image has {height}x{width} pixels, {side}x{side} are needed")
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), np.uint8)
