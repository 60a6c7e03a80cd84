"""COCO's schema: what is read, and what is wrong with it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaecho.datasets.coco import DetectionImages, has_split, read_both, read_coco
from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import DataError
from tests.datasets.coco_files import content, write
from tests.transforms.pictures import encoded


def read(top: Path, most_bad: int = 0, part: Any = "train") -> DetectionImages:
    return read_coco(str(top), part, SkippedExamples(most_bad))


def names(found: DetectionImages) -> list[str]:
    return [Path(file).name for file in found.files]


def test_images_boxes_and_labels_belong_together(tmp_path: Path) -> None:
    write(tmp_path, "train", content(4))
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
    ("part", "annotations", "folder"),
    [
        ("val", "annotations/instances_val.json", "images/val"),
        ("train", "train.json", "images"),
        ("train", "train/_annotations.coco.json", "train"),
        ("val", "valid/_annotations.coco.json", "valid"),
        ("val", "annotations/instances_validation.json", "images/validation"),
    ],
)
def test_other_layouts(tmp_path: Path, part: Any, annotations: str, folder: str) -> None:
    write(tmp_path, part, content(2), annotations=annotations)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for image in (tmp_path / f"{part}2017").iterdir():
        image.rename(tmp_path / folder / image.name)
    assert len(read(tmp_path, part=part)) == 2


def test_images_beside_their_list_come_before_others_of_the_same_name(tmp_path: Path) -> None:
    write(tmp_path, "val", content(2), annotations="valid/_annotations.coco.json")
    (tmp_path / "images").mkdir()
    for image in list((tmp_path / "val2017").iterdir()):
        image.rename(tmp_path / "valid" / image.name)
    (tmp_path / "images" / "0.jpg").write_bytes(b"another")
    found = read(tmp_path, part="val")
    assert [Path(found.origin(row)).parent.name for row in range(len(found))] == ["valid", "valid"]


def test_crowds_are_not_learned_and_images_without_boxes_stay_until_they_are_left_out(tmp_path: Path) -> None:
    listed = content(4)
    listed["annotations"][0]["iscrowd"] = 1
    del listed["annotations"][1]
    write(tmp_path, "train", listed)
    found = read(tmp_path)
    assert found[0]["labels"].tolist() == []
    assert found.truths[0].crowd.tolist() == [True]
    assert found[1]["boxes"].shape == (0, 4)
    assert names(found) == ["0.jpg", "1.jpg", "2.jpg", "3.jpg"]
    assert names(found.with_boxes()) == ["2.jpg", "3.jpg"]


@pytest.mark.parametrize("area", [{}, {"area": None}], ids=["no area", "area of null"])
def test_boxes_beyond_their_image_are_clipped_and_give_an_area_where_none_is(
    tmp_path: Path, area: dict[str, None]
) -> None:
    listed = content(2)
    for annotation, box in zip(listed["annotations"], ([-5, 10, 1000, 1000], [3, 4, 20, 15]), strict=True):
        del annotation["area"]
        annotation.update(area, bbox=box)
    write(tmp_path, "train", listed)
    height, width = listed["images"][0]["height"], listed["images"][0]["width"]
    found = read(tmp_path)
    assert found[0]["boxes"].tolist() == [[0, 10, width, height]]
    assert found.truths[1].areas.tolist() == [300]


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
        read(tmp_path)
    assert str(file) in str(raised.value)
    bad = SkippedExamples(1)
    found = read_coco(str(tmp_path), "train", bad)
    assert [len(truth.labels) for truth in found.truths] == [1, 0, 1]
    bad.report()
    assert str(file) in capsys.readouterr().err


def _lose(_: dict[str, Any], top: Path) -> None:
    (top / "train2017" / "1.jpg").unlink()


def _long_name(listed: dict[str, Any], _: Path) -> None:
    listed["images"][1]["file_name"] = "x" * 5000


def _many_boxes(listed: dict[str, Any], _: Path) -> None:
    """A million of them would ask for hundreds of gigabytes when they are matched."""
    one = listed["annotations"][1]
    listed["annotations"] += [{**one, "id": 1000 + number} for number in range(10_000)]


BAD_IMAGES = {
    "lost": (_lose, r"image 1: its file 1\.jpg is missing"),
    "name beyond those of files": (_long_name, r"image 1: its file x{200} is missing"),
    "boxes": (_many_boxes, "image 1: it has 10,001 boxes, and at most 10,000 are learned"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_IMAGES.values(), ids=BAD_IMAGES)
def test_a_bad_image_is_skipped_within_the_budget_and_named(
    tmp_path: Path, spoil: Callable[[dict[str, Any], Path], None], message: str
) -> None:
    listed = content(3)
    file = write(tmp_path, "train", listed)
    spoil(listed, tmp_path)
    file.write_text(json.dumps(listed))
    with pytest.raises(DataError, match=message):
        read(tmp_path)
    assert names(read(tmp_path, 1)) == ["0.jpg", "2.jpg"]


def _of(value: Any, kind: str = "images", name: str = "id", row: int = 1) -> str:
    """Two images, and one value that is another."""
    listed = content(2)
    listed[kind][row][name] = value
    return json.dumps(listed)


VALUES = [
    ("images", "id", [1]), ("images", "file_name", None), ("images", "file_name", 7),
    ("images", "height", None), ("images", "height", "tall"), ("images", "width", 0),
    ("images", "width", float("nan")), ("images", "width", True), ("categories", "id", None),
]  # fmt: skip
OUTSIDE = ["../0.jpg", "/etc/0.jpg", "//etc/0.jpg", "a/../../0.jpg", "..", "/"]
NOT_IN_THE_SCHEMA = {
    "cut": ("{", "is no JSON"),
    "deep": ("[" * 100_000, "is no JSON"),
    "list": ("[]", "no list 'images'"),
    "annotations": ('{"images": [], "annotations": {}, "categories": []}', "no list 'annotations'"),
    "no name": (
        '{"images": [{"id": 1}], "annotations": [], "categories": []}', r"images\[0\] has no file_name",
    ),
    "image twice": (_of(0), "images with the same id"),
    "category twice": (_of(5, "categories"), "categories with the same id"),
    **{
        f"{kind} {name} {value}": (
            _of(value, kind, name), rf"{kind}\[1\]: its {name} {re.escape(repr(value))} is no "
        )
        for kind, name, value in VALUES
    },
    "400 digits": (
        _of(10**400, name="height"), r"images\[1\]: its height 10*\.\.\.0* is no number of pixels",
    ),
    **{
        name: (_of(name, name="file_name"), r"images\[1\]: its file_name .* is no name of a file within")
        for name in OUTSIDE
    },
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), NOT_IN_THE_SCHEMA.values(), ids=NOT_IN_THE_SCHEMA)
def test_files_that_are_not_in_the_schema_are_refused(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "train", content(2)).write_text(text)
    with pytest.raises(DataError, match=message):
        read(tmp_path, 9)


def test_category_ids_may_be_texts_beside_numbers(tmp_path: Path) -> None:
    listed = content(2)
    listed["categories"][0]["id"] = listed["annotations"][0]["category_id"] = "five"
    write(tmp_path, "train", listed)
    found = read(tmp_path)
    assert found.categories == ["dog", "cat"]
    assert [truth.labels.tolist() for truth in found.truths] == [[2], [1]]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        *(
            (path, f"data.path={path}: there is no such folder")
            for path in ("no/such", "http://example.org/coco")
        ),
        (".", r"no annotations of its val split; looked for .*instances_val2017\.json"),
    ],
)
def test_what_is_not_there_is_refused(path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_coco(path, "val", SkippedExamples(0))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "annotations/instances_test2017.json",
            "1 are left out (annotations/instances_test2017.json), as none",
        ),
        ("dev/_annotations.coco.json", "1 are left out (dev/_annotations.coco.json), as none is named val"),
        ("captions_train2017.json", ""),
    ],
)
def test_lists_beside_the_one_for_training_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    write(tmp_path, "train", content(2))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert read_both(str(tmp_path), SkippedExamples(0))[1] is None
    shown = capsys.readouterr().err.replace("\n", " ")
    assert told in shown if told else not shown


@pytest.mark.parametrize("name", ["annotations/instances_val2017.json", "valid"])
def test_annotations_that_were_not_fetched_are_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "annotations").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=f"{name}: a link to what isn't there"):
        has_split(tmp_path, "val")


def test_a_folder_without_any_of_its_images_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "train", content(2))
    for image in (tmp_path / "train2017").iterdir():
        image.unlink()
    with pytest.raises(DataError, match="lists no image that can be used"):
        read(tmp_path, 5)
