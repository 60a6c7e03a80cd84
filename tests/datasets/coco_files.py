"""Small data sets in COCO's schema, made on the spot."""

import json
from pathlib import Path
from typing import Any

from tests.transforms.pictures import encoded, picture


def content(number: int, *, first: int = 0) -> dict[str, Any]:
    """One box an image, of the categories 5 ("cat") and 2 ("dog") in turn."""
    images, annotations = [], []
    for row in range(first, first + number):
        height, width = picture(row).shape[:2]
        images.append({"id": row, "file_name": f"{row}.jpg", "height": height, "width": width})
        box = {"bbox": [3, 4, 20, 15], "area": 250, "iscrowd": 0}
        annotations.append({"id": 100 + row, "image_id": row, "category_id": (5, 2)[row % 2], **box})
    categories = [{"id": 5, "name": "cat"}, {"id": 2, "name": "dog"}]
    return {"images": images, "annotations": annotations, "categories": categories}


def write(
    top: Path, part: str, listed: dict[str, Any], *, annotations: str = "annotations/instances_{}2017.json"
) -> Path:
    """The annotation file, and the images in ``<part>2017``; returns the file."""
    file = top / annotations.format(part)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(listed))
    folder = top / f"{part}2017"
    folder.mkdir(exist_ok=True)
    for image in listed["images"]:
        (folder / image["file_name"]).write_bytes(encoded(image["id"]))
    return file
