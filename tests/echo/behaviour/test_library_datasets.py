"""Datasets of torchvision and Hugging Face: transforms inside them, wrappers and formats."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader

WIDTH = 8


def coco(folder: Path, **transforms: Any) -> Any:
    """Pictures whose columns grow brighter, each with as many boxes at the left as its number and one."""
    pytest.importorskip("pycocotools")
    torchvision_datasets = pytest.importorskip("torchvision.datasets")
    image = pytest.importorskip("PIL.Image")
    images, annotations = [], []
    columns = np.repeat(np.arange(WIDTH, dtype=np.uint8)[None] * 20, 6, axis=0)
    for number in range(12):
        image.fromarray(np.stack([columns] * 3, axis=2)).save(folder / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "height": 6, "width": WIDTH})
        for _ in range(number % 3 + 1):
            annotations.append(
                {"id": len(annotations) + 1, "image_id": number, "bbox": [1, 1, 2, 3], "area": 6,
                 "category_id": 1, "iscrowd": 0, "segmentation": []}
            )  # fmt: skip
    (folder / "boxes.json").write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "box"}]})
    )
    dataset = torchvision_datasets.CocoDetection(str(folder), str(folder / "boxes.json"), **transforms)
    return torchvision_datasets.wrap_dataset_for_transforms_v2(dataset, target_keys=("boxes", "labels"))


def flips(batches: Any) -> list[bool]:
    """Which pictures are flipped, after checking that their boxes are, too."""
    found = []
    for batch in batches:
        for picture, target in batch:
            flipped = picture.getpixel((0, 0))[0] > 60
            assert type(target["boxes"]).__name__ == "BoundingBoxes"
            assert target["boxes"][:, 0].tolist() == [WIDTH - 3 if flipped else 1] * len(target["boxes"])
            found.append(flipped)
    return found


@pytest.mark.filterwarnings("ignore:source. .*CocoDetection draws random numbers as it reads")
@pytest.mark.parametrize("where", ["augment", "transforms"])
def test_wrapped_detection_datasets(where: str, tmp_path: Path) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    flip = v2.RandomHorizontalFlip(0.5)
    found = []
    for num_workers in (0, 1):  # each thread has a process of its own, which takes seconds to start
        dataset = coco(tmp_path, **({"transforms": flip} if where == "transforms" else {}))
        with EchoLoader(
            dataset, 4, echo="example_before_augmentation", factor=2, shuffle_buffer=4, collate=list,
            augment=flip if where == "augment" else None, num_workers=num_workers,
        ) as loader:  # fmt: skip
            found.append(flips(islice(loader, 12)))
    assert found[0] == found[1]
    assert 8 < sum(found[0]) < 40
