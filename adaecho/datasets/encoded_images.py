"""Encoded images to arrays: many small ones at once."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from adaecho.transforms.photographs import decode_image

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
            except ValueError as error:
                bad.append((index, str(error).strip()))
        return bad

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        chunks = threads.map(decode_chunk, range(0, len(encoded), _CHUNK))
        return images, [bad for chunk in chunks for bad in chunk]


def _decode(encoded: bytes | None, side: int) -> NDArray[np.uint8]:
    # Unlike Pillow, OpenCV checks PNG checksums to the end; both give the same pixels for whole images.
    image = decode_image(encoded)
    if image.shape[:2] != (side, side):
        height, width = image.shape[:2]
        raise ValueError(f"the image has {height}x{width} pixels, {side}x{side} are needed")
    return image
