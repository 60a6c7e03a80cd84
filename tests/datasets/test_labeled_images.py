"""Labeled images in each layout, and mistakes."""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho.datasets.labeled_images import find_both
from adaecho.errors import DataError
from adaecho.tasks.images import DecodeLabeled
from tests.datasets.files import CLASSES, encoded, picture, write_folders, write_images, write_labeled


@pytest.mark.parametrize("layout", ["parquet", "folders", "tar"])
def test_every_layout_gives_the_same_images_and_labels(tmp_path: Path, layout: str) -> None:
    write_labeled(layout, tmp_path)
    train, validation = find_both(str(tmp_path))
    assert validation is not None
    found = sorted(train.source, key=itemgetter("__key__")) if layout == "tar" else train.source
    assert (len(found), len(list(validation.source))) == (9, 3)
    assert tuple(train.classes) == (() if layout == "tar" else CLASSES)
    order = sorted(range(9), key=lambda row: (row % 3, row)) if layout == "folders" else list(range(9))
    for index, row in enumerate(order):
        example = DecodeLabeled(3)(found[index])
        assert example["label"] == row % 3
        assert example["image"].shape == picture(row).shape
        assert np.abs(example["image"].astype(int) - picture(row)).mean() < 20
        assert layout == "tar" or train.source.origin(index)


def test_class_folders_without_splits_are_for_training(tmp_path: Path) -> None:
    write_folders(tmp_path, {".": range(6)})
    inside = tmp_path / "class0"
    (inside / ".ipynb_checkpoints").mkdir()
    for name in ("list.txt", ".DS_Store", ".ipynb_checkpoints/0-checkpoint.jpg"):
        (inside / name).touch()
    found, validation = find_both(str(tmp_path))
    assert (tuple(found.classes), len(found.source), validation) == (CLASSES, 6, None)


def test_validation_images_in_another_folder(tmp_path: Path) -> None:
    write_folders(tmp_path / "one", {".": range(9)})
    write_folders(tmp_path / "other", {".": range(3)})
    _, validation = find_both(str(tmp_path / "one"), str(tmp_path / "other"))
    assert validation is not None
    assert len(validation.source) == 3


def _empty_class() -> None:
    write_folders(Path(), {"train": range(6)})
    Path("train/class7").mkdir()


REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    "empty class": (_empty_class, ".", r"class7: this class folder contains no image"),
    "nothing in it": (Path, ".", "contains no class folders"),
    "one class": (partial(write_folders, Path(), {".": range(0, 9, 3)}), ".", r"has one class \(class0\)"),
    "no training images": (partial(write_folders, Path(), {"val": range(3)}), ".", "has no training images"),
    "no folder": (Path, "/no/such/folder", "there is no such file or folder"),
    "url": (Path, "http://example.org/images.zip", "there is no such file or folder"),
    "no shards": (Path, "train-*.tar", r"data\.path: .*train-\*\.tar': no file matches"),
    "other schema": (
        partial(write_images, Path("train-0.parquet"), [b""], [1], "img"), ".",
        "needs the columns image, label, but has img, label",
    ),
    "other classes": (
        partial(write_folders, Path(), {"train": range(9), "val": range(2)}), ".",
        "splits have different classes: only in training: class2",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("write", "path", "message"), REFUSED.values(), ids=REFUSED)
def test_mistakes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[], object], path: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write()
    with pytest.raises(DataError, match=message):
        find_both(path)


def test_a_hub_id_gives_bytes_labels_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    columns = {"image": [{"bytes": encoded(row), "path": None} for row in range(3)], "label": [0, 1, 1]}
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    asked = list[Any]()

    def load_dataset(*named: Any, **_: Any) -> Any:
        asked.append(named)
        split = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        return datasets.DatasetDict({"train": split, "test": split})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    train, validation = find_both("owner/name")
    find_both("owner/name/small")
    assert asked == [("owner/name", None), ("owner/name", "small")]
    assert validation is not None
    assert train.classes == ["cat", "dog"]
    examples = [DecodeLabeled(2)(train.source[row]) for row in range(3)]
    assert [int(example["label"]) for example in examples] == [0, 1, 1]
    assert all(example["image"].shape == picture(row).shape for row, example in enumerate(examples))


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"image": encoded(0), "label": 3}, "its label 3 is not between 0 and 2"),
        ({"image": encoded(0), "label": -1}, "its label -1"),
        ({"__key__": "7", "jpg": encoded(0)}, r"7 lacks an image .* or its label"),
        ({"__key__": "7", "txt": b"", "cls": b"1"}, "7 lacks an image"),
        ({"__key__": "7", "jpg": encoded(0), "cls": b"cat"}, "invalid literal for int.*cat"),
        ({"image": b"", "label": 0}, "no image bytes"),
    ],
)
def test_bad_examples_say_why(example: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeLabeled(3)(example)
