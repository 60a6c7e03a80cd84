"""Detection data in COCO's schema: the official layout, or any folder with images and annotation files.

T.-Y. Lin et al., "Microsoft COCO: Common Objects in Context", 2014; the schema is described at
https://cocodataset.org/#format-data.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import DataError, how_they_differ

Part = Literal["train", "val"]
_Annotation = tuple[list[float], int, bool, float]
"""Of one box: x1, y1, x2, y2 in pixels, its label, whether it is a crowd, its area."""

_PARTS = {"train": ("train",), "val": ("val", "valid", "validation")}
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
            "image": self.files[row].read_bytes(),
            "boxes": truth.boxes[~truth.crowd],
            "labels": truth.labels[~truth.crowd],
            "size": self.sizes[row],
        }

    def origin(self, row: int) -> str:
        """What to call an image in a message."""
        return str(self.files[row])

    def with_boxes(self) -> "DetectionImages":
        """This split without the images that have no boxes to learn."""
        return self.take([row for row, truth in enumerate(self.truths) if not truth.crowd.all()])

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


def read_both(path: str, bad: SkippedExamples) -> tuple[DetectionImages, DetectionImages | None, list[Path]]:
    """The training split, the validation split where there is one, and the files that list them.

    Args:
        path: a folder with ``annotations/instances_train2017.json``, ``train2017/`` and so on, or so named.
        bad: takes images without a file, and boxes that can't be used: of no area, outside their image, or of
            an unknown category or image. The rest of their image is kept.

    Raises:
        DataError: files are missing or not in the schema, nothing is left, more is bad than the budget
            allows, or the splits have other categories.
    """
    top = Path(path).expanduser()
    if not top.is_dir():
        raise DataError(f"data.path={path}: there is no such folder")
    lists = {part: _list_of(top, part) for part in _PARTS}
    if lists["train"] is None:
        looked_for = ", ".join(name.format(part="train") for name in _ANNOTATIONS)
        raise DataError(f"data.path={path}: has no annotations of its train split; looked for {looked_for}")
    found = {part: _read(top, part, file, bad) for part, file in lists.items() if file is not None}  # type: ignore[arg-type]
    train, validation = found["train"], found.get("val")
    if validation is not None and train.categories != validation.categories:
        raise DataError(
            f"data.path={path}: its two annotation files have other categories: "
            f"{how_they_differ(train.categories, validation.categories)}"
        )
    return train, validation, [file for file in lists.values() if file is not None]


def _list_of(top: Path, part: str) -> Path | None:
    names = [name.format(part=one) for one in _PARTS[part] for name in _ANNOTATIONS]
    return next((top / name for name in names if (top / name).is_file()), None)


def _read(top: Path, part: Part, file: Path, bad: SkippedExamples) -> DetectionImages:
    try:
        content = json.loads(file.read_bytes())
        images = {
            image["id"]: (image["file_name"], image["height"], image["width"]) for image in content["images"]
        }
        # By number, as COCO's own ids have gaps.
        categories = {
            one["id"]: str(one["name"]) for one in sorted(content["categories"], key=lambda one: one["id"])
        }
        listed = [(one["image_id"], one["category_id"], one) for one in content["annotations"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: is not in COCO's schema ({type(error).__name__}: {error})") from error
    labels = {number: label for label, number in enumerate(categories, start=1)}
    annotations: dict[Any, list[_Annotation]] = {number: [] for number in images}
    for image, category, annotation in listed:
        try:
            if image not in images or category not in labels:
                raise ValueError(f"its image {image} or its category {category} is not listed")
            annotations[image].append(_usable(annotation, labels[category], *images[image][1:]))
        except (ValueError, TypeError) as error:
            bad.add(f"{file}, annotation {annotation.get('id')}", str(error))
    present = _present(top, part, file, {name for name, *_ in images.values()})
    for number, (name, *_) in images.items():
        if name not in present:
            bad.add(f"{file}, image {number}", f"its file {name} is missing")
    kept = [number for number, (name, *_) in images.items() if name in present]
    if not kept:
        raise DataError(f"{file}: lists no image that can be used")
    return DetectionImages(
        list(categories.values()),
        [present[images[number][0]] for number in kept],
        [_as_boxes(annotations[number]) for number in kept],
        [(int(images[number][1]), int(images[number][2])) for number in kept],
    )


def _present(top: Path, part: Part, file: Path, names: set[str]) -> dict[str, Path]:
    """The path of each listed file, in the folder that has most of them; of equals that beside the list."""
    present: dict[str, Path] = {}
    for folder in [file.parent, *(top / name.format(part=one) for one in _PARTS[part] for name in _IMAGES)]:
        if folder.is_dir() and len(present) < len(names):
            found = {name: folder / name for name in names if (folder / name).is_file()}
            present = max(present, found, key=len)
    return present


def _usable(annotation: dict[str, Any], label: int, height: float, width: float) -> _Annotation:
    """An annotation, its box clipped to its image.

    Raises:
        ValueError: why it can't be used.
    """
    x, y, box_width, box_height = map(float, annotation["bbox"])
    x1, y1, x2, y2 = (
        max(x, 0.0),
        max(y, 0.0),
        min(x + box_width, float(width)),
        min(y + box_height, float(height)),
    )
    if not (box_width > 0 and box_height > 0 and x1 < x2 and y1 < y2):
        raise ValueError(f"its bbox {annotation['bbox']} has no area within its image of {width}x{height}")
    area = annotation.get("area")
    area = (x2 - x1) * (y2 - y1) if area is None else float(area)
    return [x1, y1, x2, y2], label, bool(annotation.get("iscrowd")), area


def _as_boxes(found: list[_Annotation]) -> TrueBoxes:
    return TrueBoxes(
        np.array([box for box, *_ in found], np.float32).reshape(-1, 4),
        np.array([label for _, label, *_ in found], np.int64),
        np.array([crowd for _, _, crowd, _ in found], np.bool_),
        np.array([area for *_, area in found], np.float64),
    )
