"""Labelled images in each layout, and what is wrong with them."""

import io
import json
import tarfile
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from adaecho.datasets.labelled_images import find_both
from adaecho.errors import DataError
from adaecho.tasks.images import decode_labelled
from tests.transforms.pictures import encoded, picture

CLASSES = ("class0", "class1", "class2")


def named(*names: str) -> bytes:
    """What ``datasets.Dataset.to_parquet`` writes beside a column of ``ClassLabel``."""
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    return json.dumps({"info": {"features": features}}).encode()


def table(
    file: Path, rows: range, *, labels: list[Any] | None = None, about: bytes = named(*CLASSES)
) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "image": [{"bytes": encoded(row), "path": f"{row}.jpg"} for row in rows],
        "label": [row % 3 for row in rows] if labels is None else labels,
    }
    made = pa.table(columns).replace_schema_metadata({b"huggingface": about} if about else None)
    parquet.write_table(made, file)


def folders(top: Path, parts: dict[str, range]) -> None:
    for part, rows in parts.items():
        for row in rows:
            folder = top / part / f"class{row % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{row:03}.jpg").write_bytes(encoded(row))


def shard(file: Path, rows: range) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for row in rows:
            for ending, content in (("jpg", encoded(row)), ("cls", str(row % 3).encode())):
                member = tarfile.TarInfo(f"{row:03}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def make(layout: str, top: Path) -> None:
    if layout == "parquet":
        table(top / "data" / "train-00000-of-00002.parquet", range(5))
        table(top / "data" / "train-00001-of-00002.parquet", range(5, 9))
        table(top / "data" / "validation-00000-of-00001.parquet", range(9, 12))
    elif layout == "folders":
        folders(top, {"train": range(9), "val": range(9, 12)})
    else:
        shard(top / "train-0.tar", range(5))
        shard(top / "train-1.tar", range(5, 9))
        shard(top / "val-0.tar", range(9, 12))


@pytest.mark.parametrize("layout", ["parquet", "folders", "tar"])
def test_every_layout_gives_the_same_images_and_labels(tmp_path: Path, layout: str) -> None:
    make(layout, tmp_path)
    train, validation = find_both(str(tmp_path))
    assert validation is not None
    found = sorted(train.source, key=itemgetter("__key__")) if layout == "tar" else train.source
    assert (len(found), len(list(validation.source))) == (9, 3)
    assert tuple(train.classes) == (() if layout == "tar" else CLASSES)
    order = sorted(range(9), key=lambda row: (row % 3, row)) if layout == "folders" else list(range(9))
    for index, row in enumerate(order):
        example = decode_labelled(found[index], 3)
        assert example["label"] == row % 3
        assert example["image"].shape == picture(row).shape
        assert np.abs(example["image"].astype(int) - picture(row)).mean() < 20
        assert layout == "tar" or train.source.origin(index)


def test_folders_of_classes_alone_are_all_for_training(tmp_path: Path) -> None:
    folders(tmp_path, {".": range(6)})
    inside = tmp_path / "class0"
    (inside / ".ipynb_checkpoints").mkdir()
    for name in ("list.txt", ".DS_Store", ".ipynb_checkpoints/0-checkpoint.jpg"):
        (inside / name).touch()
    found, validation = find_both(str(tmp_path))
    assert (tuple(found.classes), len(found.source), validation) == (CLASSES, 6, None)


def test_validation_images_may_lie_elsewhere(tmp_path: Path) -> None:
    folders(tmp_path / "one", {".": range(9)})
    folders(tmp_path / "other", {".": range(3)})
    _, validation = find_both(str(tmp_path / "one"), str(tmp_path / "other"))
    assert validation is not None
    assert len(validation.source) == 3


TABLE = Path("train-0.parquet")


def _empty_class() -> None:
    folders(Path(), {"train": range(6)})
    Path("train/class7").mkdir()


def _other_schema() -> None:
    parquet.write_table(pa.table({"img": [b""], "label": ["cat"]}), TABLE)


def _cut() -> None:
    table(TABLE, range(6))
    TABLE.write_bytes(TABLE.read_bytes()[:100])


REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    "empty class": (_empty_class, ".", r"class7: this class folder holds no image"),
    "nothing in it": (Path, ".", "holds no folders of classes"),
    "one class": (partial(folders, Path(), {".": range(0, 9, 3)}), ".", r"one class \(class0\); a class"),
    "no training images": (partial(folders, Path(), {"val": range(3)}), ".", "has no training images"),
    "no folder": (Path, "/no/such/folder", "there is no such file or folder"),
    "url": (Path, "http://example.org/images.zip", "there is no such file or folder"),
    "no shards": (Path, "train-*.tar", r"data\.path: .*train-\*\.tar': no file matches"),
    "other schema": (_other_schema, ".", "needs the columns image, label, and has img, label"),
    "other classes": (
        partial(folders, Path(), {"train": range(9), "val": range(2)}), ".",
        "splits name other classes: only in training: class2",
    ),
    "cut": (_cut, ".", r"can't be loaded .*\. Check files"),
}  # fmt: skip


@pytest.mark.parametrize(("write", "path", "message"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_is_refused(
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
    examples = [decode_labelled(train.source[row], 2) for row in range(3)]
    assert [int(example["label"]) for example in examples] == [0, 1, 1]
    assert all(example["image"].shape == picture(row).shape for row, example in enumerate(examples))


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"image": encoded(0), "label": 3}, "its label 3 is not one of 0 to 2"),
        ({"image": encoded(0), "label": -1}, "its label -1"),
        ({"image": encoded(0), "label": None}, "its label None"),
        ({"__key__": "7", "jpg": encoded(0)}, r"7 lacks an image .* or its label"),
        ({"__key__": "7", "txt": b"", "cls": b"1"}, "7 lacks an image"),
        ({"__key__": "7", "jpg": encoded(0), "cls": b"cat"}, "invalid literal for int.*cat"),
        ({"image": b"", "label": 0}, "no image bytes"),
    ],
)
def test_bad_examples_say_why(example: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_labelled(example, 3)
