"""Read object detection data in COCO's format, in the official folder layout or any other.

Source: T.-Y. Lin et al., "Microsoft COCO: Common Objects in Context", 2014. The format is described at
https://cocodataset.org/#format-data.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from adaecho.datasets.storage import BadExampleBudget
from adaecho.errors import DataError, how_they_differ

_SPLITS = {"train": ("train",), "val": ("val", "valid", "validation")}
_ANNOTATIONS = (
    "annotations/instances_{split}2017.json",
    "annotations/instances_{split}.json",
    "annotations/{split}.json",
    "{split}/_annotations.coco.json",
    "{split}.json",
)
_IMAGES = ("{split}2017", "{split}", "images/{split}2017", "images/{split}", "images", ".")


@dataclass(frozen=True)
class GroundTruth:
    """The K annotated boxes of one image.

    Attributes:
        boxes: float32 [K, 4] as x1, y1, x2, y2 in pixels.
        labels: int64 [K], from 1.
        crowd: bool [K], COCO's flag for a box around a crowd of objects, which is not used for training.
        areas: float64 [K], areas of the objects in pixels.
    """

    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    areas: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DetectionImages:
    """A map-style dataset of images with bounding boxes, in COCO's format.

    An example is ``{"image", "boxes", "labels", "size"}``. The image is stored as encoded bytes, and boxes of
    crowds are left out.

    Attributes:
        categories: names of the categories. Label k stands for ``categories[k - 1]``.
        truths: the annotated boxes of each image, including those of crowds.
        sizes: height and width of each image in pixels.
    """

    categories: list[str]
    files: list[Path]
    truths: list[GroundTruth]
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
        """Return the name of an image, for messages."""
        return str(self.files[row])

    def with_boxes(self) -> "DetectionImages":
        """Return the images that have at least one box, not counting boxes of crowds."""
        return self.take([row for row, truth in enumerate(self.truths) if not truth.crowd.all()])

    def take(self, rows: Sequence[int]) -> "DetectionImages":
        """Return a dataset of the images with these indices."""
        columns = ([column[row] for row in rows] for column in (self.files, self.truths, self.sizes))
        return DetectionImages(self.categories, *columns)  # type: ignore[arg-type]


def read_both(path: str, bad: BadExampleBudget) -> tuple[DetectionImages, DetectionImages | None, list[Path]]:
    """Read the training images and, if present, the validation images of a dataset in COCO's format.

    Images whose file is missing are skipped, and so are unusable boxes.

    Args:
        path: a folder with ``annotations/instances_train2017.json``, ``train2017/`` and so on, or with other
            common names.
        bad: collects the skipped images and boxes, and limits their number.

    Returns:
        The training split, the validation split or None, and the paths of the annotation files.
    """
    top = Path(path).expanduser()
    if not top.is_dir():
        raise DataError(f"data.path={path}: there is no such folder")
    lists = {split: file for split in _SPLITS if (file := _annotation_file(top, split)) is not None}
    if "train" not in lists:
        names = ", ".join(name.format(split="train") for name in _ANNOTATIONS)
        raise DataError(f"data.path={path}: has no annotations of a train split; expected one of {names}")
    found = {split: _read(top, split, file, bad) for split, file in lists.items()}
    train, validation = found["train"], found.get("val")
    if validation is not None and train.categories != validation.categories:
        raise DataError(
            f"data.path={path}: the two annotation files have different categories: "
            f"{how_they_differ(train.categories, validation.categories)}"
        )
    return train, validation, list(lists.values())


def _annotation_file(top: Path, split: str) -> Path | None:
    names = [name.format(split=word) for word in _SPLITS[split] for name in _ANNOTATIONS]
    return next((top / name for name in names if (top / name).is_file()), None)


def _read(top: Path, split: str, file: Path, bad: BadExampleBudget) -> DetectionImages:
    try:
        content = json.loads(file.read_bytes())
        images = {one["id"]: (one["file_name"], one["height"], one["width"]) for one in content["images"]}
        # Labels are positions in the sorted list of ids, because COCO's ids have gaps.
        categories = {one["id"]: str(one["name"]) for one in content["categories"]}
        labels = {number: label for label, number in enumerate(sorted(categories), start=1)}
        listed = [(one["image_id"], one["category_id"], one) for one in content["annotations"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: is not in the COCO schema ({type(error).__name__}: {error})") from error
    annotations: dict[Any, list[list[float]]] = {number: [] for number in images}
    for image, category, annotation in listed:
        try:
            if image not in images or category not in labels:
                raise ValueError(f"its image {image} or its category {category} is not listed")
            annotations[image].append(_numbers_of(annotation, labels[category], *images[image][1:]))
        except (ValueError, TypeError) as error:
            bad.add(f"{file}, annotation {annotation.get('id')}: {error}")
    present = _present(top, split, file, {name for name, *_ in images.values()})
    missing = [(number, name) for number, (name, *_) in images.items() if name not in present]
    bad.add(*(f"{file}, image {number}: its file {name} is missing" for number, name in missing))
    kept = [number for number, (name, *_) in images.items() if name in present]
    if not kept:
        raise DataError(f"{file}: lists no usable images")
    return DetectionImages(
        [categories[number] for number in labels],
        [present[images[number][0]] for number in kept],
        [_ground_truth(annotations[number]) for number in kept],
        [(int(images[number][1]), int(images[number][2])) for number in kept],
    )


def _present(top: Path, split: str, file: Path, names: set[str]) -> dict[str, Path]:
    """Return the paths of the listed images, in the folder that contains most of them."""
    present: dict[str, Path] = {}
    folders = [top / name.format(split=word) for word in _SPLITS[split] for name in _IMAGES]
    for folder in [file.parent, *folders]:
        if folder.is_dir() and len(present) < len(names):
            found = {name: folder / name for name in names if (folder / name).is_file()}
            present = max(present, found, key=len)
    return present


def _numbers_of(annotation: dict[str, Any], label: int, height: float, width: float) -> list[float]:
    """Return the box of an object, clipped to the image, with its label, crowd flag and area."""
    x, y, box_width, box_height = map(float, annotation["bbox"])
    x1, y1 = max(x, 0.0), max(y, 0.0)
    x2, y2 = min(x + box_width, float(width)), min(y + box_height, float(height))
    if not (box_width > 0 and box_height > 0 and x1 < x2 and y1 < y2):
        raise ValueError(f"its bbox {annotation['bbox']} has no area within the image of {width}x{height}")
    area = annotation.get("area")  # of the object, not of its box; it is not clipped
    area = (x2 - x1) * (y2 - y1) if area is None else float(area)
    return [x1, y1, x2, y2, label, bool(annotation.get("iscrowd")), area]


def _ground_truth(annotations: list[list[float]]) -> GroundTruth:
    rows = np.array(annotations, np.float64).reshape(-1, 7)
    boxes, labels = rows[:, :4].astype(np.float32), rows[:, 4].astype(np.int64)
    return GroundTruth(boxes, labels, rows[:, 5] > 0, rows[:, 6])
