"""Detection data in COCO's schema: the official layout, or any folder with images and annotation files.

T.-Y. Lin et al., "Microsoft COCO: Common Objects in Context", 2014; the schema is described at
https://cocodataset.org/#format-data.
"""

import errno
import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from adaecho.datasets.split import part_in
from adaecho.datasets.storage import SkippedExamples, check_links, identity_of, read_image
from adaecho.errors import DataError, how_they_differ, warn

Part = Literal["train", "val"]
_Annotation = tuple[list[float], int, bool, float]
"""Of one box: x1, y1, x2, y2 in pixels, its label, whether it is a crowd, its area."""

_PARTS = {"train": ("train",), "val": ("val", "valid", "validation")}
MOST_BOXES = 10_000  # of an image: each is held against each of a detector's default boxes
_ANNOTATIONS = (
    "annotations/instances_{part}2017.json",
    "annotations/instances_{part}.json",
    "annotations/{part}.json",
    "{part}/_annotations.coco.json",
    "{part}.json",
)
_IMAGES = ("{part}2017", "{part}", "images/{part}2017", "images/{part}", "images", ".")


@dataclass(frozen=True)
class TrueBoxes:
    """The boxes of one image that are to be found.

    Attributes:
        boxes: float32 [K, 4] as x1, y1, x2, y2 in pixels.
        labels: int64 [K], from 1.
        crowd: bool [K]: a box around many, which is not learned and not counted as missed.
        areas: float64 [K] of the objects in pixels, by which they are small, medium or large.
    """

    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    areas: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DetectionImages:
    """Map-style: the bytes of each image with its boxes, ``{"image", "boxes", "labels", "size"}``.

    Crowds are left out of the examples.

    Attributes:
        categories: their names; label k is the name k - 1.
        files: of each image.
        truths: the boxes of each image, crowds among them.
        sizes: height and width of each image in pixels, as the annotations say.
    """

    categories: list[str]
    files: list[Path]
    truths: list[TrueBoxes]
    sizes: list[tuple[int, int]]
    thread_safe: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> dict[str, Any]:
        truth = self.truths[row]
        return {
            "image": read_image(self.files[row]),
            "boxes": truth.boxes[~truth.crowd],
            "labels": truth.labels[~truth.crowd],
            "size": self.sizes[row],
        }

    def identity(self, row: int) -> str:
        """What tells an image from others, wherever the folder lies."""
        return identity_of(self.files[row])

    def origin(self, row: int) -> str:
        """What to call an image in a message."""
        return str(self.files[row])

    def with_boxes(self) -> "DetectionImages":
        """This split without the images that have no boxes to learn."""
        rows = [row for row, truth in enumerate(self.truths) if not truth.crowd.all()]
        return self.take(rows)

    def first(self, number: int | None) -> "DetectionImages":
        """The first so many images; all of them for None."""
        return self.take(range(len(self))[:number])

    def take(self, rows: Sequence[int]) -> "DetectionImages":
        """Some of the images."""
        return DetectionImages(
            self.categories,
            [self.files[row] for row in rows],
            [self.truths[row] for row in rows],
            [self.sizes[row] for row in rows],
        )


def read_coco(path: str, part: Part, bad: SkippedExamples) -> DetectionImages:
    """One split of a folder in COCO's schema.

    Args:
        path: a folder with ``annotations/instances_train2017.json``, ``train2017/`` and so on, or so named.
        part: "train" or "val".
        bad: takes images without a file, or with more than ``MOST_BOXES``, and boxes that can't be used: of
            no area, outside their image, of an unknown category or image, or listed twice. The rest of their
            image is kept.

    Raises:
        DataError: files are missing or not in the schema, ids of images or categories occur twice, nothing is
            left, or more is bad than the budget allows.
    """
    top = Path(path).expanduser()
    if not top.is_dir():
        raise DataError(f"data.path={path}: there is no such folder")
    file = find_annotations(top, part)
    content = _load(file)
    images = _by_id(content["images"], "images", file)
    # Numbers before texts, should there be both.
    categories = sorted(
        _by_id(content["categories"], "categories", file).items(),
        key=lambda item: (isinstance(item[0], str), item[0]),
    )
    labels = {number: label for label, (number, _) in enumerate(categories, start=1)}
    present = _present(top, part, file, images.values())
    annotations: dict[Any, list[_Annotation]] = {number: [] for number in images}
    seen: set[Any] = set()
    for annotation in content["annotations"]:
        try:
            usable = _usable(annotation, images, labels, seen)
            annotations[annotation["image_id"]].append(usable)
        except ValueError as error:
            bad.add(f"{file}, annotation {_told(annotation.get('id'))}", str(error))
    kept = []
    for number, image in images.items():
        if reason := _useless(image["file_name"], len(annotations[number]), present):
            bad.add(f"{file}, image {_told(number)}", reason)
        else:
            kept.append(number)
    if not kept:
        raise DataError(f"{file}: lists no image that can be used")
    return DetectionImages(
        [str(category["name"]) for _, category in categories],
        [present[images[number]["file_name"]] for number in kept],
        [_as_boxes(annotations[number]) for number in kept],
        [(int(images[number]["height"]), int(images[number]["width"])) for number in kept],
    )


def read_both(path: str, bad: SkippedExamples) -> tuple[DetectionImages, DetectionImages | None]:
    """The training split and, where there is one, the validation split, of the same categories.

    Raises:
        DataError: see ``read_coco``; or the splits have other categories.
    """
    train = read_coco(path, "train", bad)
    top = Path(path).expanduser()
    if not has_split(top, "val"):
        _warn_of_others(top)
        return train, None
    validation = read_coco(path, "val", bad)
    if train.categories != validation.categories:
        raise DataError(
            f"data.path={path}: its two annotation files have other categories: "
            f"{how_they_differ(train.categories, validation.categories)}"
        )
    return train, validation


def _warn_of_others(top: Path) -> None:
    """Warn of lists beside the one for training that are left out, where none is named as for validation."""
    named = [one.relative_to(top) for depth in ("*.json", "*/*.json") for one in sorted(top.glob(depth))]
    others = [str(one) for one in named if part_in(" ".join(one.parts).lower()) in ("validation", "test")]
    if others:
        warn(
            f"data.path={top}: beside the list for training {len(others)} are left out "
            f"({', '.join(others[:3])}), as none is named {', '.join(_PARTS['val'])}; to hold out the images "
            "of one, rename it and their folder so"
        )


def find_annotations(top: Path, part: Part) -> Path:
    """The file that lists one split of a folder.

    Raises:
        DataError: there is none.
    """
    for file in _listed(top, part):
        return file
    raise DataError(
        f"data.path={top}: has no annotations of its {part} split; looked for {', '.join(_names(part))}"
    )


def has_split(top: Path, part: Part) -> bool:
    """Whether a folder has annotations of a split."""
    return bool(_listed(top, part))


def _listed(top: Path, part: Part) -> list[Path]:
    """Its lists of annotations that are there."""
    candidates = [top / name for name in _names(part)]
    check_links(one for file in candidates for one in (file.parent, file))
    return [file for file in candidates if file.is_file()]


def _names(part: Part) -> list[str]:
    return [name.format(part=one) for one in _PARTS[part] for name in _ANNOTATIONS]


def _told(value: Any) -> str:
    """A value of a file, of any size, for a message."""
    shown = reprlib.Repr()
    shown.maxstring = shown.maxlong = shown.maxother = 200
    return shown.repr(value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """A number, nan for anything else: a text, true, or one beyond all floats."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def _is_size(value: Any) -> bool:
    return 1 <= _number(value) < 1 << 31


def _is_inside(value: Any) -> bool:
    """Whether it names a file, and none elsewhere: annotations may be anyone's."""
    return isinstance(value, str) and value[:1] not in ("", "/") and ".." not in PurePosixPath(value).parts


_ID, _SIZE = (_is_id, "number or text"), (_is_size, "number of pixels")
_NAME = (_is_inside, "name of a file within the folder of images")
# What the entries of each list hold. An annotation that holds something else is skipped, and its image kept.
_SCHEMA: dict[str, dict[str, tuple[Callable[[Any], bool], str] | None]] = {
    "images": {"id": _ID, "file_name": _NAME, "height": _SIZE, "width": _SIZE},
    "annotations": {"image_id": None, "category_id": None, "bbox": None},
    "categories": {"id": _ID, "name": None},
}


def _load(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: is no JSON ({error}); copy it anew") from error
    for key, fields in _SCHEMA.items():
        entries = content.get(key) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise DataError(f"{file}: is not in COCO's schema: it has no list {key!r}")
        for index, entry in enumerate(entries):
            missing = [name for name in fields if not isinstance(entry, dict) or name not in entry]
            if missing:
                raise DataError(f"{file}: {key}[{index}] has no {' and no '.join(missing)}")
            for name, kind in fields.items():
                if kind is not None and not kind[0](entry[name]):
                    raise DataError(
                        f"{file}: {key}[{index}]: its {name} {_told(entry[name])} is no {kind[1]}"
                    )
    return dict(content)


def _by_id(entries: list[dict[str, Any]], kind: str, file: Path) -> dict[Any, dict[str, Any]]:
    counts = Counter(entry["id"] for entry in entries)
    twice = [number for number, count in counts.items() if count > 1]
    if twice:
        listed = ", ".join(map(str, twice[:5]))
        raise DataError(f"{file}: {kind} with the same id: {listed}; it can't be told what belongs to which")
    return {entry["id"]: entry for entry in entries}


def _present(top: Path, part: Part, file: Path, images: Any) -> dict[str, Path]:
    """The path of each listed file, in the folder that has most of them; of equals that beside the list."""
    names = {image["file_name"] for image in images}
    present: dict[str, Path] = {}
    for folder in [file.parent, *(top / name.format(part=one) for one in _PARTS[part] for name in _IMAGES)]:
        if folder.is_dir() and len(present) < len(names):
            found = {name: folder / name for name in names if _is_there(folder / name)}
            present = max(present, found, key=len)
    return present


def _useless(name: str, boxes: int, present: dict[str, Path]) -> str:
    """Why an image can't be used; nothing where it can."""
    if name not in present:
        return f"its file {name[:200]} is missing"
    return "" if boxes <= MOST_BOXES else f"it has {boxes:,} boxes, and at most {MOST_BOXES:,} are learned"


def _is_there(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def _usable(
    annotation: dict[str, Any], images: dict[Any, dict[str, Any]], labels: dict[Any, int], seen: set[Any]
) -> _Annotation:
    """An annotation, its box clipped to its image.

    Raises:
        ValueError: why it can't be used.
    """
    for name in ("id", "image_id", "category_id"):
        if annotation.get(name) is not None and not _is_id(annotation[name]):
            raise ValueError(f"its {name} {_told(annotation[name])} is no number or text")
    number = annotation.get("id")
    if number is not None and number in seen:
        raise ValueError("another annotation has the same id")
    seen.add(number)
    image = images.get(annotation["image_id"])
    if image is None:
        raise ValueError(f"its image {_told(annotation['image_id'])} is not listed")
    if annotation["category_id"] not in labels:
        raise ValueError(f"its category {_told(annotation['category_id'])} is not listed")
    bbox, area, crowd = annotation["bbox"], annotation.get("area"), annotation.get("iscrowd")
    if not isinstance(bbox, list) or len(bbox) != 4 or not all(map(math.isfinite, map(_number, bbox))):
        raise ValueError(f"its bbox {_told(bbox)} is not four numbers x, y, width, height")
    x, y, width, height = map(_number, bbox)
    if width <= 0 or height <= 0:
        raise ValueError(f"its bbox {_told(bbox)} has no area")
    if area is not None and not 0 <= _number(area) < math.inf:
        raise ValueError(f"its area {_told(area)} is no number of pixels")
    if crowd not in (0, 1, None):
        raise ValueError(f"its iscrowd {_told(crowd)} is neither 0 nor 1")
    x1, y1 = max(x, 0.0), max(y, 0.0)
    x2, y2 = min(x + width, float(image["width"])), min(y + height, float(image["height"]))
    if x2 <= x1 or y2 <= y1:
        size = f"{image['width']}x{image['height']}"
        raise ValueError(f"its bbox {_told(bbox)} lies outside its image of {size}")
    area = (x2 - x1) * (y2 - y1) if area is None else float(area)
    return [x1, y1, x2, y2], labels[annotation["category_id"]], bool(crowd), area


def _as_boxes(found: list[_Annotation]) -> TrueBoxes:
    return TrueBoxes(
        np.array([box for box, *_ in found], np.float32).reshape(-1, 4),
        np.array([label for _, label, *_ in found], np.int64),
        np.array([crowd for _, _, crowd, _ in found], np.bool_),
        np.array([area for *_, area in found], np.float64),
    )
