"""Decode a rectangular region of a JPEG on the CPU with nvImageCodec (the extra ``regions``).

The pixels are identical to those of OpenCV.
"""

import contextlib
import io
import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_import = threading.Lock()


def available() -> bool:
    """Return whether nvImageCodec is installed and works."""
    with _import:
        return _decoders() is not None


def decode_region(
    content: NDArray[np.uint8], top: int, left: int, height: int, width: int
) -> NDArray[np.uint8] | None:
    """Decode a rectangular region of a JPEG to uint8 [height, width, 3]; return None if that fails.

    Check the file with ``whole_jpeg_size`` first, because a truncated file causes no error.
    """
    decoders = _decoders()
    assert decoders is not None
    decoded = decoders.decode(content, (top, left, top + height, left + width))
    if decoded is None:
        return None
    image = np.asarray(decoded)
    return image if image.dtype == np.uint8 and image.shape == (height, width, 3) else None


def whole_jpeg_size(content: NDArray[np.uint8]) -> tuple[int, int] | None:
    """Return (height, width) of a JPEG that ``decode_region`` can decode, otherwise None.

    The file must be complete, and have three channels and no EXIF rotation.
    """
    head = content[:4096].tobytes()  # EXIF is the first segment, or comes right after JFIF
    if head[:2] != b"\xff\xd8" or content[-2:].tobytes() != b"\xff\xd9":
        return None
    decoders = _decoders()
    assert decoders is not None
    size = decoders.size(content)
    return None if size is None or (b"Exif\0\0" in head and _is_turned(content)) else size


def _is_turned(content: NDArray[np.uint8]) -> bool:
    from PIL import ExifTags, Image

    try:
        with Image.open(io.BytesIO(content.data)) as image:  # this reads only the header
            return bool(image.getexif().get(ExifTags.Base.Orientation, 1) != 1)
    except Exception:  # if Pillow cannot read the header, OpenCV will report the error
        return True


class _Decoders(threading.local):
    """A JPEG decoder for each thread, which decodes in the calling thread without the GIL."""

    def __init__(self, nvimgcodec: Any) -> None:
        self._library = nvimgcodec
        # Use only the CPU, because nvImageCodec 0.9 decodes wrong regions on GPUs.
        self._decoder = nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
            backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
            max_num_cpu_threads=1,
        )
        self._params = nvimgcodec.DecodeParams(
            apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB
        )

    def size(self, content: NDArray[np.uint8]) -> tuple[int, int] | None:
        try:
            stream = self._library.CodeStream(content)
            return (stream.height, stream.width) if stream.num_channels == 3 else None
        except RuntimeError:  # the header is damaged
            return None

    def decode(self, content: NDArray[np.uint8], corners: tuple[int, int, int, int]) -> Any:
        stream = self._library.CodeStream(content)
        part = stream.get_sub_code_stream(region=self._library.Region(*corners))
        return self._decoder.decode(part, params=self._params)


@cache
def _decoders() -> _Decoders | None:
    try:
        with _without_stderr():
            from nvidia import nvimgcodec
        return _Decoders(nvimgcodec)
    except (ImportError, AttributeError, RuntimeError):  # nvImageCodec is missing or unusable
        return None


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Hide stderr, because nvImageCodec prints a line for each missing GPU library."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
