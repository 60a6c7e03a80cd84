"""COCO's schema: what is read, and what is wrong with it."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho.datasets.coco import read_coco
from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import DataError
from tests.datasets.coco_files import content, write
from tests.transforms.pictures import encoded


def test_images_boxes_and_labels_belong_together(tmp_path: Path) -> None:
    write(tmp_path, "train", content(4))
    found = read_coco(str(tmp_path), "train", SkippedExamples(0))
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
    ("part", "annotations", "folder"),
    [
        ("val", "annotations/instances_val.json", "images/val"),
        ("train", "train.json", "images"),
        ("train", "train/_annotations.coco.json", "train"),
        ("val", "valid/_annotations.coco.json", "valid"),
    ],
)
def test_other_layouts(tmp_path: Path, part: Any, annotations: str, folder: str) -> None:
    write(tmp_path, part, content(2), annotations=annotations)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for image in (tmp_path / f"{part}2017").iterdir():
        image.rename(tmp_path / folder / image.name)
    assert len(read_coco(str(tmp_path), part, SkippedExamples(0))) == 2


def test_crowds_are_known_but_not_learned(tmp_path: Path) -> None:
    listed = content(2)
    listed["annotations"][0]["iscrowd"] = 1
    write(tmp_path, "train", listed)
    found = read_coco(str(tmp_path), "train", SkippedExamples(0))
    assert found[0]["labels"].tolist() == []
    assert found.truths[0].crowd.tolist() == [True]
    assert len(found.with_boxes()) == 1


def test_images_without_boxes_stay_until_they_are_left_out(tmp_path: Path) -> None:
    listed = content(3)
    del listed["annotations"][1]
    write(tmp_path, "train", listed)
    found = read_coco(str(tmp_path), "train", SkippedExamples(0))
    assert len(found) == 3
    assert found[1]["boxes"].shape == (0, 4)
    assert [Path(file).name for file in found.with_boxes().files] == ["0.jpg", "2.jpg"]


def test_boxes_that_reach_beyond_their_image_are_clipped(tmp_path: Path) -> None:
    listed = content(1)
    listed["annotations"][0]["bbox"] = [-5, 10, 1000, 1000]
    write(tmp_path, "train", listed)
    height, width = listed["images"][0]["height"], listed["images"][0]["width"]
    assert read_coco(str(tmp_path), "train", SkippedExamples(0))[0]["boxes"].tolist() == [
        [0, 10, width, height]
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bbox": [3, 4, 0, 15]}, r"annotation 101: its bbox \[3, 4, 0, 15\] has no area"),
        ({"bbox": [3, 4, 5, -2]}, "has no area"),
        ({"bbox": [3, 4, float("nan"), 2]}, "is not four numbers"),
        ({"bbox": [3, 4, 10**400, 2]}, "is not four numbers"),
        ({"bbox": ["3", "4", "5", "2"]}, "is not four numbers"),
        ({"bbox": [True, 4, 5, 2]}, "is not four numbers"),
        ({"bbox": "1234"}, "its bbox '1234' is not four numbers"),
        ({"bbox": [900, 4, 5, 5]}, "lies outside its image of 48x64"),
        ({"bbox": [3, 4, 5]}, "is not four numbers"),
        ({"category_id": 7}, "its category 7 is not listed"),
        ({"image_id": 77}, "its image 77 is not listed"),
        ({"id": 100}, "another annotation has the same id"),
        ({"id": [1]}, r"its id \[1\] is no number or text"),
        ({"image_id": [1]}, r"its image_id \[1\] is no number or text"),
        ({"category_id": {}}, "its category_id {} is no number or text"),
        ({"area": "large"}, "its area 'large' is no number of pixels"),
        ({"area": float("nan")}, "its area nan is no number of pixels"),
        ({"area": 10**400}, r"its area 1000*\.\.\.0* is no number of pixels"),
        ({"iscrowd": "0"}, "its iscrowd '0' is neither 0 nor 1"),
        ({"iscrowd": {}}, "its iscrowd {} is neither 0 nor 1"),
        ({"category_id": True}, "its category_id True is no number or text"),
    ],
)
def test_a_bad_annotation_is_skipped_within_the_budget_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    listed = content(3)
    listed["annotations"][1].update(change)
    file = write(tmp_path, "train", listed)
    with pytest.raises(DataError, match=message) as raised:
        read_coco(str(tmp_path), "train", SkippedExamples(0))
    assert str(file) in str(raised.value)
    bad = SkippedExamples(1)
    found = read_coco(str(tmp_path), "train", bad)
    assert [len(truth.labels) for truth in found.truths] == [1, 0, 1]
    bad.report()
    assert str(file) in capsys.readouterr().err


def test_an_image_without_its_file_is_skipped_within_the_budget_and_named(tmp_path: Path) -> None:
    write(tmp_path, "train", content(3))
    (tmp_path / "train2017" / "1.jpg").unlink()
    with pytest.raises(DataError, match=r"image 1: its file 1\.jpg is missing"):
        read_coco(str(tmp_path), "train", SkippedExamples(0))
    assert [file.name for file in read_coco(str(tmp_path), "train", SkippedExamples(1)).files] == [
        "0.jpg",
        "2.jpg",
    ]


@pytest.mark.parametrize("kind", ["images", "categories"])
def test_ids_that_occur_twice_are_refused(tmp_path: Path, kind: str) -> None:
    listed = content(2)
    listed[kind][1]["id"] = listed[kind][0]["id"]
    write(tmp_path, "train", listed)
    with pytest.raises(DataError, match=f"{kind} with the same id"):
        read_coco(str(tmp_path), "train", SkippedExamples(9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "no list 'images'"),
        ('{"images": [], "annotations": {}, "categories": []}', "no list 'annotations'"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', r"images\[0\] has no file_name"),
    ],
)
def test_files_that_are_not_in_the_schema_are_refused(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "train", content(1)).write_text(text)
    with pytest.raises(DataError, match=message):
        read_coco(str(tmp_path), "train", SkippedExamples(0))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("images", "id", [1]),
        ("images", "file_name", None),
        ("images", "file_name", 7),
        ("images", "height", None),
        ("images", "height", "tall"),
        ("images", "width", 0),
        ("images", "width", float("nan")),
        ("images", "width", True),
        ("categories", "id", None),
    ],
)
def test_values_that_can_not_be_are_refused_and_named(
    tmp_path: Path, kind: str, name: str, value: Any
) -> None:
    listed = content(2)
    listed[kind][1][name] = value
    write(tmp_path, "train", content(2)).write_text(json.dumps(listed))
    with pytest.raises(DataError, match=rf"{kind}\[1\]: its {name} {re.escape(repr(value))} is no "):
        read_coco(str(tmp_path), "train", SkippedExamples(0))


def test_category_ids_may_be_texts_beside_numbers(tmp_path: Path) -> None:
    listed = content(2)
    listed["categories"][0]["id"] = listed["annotations"][0]["category_id"] = "five"
    write(tmp_path, "train", listed)
    found = read_coco(str(tmp_path), "train", SkippedExamples(0))
    assert found.categories == ["dog", "cat"]
    assert [truth.labels.tolist() for truth in found.truths] == [[2], [1]]


@pytest.mark.parametrize("path", ["no/such/folder", "http://example.org/coco"])
def test_a_path_that_is_no_folder_is_named_as_it_was_given(path: str) -> None:
    with pytest.raises(DataError, match=f"data.path={path}: there is no such folder"):
        read_coco(path, "train", SkippedExamples(0))


def test_a_folder_without_annotations_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no annotations of its val split; looked for .*instances_val2017\.json"
    ):
        read_coco(str(tmp_path), "val", SkippedExamples(0))


def test_a_folder_without_any_of_its_images_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "train", content(2))
    for image in (tmp_path / "train2017").iterdir():
        image.unlink()
    with pytest.raises(DataError, match="lists no image that can be used"):
        read_coco(str(tmp_path), "train", SkippedExamples(5))


@pytest.mark.parametrize("has_key", [False, True])
def test_an_annotation_without_an_area_has_that_of_its_box(tmp_path: Path, has_key: bool) -> None:
    listed = content(1)
    del listed["annotations"][0]["area"]
    if has_key:
        listed["annotations"][0]["area"] = None
    file = write(tmp_path, "train", listed)
    assert json.loads(file.read_text()) == listed
    np.testing.assert_array_equal(
        read_coco(str(tmp_path), "train", SkippedExamples(0)).truths[0].areas, [300]
    )


def test_a_size_of_400_digits_is_refused_in_a_short_message(tmp_path: Path) -> None:
    listed = content(2)
    listed["images"][1]["height"] = 10**400
    write(tmp_path, "train", content(2)).write_text(json.dumps(listed))
    with pytest.raises(DataError, match=r"images\[1\]: its height 10*\.\.\.0* is no number of pixels"):
        read_coco(str(tmp_path), "train", SkippedExamples(0))


def test_a_name_beyond_those_of_files_is_that_of_a_missing_one(tmp_path: Path) -> None:
    listed = content(2)
    file = write(tmp_path, "train", listed)
    listed["images"][1]["file_name"] = "x" * 5000
    file.write_text(json.dumps(listed))
    with pytest.raises(DataError, match=r"image 1: its file x{200} is missing"):
        read_coco(str(tmp_path), "train", SkippedExamples(0))
    assert len(read_coco(str(tmp_path), "train", SkippedExamples(1))) == 1


@pytest.mark.parametrize("name", ["../0.jpg", "/etc/0.jpg", "a/../../0.jpg", "..", "/"])
def test_a_file_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    listed = content(2)
    write(tmp_path, "train", listed)
    listed["images"][0]["file_name"] = name
    (tmp_path / "annotations/instances_train2017.json").write_text(json.dumps(listed))
    with pytest.raises(DataError, match=r"images\[0\]: its file_name .* is no name of a file within"):
        read_coco(str(tmp_path), "train", SkippedExamples(0))


def test_an_image_of_too_many_boxes_is_a_bad_example(tmp_path: Path) -> None:
    """A million of them would ask for hundreds of gigabytes when they are matched."""
    listed = content(2)
    one = listed["annotations"][0]
    listed["annotations"] += [{**one, "id": 1000 + number} for number in range(10_000)]
    write(tmp_path, "train", listed)
    with pytest.raises(DataError, match="image 0: it has 10,001 boxes, and at most 10,000 are learned"):
        read_coco(str(tmp_path), "train", SkippedExamples(0))
    assert len(read_coco(str(tmp_path), "train", SkippedExamples(1))) == 1
