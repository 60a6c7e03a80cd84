"""Encoded images for EchoLoader: decoding, and random resized crops with flip and colour jitter.

    loader = EchoLoader(
        dataset, 256, decode=DecodeImage(), augment=RandomResizedCrop(224, brightness=0.4), num_workers=2
    )

Both release the interpreter's lock while they work, so that threads run side by side. They need
opencv-python-headless (the extra ``images``), which decodes JPEG to Pillow's pixels in less time.
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
    # EchoLoader itself needs torch and NumPy alone.
    try:
        import cv2
    except ImportError as error:
        raise ImportError(
            f"adaecho.transforms.photographs needs OpenCV: {how_to_install('images')}, or "
            "pip install opencv-python-headless"
        ) from error

# It prints some lines for each image that it can't decode, of which the error here tells.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

Image = NDArray[np.uint8]
"""[height, width, 3], red, green, blue."""

# Weights of red, green and blue in the grey of ITU-R BT.601, which Pillow and torchvision use.
GREY = (0.299, 0.587, 0.114)

_TURNED = cv2.IMREAD_COLOR_RGB
_AS_STORED = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_TRIES = 10


@dataclass(frozen=True)
class DecodeImage:
    """``decode`` for encoded images in any format that OpenCV reads.

    Images are turned as their EXIF says, and grey or CMYK ones become RGB. All repeats of an image share its
    read-only memory: an ``augment`` must not write into ``torch.from_numpy`` of it, which ignores that.

    Attributes:
        field: where the image lies in an example, a dict's key or a tuple's index; None where the example is
            the image. It is ``bytes``, a one-dimensional uint8 array, or a dict with ``bytes``, as the hub's
            image columns have it.
    """

    field: Any = "image"
    thread_safe: ClassVar[bool] = True

    def __call__(self, example: Any) -> Any:
        """The example with its image decoded, uint8 [height, width, 3], read-only.

        Raises:
            ValueError: the bytes are no whole image.
        """
        return _with_field(example, self.field, decode_image(_field(example, self.field)))

    def for_augment(self, augment: Any) -> Callable[[Any], Any]:
        """What decodes in place of this where nothing but ``augment`` will see the images."""
        decode = decoder_for(augment, self.field)
        return lambda example: _with_field(example, self.field, decode(_field(example, self.field)))


def decoder_for(augment: Any, field: Any) -> "Callable[[Any], Image | EncodedImage]":
    """``decode_for_crop`` where ``augment`` crops that field first and regions can be decoded here."""
    crops = isinstance(augment, RandomResizedCrop | CentreCrop) and augment.field == field
    return decode_for_crop if crops and regions.available() else decode_image


class EncodedImage:
    """A JPEG that is indexed as its pixels are, [height, width, 3], for one crop: only that is decoded.

    Args:
        content: uint8 [n], a whole file.
        height, width: in pixels.
    """

    def __init__(self, content: NDArray[np.uint8], height: int, width: int) -> None:
        self._content, self.shape = content, (height, width, 3)

    def __getitem__(self, region: tuple[slice, slice]) -> Image:
        """The pixels of these rows and columns, which must lie within.

        Raises:
            ValueError: they can't be decoded.
        """
        rows, columns = region
        size = rows.stop - rows.start, columns.stop - columns.start
        crop = regions.decode_region(self._content, rows.start, columns.start, *size)
        return _decode_whole(self._content)[region] if crop is None else crop


def decode_for_crop(encoded: Any) -> Image | EncodedImage:
    """One image, not yet decoded where its regions can be: a JPEG in colours, with its end, not turned.

    Raises:
        ValueError: the bytes are no whole image; for a damaged JPEG perhaps only when it is cropped.
    """
    content = _content(encoded)
    size = regions.whole_jpeg_size(content)
    return _decode_whole(content) if size is None else EncodedImage(content, *size)


def decode_image(encoded: Any, *, turned: bool = True) -> Image:
    """One image as ``DecodeImage`` gives it, or as its pixels are stored, whatever its EXIF says."""
    return _decode_whole(_content(encoded), _TURNED if turned else _AS_STORED)


def _content(encoded: Any) -> NDArray[np.uint8]:
    """The bytes of an encoded image, uint8 [n]."""
    if isinstance(encoded, dict):
        encoded = encoded.get("bytes")
    is_array = isinstance(encoded, np.ndarray) and encoded.ndim == 1 and encoded.dtype == np.uint8
    if not is_array and not isinstance(encoded, bytes | bytearray | memoryview):
        raise ValueError(
            f"an encoded image is bytes, not a {type(encoded).__name__}: leave decode= out where it is "
            "decoded already (a uint8 array [height, width, 3]), and let the source read files"
        )
    if not len(encoded):
        raise ValueError("it holds no image bytes")
    return encoded if is_array else np.frombuffer(encoded, np.uint8)


def _decode_whole(content: NDArray[np.uint8], flags: int = _TURNED) -> Image:
    try:
        image = cv2.imdecode(content, flags)
    except cv2.error as error:  # e.g. more pixels than OpenCV allows
        if error.code == cv2.Error.StsNoMem:  # says nothing about the image
            raise MemoryError(f"too little memory to decode an image: {error.err}") from error
        raise ValueError(f"its {len(content)} bytes can't be decoded: {error}") from error
    if image is None:
        raise ValueError(f"its {len(content)} bytes are no whole image (corrupt or truncated)")
    # NumPy won't write into it, so an echo hands it out again without a copy. torch would: see DecodeImage.
    decoded = np.asarray(image, np.uint8)
    decoded.setflags(write=False)
    return decoded


@dataclass(frozen=True)
class RandomResizedCrop:
    """``augment`` for decoded images: random resized crop, horizontal flip, colour jitter; uint8 in and out.

    The crop follows torchvision's RandomResizedCrop: up to ten tries of an area uniform in ``scale`` (of the
    image's) and a ratio of width to height log-uniform in ``ratio``, then the largest central crop of an
    allowed ratio. The jitter follows its ColorJitter, with factors uniform in [1 - value, 1 + value].

    Brightness b, contrast c and saturation s are applied as one affine map of a pixel x, rounded and clipped
    to [0, 255] once: b (c (s x + (1 - s) g(x)) + (1 - c) m), with g the grey of the pixel and m the mean grey
    of the crop. Without clipping this is what the three do one after another, in any order.
    Implementations that clip and round after each step differ by a grey level or two, and by more where an
    intermediate value leaves [0, 255] and a later step would bring it back.

    Attributes:
        size: height and width of the result, in pixels.
        scale, ratio: bounds of the crop's share of the area, and of its width over its height.
        flip: whether to flip half of the crops left to right.
        brightness, contrast, saturation: half-width of the range of each factor; 0 leaves it alone.
        antialias: average over what a pixel of the result covers, as Pillow and torchvision do; False
            interpolates between neighbours, as tf.data does: faster, and rougher where crops shrink.
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
        if self.brightness or self.contrast or self.saturation:
            brightness, contrast, saturation = (
                1 + spread * (2 * number - 1)
                for spread, number in zip(
                    (self.brightness, self.contrast, self.saturation), drawn[3:6], strict=True
                )
            )
            crop = adjust_colours(crop, brightness, contrast, saturation)
        if self.flip and drawn[2] < 0.5:
            crop = np.asarray(cv2.flip(crop, 1))
        return _with_field(example, self.field, crop)


@dataclass(frozen=True)
class CentreCrop:
    """Center crop for evaluation: ``share`` of the shorter side, resized to ``size`` x ``size`` pixels.

    At 0.875 it is what others take by resizing the shorter side to 256 and cropping 224.
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
        corner: two numbers in [0, 1) that place the crop.
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
    """Resize to size x size, or to (height, width); bilinear, averaging where the image shrinks or not."""
    rows, columns = (size, size) if isinstance(size, int) else size
    if not antialias or (image.shape[0] <= rows and image.shape[1] <= columns):
        return np.asarray(cv2.resize(image, (columns, rows), interpolation=cv2.INTER_LINEAR), np.uint8)
    # torch's kernel is vectorised for uint8 with interleaved channels: to see that they are, it needs the
    # strides of a whole batch. It would copy a crop anyway, and warns of read-only memory. NumPy arranges the
    # axes: unlike torch it keeps the interpreter's lock, for which threads would have to wait each time.
    height, width, channels = image.shape
    strides = (image.size, 1, width * channels, channels)
    batch = np.ndarray((1, channels, height, width), np.uint8, image.copy(), strides=strides)
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(batch), (rows, columns), mode="bilinear", antialias=True
    )
    return np.ascontiguousarray(resized.numpy()[0].transpose(1, 2, 0))


def adjust_colours(image: Image, brightness: float, contrast: float, saturation: float) -> Image:
    """The affine map of ``RandomResizedCrop`` for given factors."""
    mean_grey = sum(weight * mean for weight, mean in zip(GREY, cv2.mean(image), strict=False))
    red, green, blue = (brightness * contrast * (1 - saturation) * weight for weight in GREY)
    own, offset = brightness * contrast * saturation, brightness * (1 - contrast) * mean_grey
    matrix = [
        [red + own, green, blue, offset],
        [red, green + own, blue, offset],
        [red, green, blue + own, offset],
    ]
    return np.asarray(cv2.transform(image, np.array(matrix)), np.uint8)


def _field(example: Any, field: Any) -> Any:
    try:
        return example if field is None else example[field]
    except (KeyError, IndexError, TypeError) as error:
        has = f"keys {', '.join(map(repr, example))}" if isinstance(example, dict) else type(example).__name__
        raise ValueError(
            f"field={field!r}: no such part of an example ({has}); field= is a dict's key, a tuple's index, "
            "or None where the example is the image"
        ) from error


def _with_field(example: Any, field: Any, value: Any) -> Any:
    if field is None:
        return value
    if isinstance(example, tuple):
        return tuple(value if index == field else part for index, part in enumerate(example))
    return {**example, field: value}
