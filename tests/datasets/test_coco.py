"""COCO's schema: boxes and labels, other layouts, and mistakes."""

from pathlib import Path
from typing import Any

import pytest

from adaecho.datasets.coco import DetectionImages, read_both
from adaecho.datasets.storage import BadExampleBudget
from adaecho.errors import DataError
from tests.datasets.files import coco, encoded, write_coco


def read(top: Path, most_bad: int = 0) -> DetectionImages:
    return read_both(str(top), BadExampleBudget(most_bad))[0]


def names(found: DetectionImages) -> list[str]:
    return [Path(file).name for file in found.files]


def test_images_boxes_and_labels_belong_together(tmp_path: Path) -> None:
    write_coco(tmp_path, "train", coco(4))
    found = read(tmp_path)
    assert found.categories == ["dog", "cat"]  # by id
    assert len(found) == 4
    example = found[1]
    assert example["image"] == encoded(1)
    assert example["boxes"].tolist() == [[3, 4, 23, 19]]
    assert example["labels"].tolist() == [1]
    assert found[2]["labels"].tolist() == [2]
    assert found.truths[0].areas.tolist() == [250]
    assert found.origin(1).endswith("train2017/1.jpg")


@pytest.mark.parametrize(
    ("split", "annotations", "folder"),
    [
        ("val", "annotations/instances_val.json", "images/val"),
        ("val", "valid/_annotations.coco.json", "valid"),
        ("val", "annotations/instances_validation.json", "images/validation"),
        ("train", "train.json", "images"),
    ],
)
def test_other_layouts(tmp_path: Path, split: str, annotations: str, folder: str) -> None:
    if split == "val":
        write_coco(tmp_path, "train", coco(3))
    write_coco(tmp_path, split, coco(2), annotations=annotations)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for image in list((tmp_path / f"{split}2017").iterdir()):
        image.rename(tmp_path / folder / image.name)
    train, validation, lists = read_both(str(tmp_path), BadExampleBudget(0))
    found = train if split == "train" else validation
    assert found is not None
    assert (len(found), lists[-1]) == (2, tmp_path / annotations)


def test_crowds_are_not_learned_and_images_without_boxes_can_be_left_out(tmp_path: Path) -> None:
    listed = coco(4)
    listed["annotations"][0]["iscrowd"] = 1
    del listed["annotations"][1]
    write_coco(tmp_path, "train", listed)
    found = read(tmp_path)
    assert found[0]["labels"].tolist() == []
    assert found.truths[0].crowd.tolist() == [True]
    assert found[1]["boxes"].shape == (0, 4)
    assert names(found) == ["0.jpg", "1.jpg", "2.jpg", "3.jpg"]
    assert names(found.with_boxes()) == ["2.jpg", "3.jpg"]


@pytest.mark.parametrize("area", [{}, {"area": None}], ids=["no area", "area of null"])
def test_boxes_are_clipped_to_the_image_and_give_a_missing_area(
    tmp_path: Path, area: dict[str, None]
) -> None:
    listed = coco(2)
    for annotation, box in zip(listed["annotations"], ([-5, 10, 1000, 1000], [3, 4, 20, 15]), strict=True):
        del annotation["area"]
        annotation.update(area, bbox=box)
    write_coco(tmp_path, "train", listed)
    found = read(tmp_path)
    assert found[0]["boxes"].tolist() == [
        [0, 10, listed["images"][0]["width"], listed["images"][0]["height"]]
    ]
    assert found.truths[1].areas.tolist() == [300]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bbox": [3, 4, 0, 15]}, r"annotation 101: its bbox \[3, 4, 0, 15\] has no area within"),
        ({"bbox": [3, 4, float("nan"), 2]}, "has no area within"),
        ({"bbox": [900, 4, 5, 5]}, "has no area within the image of 48x64"),
        ({"bbox": None}, "annotation 101"),
        ({"category_id": 7}, "its image 1 or its category 7 is not listed"),
        ({"image_id": 77}, "its image 77 or its category 2 is not listed"),
    ],
)
def test_a_bad_annotation_is_skipped_within_the_budget_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    listed = coco(3)
    listed["annotations"][1].update(change)
    file = write_coco(tmp_path, "train", listed)
    with pytest.raises(DataError, match=message) as raised:
        read(tmp_path)
    assert str(file) in str(raised.value)
    assert [len(truth.labels) for truth in read(tmp_path, 1).truths] == [1, 0, 1]
    assert str(file) in capsys.readouterr().err


def test_missing_images_are_skipped_within_the_budget_and_named(tmp_path: Path) -> None:
    write_coco(tmp_path, "train", coco(3))
    (tmp_path / "train2017" / "1.jpg").unlink()
    with pytest.raises(DataError, match=r"image 1: its file 1\.jpg is missing"):
        read(tmp_path)
    assert names(read(tmp_path, 1)) == ["0.jpg", "2.jpg"]
    for image in (tmp_path / "train2017").iterdir():
        image.unlink()
    with pytest.raises(DataError, match="lists no usable images"):
        read(tmp_path, 5)


@pytest.mark.parametrize("text", ["{", "[]", '{"images": [{"id": 1}], "annotations": [], "categories": []}'])
def test_files_of_another_schema_are_refused(tmp_path: Path, text: str) -> None:
    write_coco(tmp_path, "train", coco(2)).write_text(text)
    with pytest.raises(DataError, match=r"instances_train2017\.json: is not in the COCO schema"):
        read(tmp_path, 9)


def test_missing_folders_and_different_categories_are_refused(tmp_path: Path) -> None:
    for path in ("no/such", "http://example.org/coco"):
        with pytest.raises(DataError, match=f"data.path={path}: there is no such folder"):
            read_both(path, BadExampleBudget(0))
    with pytest.raises(DataError, match=r"no annotations of a train split; expected .*instances_train201"):
        read(tmp_path)
    write_coco(tmp_path, "train", coco(2))
    others = coco(2)
    others["categories"][0]["name"] = "horse"
    write_coco(tmp_path, "val", others)
    message = "different categories: only in training: cat; only in validation: horse"
    with pytest.raises(DataError, match=message):
        read(tmp_path)
