"""Encoded images for EchoLoader: decoding, and random resized crops with flip and colour jitter.

    loader = EchoLoader(
        dataset, 256, decode=DecodeImage(), augment=RandomResizedCrop(224, brightness=0.4), num_workers=2
    )

Both release the GIL, so threads run in parallel. They need opencv-python-headless (the extra ``images``),
which decodes JPEG faster than Pillow, to the same pixels.
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
    # EchoLoader needs torch and NumPy only.
    try:
        import cv2
    except ImportError as error:
        raise ImportError(
            f"adaecho.transforms.photographs needs OpenCV: {how_to_install('images')}, or "
            "pip install opencv-python-headless"
        ) from error

# OpenCV logs every image that it can't decode; the error below says the same.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

Image = NDArray[np.uint8]
"""[height, width, 3] in the order red, green, blue."""

# Weights of red, green and blue in the grey of ITU-R BT.601, as in Pillow and torchvision.
GREY = (0.299, 0.587, 0.114)

_TURNED = cv2.IMREAD_COLOR_RGB
_AS_STORED = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_TRIES = 10


@dataclass(frozen=True)
class DecodeImage:
    """``decode`` for encoded images in any format that OpenCV reads.

    Images are rotated by their EXIF orientation. Grey and CMYK images become RGB. All repeats of an image
    share read-only memory. ``torch.from_numpy`` ignores that flag, so an ``augment`` must not write into its
    result.

    Attributes:
        field: position of the image in an example: the key of a dict, the index of a tuple, or None if the
            example is the image. The image is ``bytes``, a one-dimensional uint8 array, or a dict with
            ``bytes``, as in the image columns of the hub.
    """

    field: Any = "image"
    thread_safe: ClassVar[bool] = True

    def __call__(self, example: Any) -> Any:
        """The example with its image decoded, uint8 [height, width, 3], read-only.

        Raises:
            ValueError: the image is corrupt or truncated.
        """
        return _with_field(example, self.field, decode_image(_field(example, self.field)))

    def for_augment(self, augment: Any) -> Callable[[Any], Any]:
        """The faster decoder for images that only ``augment`` reads."""
        decode = decoder_for(augment, self.field)
        return lambda example: _with_field(example, self.field, decode(_field(example, self.field)))


def decoder_for(augment: Any, field: Any) -> "Callable[[Any], Image | EncodedImage]":
    """``decode_for_crop`` if ``augment`` crops the field and nvImageCodec is available."""
    crops = isinstance(augment, RandomResizedCrop | CenterCrop) and augment.field == field
    return decode_for_crop if crops and regions.available() else decode_image


class EncodedImage:
    """A JPEG of shape [height, width, 3] that decodes only the indexed region.

    Args:
        content: uint8 [n], a complete file.
        height, width: in pixels.
    """

    def __init__(self, content: NDArray[np.uint8], height: int, width: int) -> None:
        self._content, self.shape = content, (height, width, 3)

    def __getitem__(self, region: tuple[slice, slice]) -> Image:
        """The pixels of these rows and columns, which must lie within the image.

        Raises:
            ValueError: the image is corrupt.
        """
        rows, columns = region
        size = rows.stop - rows.start, columns.stop - columns.start
        crop = regions.decode_region(self._content, rows.start, columns.start, *size)
        return _decode_whole(self._content)[region] if crop is None else crop


def decode_for_crop(encoded: Any) -> Image | EncodedImage:
    """An ``EncodedImage`` for a complete upright color JPEG, else the decoded image.

    Raises:
        ValueError: the image is corrupt or truncated. A damaged JPEG may raise it only when it is cropped.
    """
    content = _content(encoded)
    size = regions.whole_jpeg_size(content)
    return _decode_whole(content) if size is None else EncodedImage(content, *size)


def decode_image(encoded: Any, *, turned: bool = True) -> Image:
    """Decode one image as ``DecodeImage`` does; with ``turned=False`` its EXIF orientation is ignored."""
    return _decode_whole(_content(encoded), _TURNED if turned else _AS_STORED)


def _content(encoded: Any) -> NDArray[np.uint8]:
    """The bytes of an encoded image, uint8 [n]."""
    if isinstance(encoded, dict):
        encoded = encoded.get("bytes")
    is_array = isinstance(encoded, np.ndarray) and encoded.ndim == 1 and encoded.dtype == np.uint8
    if not is_array and not isinstance(encoded, bytes | bytearray | memoryview):
        raise ValueError(
            f"an encoded image is bytes, not a {type(encoded).__name__}: omit decode= if the source gives "
            "decoded images (uint8 arrays [height, width, 3]), and let the source read files"
        )
    if not len(encoded):
        raise ValueError("contains no image bytes")
    return encoded if is_array else np.frombuffer(encoded, np.uint8)


def _decode_whole(content: NDArray[np.uint8], flags: int = _TURNED) -> Image:
    try:
        image = cv2.imdecode(content, flags)
    except cv2.error as error:  # e.g. more pixels than OpenCV allows
        if error.code == cv2.Error.StsNoMem:  # not a fault of the image
            raise MemoryError(f"too little memory to decode an image: {error.err}") from error
        raise ValueError(f"its {len(content)} bytes can't be decoded: {error}") from error
    if image is None:
        raise ValueError(f"its {len(content)} bytes are not a complete image (corrupt or truncated)")
    # Read-only, so an echo reuses the image without a copy.
    decoded = np.asarray(image, np.uint8)
    decoded.setflags(write=False)
    return decoded


@dataclass(frozen=True)
class RandomResizedCrop:
    """``augment`` for decoded images: random resized crop, horizontal flip, colour jitter; uint8 in and out.

    The crop follows torchvision's RandomResizedCrop. It draws an area uniform in ``scale`` (as a share of the
    image) and a ratio of width to height log-uniform in ``ratio``, up to ten times. If no crop fits, it takes
    the largest central crop of an allowed ratio. The jitter follows torchvision's ColorJitter, with factors
    uniform in [1 - value, 1 + value].

    Brightness b, contrast c and saturation s form one affine map of a pixel x, rounded and clipped to
    [0, 255] once: b (c (s x + (1 - s) g(x)) + (1 - c) m), with g the grey of the pixel and m the mean grey of
    the crop. Without clipping, this equals the three steps in any order. Implementations that round and clip
    after each step differ by one or two grey levels, and by more if an intermediate value leaves [0, 255].

    Attributes:
        size: height and width of the result, in pixels.
        scale, ratio: bounds of the crop's share of the area, and of its width over its height.
        flip: whether to flip half of the crops left to right.
        brightness, contrast, saturation: half-width of the range of each factor; 0: no change.
        antialias: average over the area of each result pixel, as Pillow and torchvision do. False
            interpolates between neighbours, as tf.data does: faster, and rougher if the crop shrinks.
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
        """The example with its image augmented, uint8 [size, size, 3]."""
        image = _field(example, self.field)
        drawn = rng.random(6 + 2 * _TRIES).tolist()
        top, left, height, width = crop_box(
            image.shape[0], image.shape[1], self.scale, self.ratio, drawn[:2], drawn[6:]
        )
        crop = resize(image[top : top + height, left : left + width], self.size, self.antialias)
        spreads = (self.brightness, self.contrast, self.saturation)
        if any(spreads):
            crop = adjust_colours(
                crop, *(1 + s * (2 * u - 1) for s, u in zip(spreads, drawn[3:6], strict=True))
            )
        if self.flip and drawn[2] < 0.5:
            crop = np.asarray(cv2.flip(crop, 1))
        return _with_field(example, self.field, crop)


@dataclass(frozen=True)
class CenterCrop:
    """Center crop for evaluation: ``share`` of the shorter side, resized to ``size`` x ``size`` pixels.

    The default 0.875 corresponds to resizing the shorter side to 256 and cropping 224.
    """

    size: int = 224
    share: float = 0.875
    antialias: bool = True
    field: Any = "image"
    thread_safe: ClassVar[bool] = True

    def __call__(self, example: Any) -> Any:
        """The example with its image cropped, uint8 [size, size, 3]."""
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
    """Top, left, height and width of a crop, in pixels.

    Args:
        height, width: of the image.
        scale, ratio: as in ``RandomResizedCrop``.
        corner: two numbers in [0, 1) for the position of the crop.
        tries: numbers in [0, 1) in pairs, for its area and its ratio.
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
    """Resize to size x size, or to (height, width): bilinear, with antialiasing or without."""
    rows, columns = (size, size) if isinstance(size, int) else size
    if not antialias or (image.shape[0] <= rows and image.shape[1] <= columns):
        return np.asarray(cv2.resize(image, (columns, rows), interpolation=cv2.INTER_LINEAR), np.uint8)
    # torch has a vectorised kernel for uint8 in channels_last, which it recognises by the strides of a batch.
    # NumPy builds the batch: torch would release and reacquire the GIL for each view.
    height, width, channels = image.shape
    strides = (image.size, 1, width * channels, channels)
    batch = np.ndarray((1, channels, height, width), np.uint8, image.copy(), strides=strides)
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(batch), (rows, columns), mode="bilinear", antialias=True
    )
    return np.ascontiguousarray(resized.numpy()[0].transpose(1, 2, 0))


def adjust_colours(image: Image, brightness: float, contrast: float, saturation: float) -> Image:
    """The affine map of ``RandomResizedCrop``."""
    mean_grey = sum(weight * mean for weight, mean in zip(GREY, cv2.mean(image), strict=False))
    red, green, blue = (brightness * contrast * (1 - saturation) * weight for weight in GREY)
    own, offset = brightness * contrast * saturation, brightness * (1 - contrast) * mean_grey
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
