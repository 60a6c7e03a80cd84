"""Transforms for EchoLoader that decode images, and that crop, flip and jitter them at random::

    loader = EchoLoader(
        dataset, 256, decode=DecodeImage(), augment=RandomResizedCrop(224, brightness=0.4), num_workers=2
    )

They need opencv-python-headless (the extra ``images``) and run in parallel in threads.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from adaecho.errors import how_to_install
from adaecho.transforms import regions

if TYPE_CHECKING:
    import cv2
else:
    # OpenCV is optional, because EchoLoader itself needs only torch and NumPy.
    try:
        import cv2
    except ImportError as error:
        raise ImportError(
            f"adaecho.transforms.photographs needs OpenCV: {how_to_install('images')}, or "
            "pip install opencv-python-headless"
        ) from error

# Silence OpenCV's log, because we raise an error for each image that OpenCV cannot decode.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

Image = NDArray[np.uint8]
"""uint8 [height, width, 3], with the channels in the order red, green, blue."""

# The weights of red, green and blue in a gray value, from ITU-R BT.601 as in Pillow and torchvision.
GRAY = (0.299, 0.587, 0.114)

_TURNED = cv2.IMREAD_COLOR_RGB
_AS_STORED = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_TRIES = 10


@dataclass(frozen=True)
class DecodeImage:
    """A ``decode`` function for encoded images in any format that OpenCV reads.

    Images are rotated according to EXIF and converted to RGB. All repeats of an image share the same memory,
    so an ``augment`` function must not write into it.

    Attributes:
        field: where an example contains the image: the key of a dict, the index of a tuple, or None if the
            example itself is the image. The image is ``bytes``, a one-dimensional uint8 array, or a dict with
            the key ``bytes``, as in datasets of the Hugging Face Hub.
    """

    field: Any = "image"
    thread_safe: ClassVar[bool] = True

    def __call__(self, example: Any) -> Any:
        """Return the example with its image decoded: uint8 [height, width, 3], read-only.

        Raises:
            ValueError: the image is corrupt or truncated.
        """
        return _with_field(example, self.field, decode_image(_field(example, self.field)))

    def for_augment(self, augment: Any) -> Callable[[Any], Any]:
        """Return a faster decoder for images that only ``augment`` reads.

        If ``augment`` is a ``RandomResizedCrop`` or a ``CenterCrop``, the faster decoder leaves a JPEG image
        encoded, and the crop decodes only its own part of the image. This needs nvImageCodec. In all other
        cases, the decoder decodes the whole image, as this one does.
        """
        decode = decoder_for(augment, self.field)
        return lambda example: _with_field(example, self.field, decode(_field(example, self.field)))


def decoder_for(augment: Any, field: Any) -> "Callable[[Any], Image | EncodedImage]":
    """Return the fastest decoder for images that only ``augment`` reads."""
    crops = isinstance(augment, RandomResizedCrop | CenterCrop) and augment.field == field
    return decode_for_crop if crops and regions.available() else decode_image


class EncodedImage:
    """A JPEG that is decoded lazily: ``image[top:bottom, left:right]`` decodes only this region.

    Its ``shape`` is (height, width, 3) of the whole image.
    """

    def __init__(self, content: NDArray[np.uint8], height: int, width: int) -> None:
        self._content, self.shape = content, (height, width, 3)

    def __getitem__(self, region: tuple[slice, slice]) -> Image:
        """Decode a rectangular region of the image to uint8 [rows, columns, 3].

        Both slices need a start and a stop. Raise ValueError if the image is corrupt.
        """
        rows, columns = region
        size = rows.stop - rows.start, columns.stop - columns.start
        crop = regions.decode_region(self._content, rows.start, columns.start, *size)
        return _decode_whole(self._content)[region] if crop is None else crop


def decode_for_crop(encoded: Any) -> Image | EncodedImage:
    """Return an image whose pixels are decoded only when a part of it is cropped."""
    # Images whose parts cannot be decoded separately are decoded now. A corrupt image raises ValueError,
    # either here or when it is cropped.
    content = _content(encoded)
    size = regions.whole_jpeg_size(content)
    return _decode_whole(content) if size is None else EncodedImage(content, *size)


def decode_image(encoded: Any, *, turned: bool = True) -> Image:
    """Decode an image to RGB, uint8 [height, width, 3]. ``turned=False`` ignores its EXIF rotation."""
    return _decode_whole(_content(encoded), _TURNED if turned else _AS_STORED)


def _content(encoded: Any) -> NDArray[np.uint8]:
    """Return the bytes of an encoded image, uint8 [n]."""
    if isinstance(encoded, dict):
        encoded = encoded.get("bytes")
    is_array = isinstance(encoded, np.ndarray) and encoded.ndim == 1 and encoded.dtype == np.uint8
    if not is_array and not isinstance(encoded, bytes | bytearray | memoryview):
        raise ValueError(
            f"an encoded image must be bytes, not a {type(encoded).__name__}: omit decode= if the source "
            "gives decoded images (uint8 arrays [height, width, 3]), and let the source read files"
        )
    if not len(encoded):
        raise ValueError("contains no image bytes")
    return encoded if is_array else np.frombuffer(encoded, np.uint8)


def _decode_whole(content: NDArray[np.uint8], flags: int = _TURNED) -> Image:
    try:
        image = cv2.imdecode(content, flags)
    except cv2.error as error:  # for example, the image has more pixels than OpenCV allows
        if error.code == cv2.Error.StsNoMem:  # the image may be fine
            raise MemoryError(f"too little memory to decode an image: {error.err}") from error
        raise ValueError(f"its {len(content)} bytes cannot be decoded: {error}") from error
    if image is None:
        raise ValueError(f"its {len(content)} bytes are not a complete image (corrupt or truncated)")
    # The image is read-only, so that its repeats can share it without a copy.
    decoded = np.asarray(image, np.uint8)
    decoded.setflags(write=False)
    return decoded


@dataclass(frozen=True)
class RandomResizedCrop:
    """An ``augment`` function for uint8 images: random resized crop, horizontal flip and color jitter.

    The crop follows torchvision's RandomResizedCrop. The area is uniform in ``scale``, and the ratio of width
    to height log-uniform in ``ratio``.

    The jitter follows torchvision's ColorJitter, with factors uniform in [1 - value, 1 + value]. The factors
    b of brightness, c of contrast and s of saturation map a pixel x to::

        b (c (s x + (1 - s) g(x)) + (1 - c) m)

    Here g(x) is the gray value of the pixel, and m is the mean gray value of the crop. The result is rounded
    and clipped to [0, 255] only once.

    Attributes:
        size: height and width of the result, in pixels.
        scale: range of the crop's area, as a fraction of the image's area.
        ratio: range of the crop's width divided by its height.
        flip: whether to flip half of the crops left to right.
        brightness, contrast, saturation: half the width of the range of each factor; 0 means no change.
        antialias: if true, average over the area that each result pixel covers, as Pillow and torchvision do.
            If false, interpolate between neighboring pixels, as tf.data does, which is faster, but rougher if
            the crop shrinks.
        field: as in ``DecodeImage``.

    Raises:
        ValueError: an attribute is out of range.
    """

    size: int = 224
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    antialias: bool = True
    field: Any = "image"
    thread_safe: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size}: must be at least 1")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale={self.scale}: must be (low, high) with 0 < low <= high <= 1")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio={self.ratio}: must be (low, high) with 0 < low <= high")
        for name in ("brightness", "contrast", "saturation"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must lie in [0, 1]")

    def __call__(self, example: Any, rng: np.random.Generator) -> Any:
        """Return the example with its image augmented: uint8 [size, size, 3]."""
        image = _field(example, self.field)
        drawn = rng.random(6 + 2 * _TRIES).tolist()
        top, left, height, width = crop_box(
            image.shape[0], image.shape[1], self.scale, self.ratio, drawn[:2], drawn[6:]
        )
        crop = resize(image[top : top + height, left : left + width], self.size, self.antialias)
        spreads = (self.brightness, self.contrast, self.saturation)
        if any(spreads):
            crop = adjust_colors(
                crop, *(1 + s * (2 * u - 1) for s, u in zip(spreads, drawn[3:6], strict=True))
            )
        if self.flip and drawn[2] < 0.5:
            crop = np.asarray(cv2.flip(crop, 1))
        return _with_field(example, self.field, crop)


@dataclass(frozen=True)
class CenterCrop:
    """A center crop for evaluation: a square with ``share`` of the shorter side, resized to ``size``."""

    size: int = 224
    share: float = 0.875
    antialias: bool = True
    field: Any = "image"
    thread_safe: ClassVar[bool] = True

    def __call__(self, example: Any) -> Any:
        """Return the example with its image cropped: uint8 [size, size, 3]."""
        image = _field(example, self.field)
        height, width = image.shape[:2]
        side = max(round(self.share * min(height, width)), 1)
        top, left = (height - side) // 2, (width - side) // 2
        crop = resize(image[top : top + side, left : left + side], self.size, self.antialias)
        return _with_field(example, self.field, crop)


def crop_box(
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    corner: Sequence[float],
    tries: Sequence[float],
) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random crop, in pixels.

    If no random size fits into the image, return the largest centered crop with a ratio in the given range.

    Args:
        scale, ratio: as in ``RandomResizedCrop``.
        corner: two random numbers in [0, 1), for the position of the crop.
        tries: random numbers in [0, 1), two for the area and ratio of each attempt.
    """
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for for_area, for_ratio in zip(tries[::2], tries[1::2], strict=True):
        area = height * width * (scale[0] + for_area * (scale[1] - scale[0]))
        aspect = math.exp(log_low + for_ratio * (log_high - log_low))
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(corner[0] * (height - crop_height + 1))
            left = int(corner[1] * (width - crop_width + 1))
            return top, left, crop_height, crop_width
    aspect = min(max(width / height, ratio[0]), ratio[1])
    crop_width, crop_height = min(width, round(height * aspect)), min(height, round(width / aspect))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def resize(image: Image, size: int | tuple[int, int], antialias: bool) -> Image:
    """Resize an image bilinearly. The image is uint8 [height, width, 3].

    Args:
        size: side of a square result, or height and width of the result, in pixels.
        antialias: as in ``RandomResizedCrop``.
    """
    rows, columns = (size, size) if isinstance(size, int) else size
    if not antialias or (image.shape[0] <= rows and image.shape[1] <= columns):
        return np.asarray(cv2.resize(image, (columns, rows), interpolation=cv2.INTER_LINEAR), np.uint8)
    # torch has a vectorized kernel for uint8 in channels_last format, which it recognizes by the strides of a
    # batch. NumPy builds the batch, because torch would release and reacquire the GIL for each view.
    height, width, channels = image.shape
    strides = (image.size, 1, width * channels, channels)
    batch = np.ndarray((1, channels, height, width), np.uint8, image.copy(), strides=strides)
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(batch), (rows, columns), mode="bilinear", antialias=True
    )
    return np.ascontiguousarray(resized.numpy()[0].transpose(1, 2, 0))


def adjust_colors(image: Image, brightness: float, contrast: float, saturation: float) -> Image:
    """Scale brightness, contrast and saturation by factors, with the formula in ``RandomResizedCrop``."""
    mean_gray = sum(weight * mean for weight, mean in zip(GRAY, cv2.mean(image), strict=False))
    red, green, blue = (brightness * contrast * (1 - saturation) * weight for weight in GRAY)
    own, offset = brightness * contrast * saturation, brightness * (1 - contrast) * mean_gray
    matrix = np.tile([red, green, blue, offset], (3, 1)) + own * np.eye(3, 4)
    return np.asarray(cv2.transform(image, matrix), np.uint8)


def _field(example: Any, field: Any) -> Any:
    try:
        return example if field is None else example[field]
    except (KeyError, IndexError, TypeError) as error:
        has = f"keys {', '.join(map(repr, example))}" if isinstance(example, dict) else type(example).__name__
        raise ValueError(
            f"field={field!r}: the example has no such field ({has}); set field= to the key of a dict, the "
            "index of a tuple, or None if the example is the image"
        ) from error


def _with_field(example: Any, field: Any, value: Any) -> Any:
    if field is None:
        return value
    if isinstance(example, tuple):
        return tuple(value if index == field else part for index, part in enumerate(example))
    return {**example, field: value}
