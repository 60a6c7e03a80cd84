"""Detection data in COCO's schema: the official layout, or any folder with images and annotation files.

T.-Y. Lin et al., "Microsoft COCO: Common Objects in Context", 2014; the schema is described at
https://cocodataset.org/#format-data.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from adaecho.datasets.skipped_examples import SkippedExamples
from adaecho.errors import DataError

Part = Literal["train", "val"]

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


class DetectionImages:
    """Map-style: the bytes of each image with its boxes, ``{"image", "boxes", "labels", "size"}``.

    Crowds are left out of the examples.

    Attributes:
        categories: their names; label k is the name k - 1.
        files: of each image.
        truths: the boxes of each image, crowds among them.
        sizes: height and width of each image in pixels, as the annotations say.
    """

    thread_safe = True

    def __init__(
        self,
        categories: Sequence[str],
        files: Sequence[Path],
        truths: Sequence[TrueBoxes],
        sizes: Sequence[tuple[int, int]],
    ) -> None:
        self.categories, self.files, self.truths, self.sizes = (
            list(categories),
            list(files),
            list(truths),
            list(sizes),
        )

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
        bad: takes images without a file, and boxes that can't be used: of no area, outside their image, of an
            unknown category or image, or listed twice. The rest of their image is kept.

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
    annotations: dict[Any, list[tuple[list[float], int, bool, float]]] = {number: [] for number in images}
    seen: set[Any] = set()
    for annotation in content["annotations"]:
        reason = _why_bad(annotation, images, labels, seen)
        if reason is not None:
            bad.add(f"{file}, annotation {annotation.get('id')}", reason)
            continue
        box = _clipped(annotation["bbox"], images[annotation["image_id"]])
        crowd, area = bool(annotation.get("iscrowd", 0)), annotation.get("area")
        annotations[annotation["image_id"]].append(
            (box, labels[annotation["category_id"]], crowd, _area(box) if area is None else float(area))
        )
    kept = []
    for number, image in images.items():
        if image["file_name"] in present:
            kept.append(number)
        else:
            bad.add(f"{file}, image {number}", f"its file {image['file_name']} is missing")
    if not kept:
        raise DataError(f"{file}: lists no image whose file is there")
    return DetectionImages(
        [str(category["name"]) for _, category in categories],
        [present[images[number]["file_name"]] for number in kept],
        [_as_boxes(annotations[number]) for number in kept],
        [(int(images[number]["height"]), int(images[number]["width"])) for number in kept],
    )


def find_annotations(top: Path, part: Part) -> Path:
    """The file that lists one split of a folder.

    Raises:
        DataError: there is none.
    """
    for name in _names(part):
        if (top / name).is_file():
            return top / name
    raise DataError(
        f"data.path={top}: has no annotations of its {part} split; looked for {', '.join(_names(part))}"
    )


def has_split(top: Path, part: Part) -> bool:
    """Whether a folder has annotations of a split."""
    return any((top / name).is_file() for name in _names(part))


def _names(part: Part) -> list[str]:
    parts = ("val", "valid") if part == "val" else (part,)
    return [name.format(part=one) for one in parts for name in _ANNOTATIONS]


def _is_id(value: Any) -> bool:
    return isinstance(value, int | float | str)


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and 1 <= value < math.inf


# Of images and categories: an annotation that is wrong is skipped, and its image kept.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (_is_id, "number or text"),
    "file_name": (lambda value: isinstance(value, str) and value != "", "name of a file"),
    "height": (_is_size, "number of pixels"),
    "width": (_is_size, "number of pixels"),
}


def _load(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: is no JSON ({error}); copy it anew") from error
    needed = {
        "images": ("id", "file_name", "height", "width"),
        "annotations": ("image_id", "category_id", "bbox"),
        "categories": ("id", "name"),
    }
    for key, fields in needed.items():
        entries = content.get(key) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise DataError(f"{file}: is not in COCO's schema: it has no list {key!r}")
        kinds = {name: kind for name, kind in _KINDS.items() if name in fields}
        for index, entry in enumerate(entries):
            missing = [name for name in fields if not isinstance(entry, dict) or name not in entry]
            if missing:
                raise DataError(f"{file}: {key}[{index}] has no {' and no '.join(missing)}")
            for name, (is_right, kind) in kinds.items():
                if not is_right(entry[name]):
                    raise DataError(f"{file}: {key}[{index}]: its {name} {entry[name]!r} is no {kind}")
    return dict(content)


def _by_id(entries: list[dict[str, Any]], kind: str, file: Path) -> dict[Any, dict[str, Any]]:
    counts = Counter(entry["id"] for entry in entries)
    twice = [number for number, count in counts.items() if count > 1]
    if twice:
        listed = ", ".join(map(str, twice[:5]))
        raise DataError(f"{file}: {kind} with the same id: {listed}; it can't be told what belongs to which")
    return {entry["id"]: entry for entry in entries}


def _present(top: Path, part: Part, file: Path, images: Any) -> dict[str, Path]:
    """The path of each listed file that is there, in the first folder that has any."""
    names = {image["file_name"] for image in images}
    parts = (part, "valid") if part == "val" else (part,)
    folders = [top / name.format(part=one) for one in parts for name in _IMAGES]
    for folder in [*folders, file.parent]:
        if folder.is_dir():
            found = {name: folder / name for name in names if (folder / name).is_file()}
            if found:
                return found
    return {}


def _why_bad(
    annotation: dict[str, Any], images: dict[Any, dict[str, Any]], labels: dict[Any, int], seen: set[Any]
) -> str | None:
    for name in ("id", "image_id", "category_id"):
        if annotation.get(name) is not None and not _is_id(annotation[name]):
            return f"its {name} {annotation[name]!r} is no number or text"
    number = annotation.get("id")
    if number is not None and number in seen:
        return "another annotation has the same id"
    seen.add(number)
    image = images.get(annotation["image_id"])
    if image is None:
        return f"its image {annotation['image_id']} is not listed"
    if annotation["category_id"] not in labels:
        return f"its category {annotation['category_id']} is not listed"
    try:
        x, y, width, height = map(float, annotation["bbox"])
    except (TypeError, ValueError):
        return f"its bbox {annotation['bbox']!r} is not four numbers x, y, width, height"
    if not np.isfinite([x, y, width, height]).all() or width <= 0 or height <= 0:
        return f"its bbox {annotation['bbox']} has no area"
    if annotation.get("area") is not None and not _is_area(annotation["area"]):
        return f"its area {annotation['area']!r} is no number of pixels"
    x1, y1, x2, y2 = _clipped(annotation["bbox"], image)
    if x2 <= x1 or y2 <= y1:
        return f"its bbox {annotation['bbox']} lies outside its image of {image['width']}x{image['height']}"
    return None


def _is_area(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def _clipped(bbox: Sequence[float], image: dict[str, Any]) -> list[float]:
    x, y, width, height = map(float, bbox)
    most_x, most_y = float(image["width"]), float(image["height"])
    return [max(x, 0.0), max(y, 0.0), min(x + width, most_x), min(y + height, most_y)]


def _area(box: list[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _as_boxes(found: list[tuple[list[float], int, bool, float]]) -> TrueBoxes:
    return TrueBoxes(
        np.array([box for box, *_ in found], np.float32).reshape(-1, 4),
        np.array([label for _, label, *_ in found], np.int64),
        np.array([crowd for _, _, crowd, _ in found], np.bool_),
        np.array([area for *_, area in found], np.float64),
    )
