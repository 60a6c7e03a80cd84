"""A first try on own data: what a look shows to be wrong is said before a trial begins, with the remedy."""

import re
from pathlib import Path
from typing import Any

import pytest

from adaecho.datasets.documents import find_documents
from adaecho.datasets.labelled_images import find_images, find_labelled
from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import DataError
from adaecho.tasks import build_task
from adaecho.tasks.options import CocoOptions, ImagenetOptions, TextOptions
from tests.conftest import Compose
from tests.datasets.coco_files import content, write
from tests.tasks.test_imagenet import TINY
from tests.transforms.pictures import encoded

OF_IMAGES = {"validation_path": None}
OF_TEXT = {"column": "text", "lines": False, "block": 64}


def photographs(folder: Path, number: int = 3) -> None:
    folder.mkdir(parents=True)
    for row in range(number):
        (folder / f"{row}.jpg").write_bytes(encoded(row))


def look(path: Path) -> Any:
    return ImagenetOptions.size_of(str(path), OF_IMAGES, 0)


def test_one_class_is_refused_and_the_folder_above_the_classes_with_the_right_one(
    tmp_path: Path, compose_config: Compose
) -> None:
    for name in ("cat", "dog"):
        photographs(tmp_path / "photos" / name)
    meant = rf"one class: photos; did you mean data\.path={re.escape(str(tmp_path / 'photos'))}\?"
    with pytest.raises(DataError, match=meant):
        look(tmp_path)
    with pytest.raises(DataError, match=meant):
        build_task(compose_config(*TINY, f"data.path={tmp_path}", "data.validation_examples=2"))
    assert look(tmp_path / "photos").examples == 6
    photographs(tmp_path / "alone" / "cat")
    with pytest.raises(DataError, match=r"one class: cat; a classifier tells two or more apart"):
        look(tmp_path / "alone")


def test_images_deeper_than_in_their_class_folder_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photographs(tmp_path / "cat")
    photographs(tmp_path / "dog" / "puppies")
    find_labelled(str(tmp_path), "train")
    told = capsys.readouterr().err
    assert "3 of its 6 images lie deeper than in the folder of their class" in told
    assert "dog/puppies/0.jpg is of dog" in told


def test_links_to_folders_are_gone_through_once_and_told_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    top = tmp_path / "photos"
    photographs(top / "cat")
    photographs(top / "dog")
    photographs(tmp_path / "elsewhere", 2)
    for link, to in (("dog/more", "elsewhere"), ("cat/up", "photos"), ("dog/same", "photos/dog")):
        (top / link).symlink_to(tmp_path / to)
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "about.txt").write_text("both are dogs")
    found = find_labelled(str(top), "train")
    assert found is not None
    assert [found.source[row]["label"] for row in range(len(found.source))] == [0] * 3 + [1] * 5
    assert "2 of its 8 images lie deeper" in capsys.readouterr().err
    assert len(find_images(str(top))) == 8
    assert find_documents(str(top)).parts == {"train": [top / "dog/more/about.txt"]}


def test_what_a_look_at_the_images_shows_is_told(tmp_path: Path) -> None:
    for part, names in (("train", ("cat", "dog")), ("val", ("cat", "fox"))):
        for name in names:
            photographs(tmp_path / "two" / part / name)
    with pytest.raises(DataError, match="its training and validation splits name other classes"):
        look(tmp_path / "two")
    write(tmp_path / "boxes", "train", content(1))
    with pytest.raises(DataError, match="holds one image, so none could be held out"):
        CocoOptions.size_of(str(tmp_path / "boxes"), {"keep_images_without_boxes": True}, 0)


def test_what_a_look_at_the_text_shows_is_told(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 99)
    with pytest.raises(DataError, match=r"more bad examples than data\.max_bad_examples=0") as refused:
        TextOptions.size_of(str(tmp_path), OF_TEXT, 0)
    assert "is no UTF-8" in str(refused.value)
    assert TextOptions.size_of(str(tmp_path), OF_TEXT, 6).units == 6


def test_many_bad_examples_are_told_in_four_lines() -> None:
    bad = SkippedExamples(9)
    for number in range(9):
        bad.add(f"file.json, annotation {number}", "its bbox has no area")
    with pytest.raises(DataError) as refused:
        bad.add("file.json, annotation 9", "its bbox has no area")
    named = [f"  file.json, annotation {number}: its bbox has no area" for number in (0, 1)]
    assert str(refused.value).splitlines()[1:] == [*named, "  and 8 more"]
