"""Labelled images in each layout, and what is wrong with them."""

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from adaecho.datasets.labelled_images import find_both, find_labelled
from adaecho.errors import DataError
from adaecho.tasks.images import decode_labelled
from tests.transforms.pictures import encoded, picture


def table(file: Path, rows: range, *, labels: list[Any] | None = None, group: int = 2) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "image": [{"bytes": encoded(row), "path": f"{row}.jpg"} for row in rows],
        "label": [row % 3 for row in rows] if labels is None else labels,
    }
    parquet.write_table(pa.table(columns), file, row_group_size=group)


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
    train, validation = (find_labelled(str(tmp_path), part) for part in ("train", "validation"))
    assert train is not None
    assert validation is not None
    assert (len(train.source), len(validation.source)) == (9, 3)
    assert train.num_classes == (None if layout == "tar" else 3)
    order = sorted(range(9), key=lambda row: (row % 3, row)) if layout == "folders" else list(range(9))
    for index, row in enumerate(order):
        example = decode_labelled(train.source[index], 3)
        assert example["label"] == row % 3
        assert example["image"].shape == picture(row).shape
        assert np.abs(example["image"].astype(int) - picture(row)).mean() < 20
        assert train.source.origin(index)


def test_rows_of_parquet_are_found_from_any_group_in_any_order(tmp_path: Path) -> None:
    for number in range(6):
        first = number * 5
        table(tmp_path / f"train-{number}.parquet", range(first, first + 5), group=2)
    found = find_labelled(str(tmp_path), "train")
    assert found is not None
    assert found.source.shard_lengths.tolist() == [2, 2, 1] * 6
    for row in np.random.default_rng(0).permutation(30).tolist():
        assert found.source[row] == {"image": encoded(row), "label": row % 3}
    assert found.source.origin(7).endswith("train-1.parquet, row 0 of row group 1")


def test_tables_can_be_pickled_also_once_they_were_read(tmp_path: Path) -> None:
    make("parquet", tmp_path)
    train = find_labelled(str(tmp_path), "train")
    assert train is not None
    rows = [train.source[row] for row in range(9)]
    assert [pickle.loads(pickle.dumps(train.source))[row] for row in range(9)] == rows


def test_folders_of_classes_alone_are_all_for_training(tmp_path: Path) -> None:
    folders(tmp_path, {".": range(6)})
    found = find_labelled(str(tmp_path), "train")
    assert found is not None
    assert found.classes == ("class0", "class1", "class2")
    assert find_labelled(str(tmp_path), "validation") is None


@pytest.mark.parametrize(
    ("train", "held_out"), [("Train", "Val"), ("TRAIN", "Test"), ("Training", "Testing")]
)
def test_the_names_of_splits_may_be_written_otherwise(tmp_path: Path, train: str, held_out: str) -> None:
    folders(tmp_path, {train: range(6), held_out: range(6, 9)})
    training, validation = find_both(str(tmp_path))
    assert validation is not None
    assert (len(training.source), len(validation.source)) == (6, 3)
    assert training.classes == validation.classes == ("class0", "class1", "class2")


def test_an_empty_class_folder_is_refused_and_named(tmp_path: Path) -> None:
    folders(tmp_path, {"train": range(6)})
    (tmp_path / "train" / "class7").mkdir()
    with pytest.raises(DataError, match=r"class7: this class folder holds no image"):
        find_labelled(str(tmp_path), "train")


def test_a_folder_with_nothing_in_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no folders of classes"):
        find_labelled(str(tmp_path), "train")


@pytest.mark.parametrize("path", ["no/such/folder", "http://example.org/images.zip"])
def test_what_is_not_there_is_refused(path: str) -> None:
    with pytest.raises(DataError, match="there is no such folder"):
        find_labelled(path, "train")


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    table(tmp_path / "train-0.parquet", range(3))
    with pytest.raises(DataError, match="is a file; name the folder that holds it"):
        find_labelled(str(tmp_path / "train-0.parquet"), "train")


def test_tar_shards_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path: .*train-00\.tar"):
        find_labelled(str(tmp_path / "train-00.tar"), "train")


def test_a_split_without_labels_is_refused(tmp_path: Path) -> None:
    table(tmp_path / "train-0.parquet", range(3), labels=[0, None, 1])
    with pytest.raises(DataError, match="row 1 of row group 0: its label is -1; this split is not labelled"):
        find_labelled(str(tmp_path), "train")


def test_a_label_that_would_make_billions_of_classes_is_refused(tmp_path: Path) -> None:
    table(tmp_path / "train-0.parquet", range(3), labels=[0, 2**33, 1])
    with pytest.raises(
        DataError, match=r"row 1 of row group 0: its label is 8589934592; .* at most 1,048,576"
    ):
        find_labelled(str(tmp_path), "train")


@pytest.mark.parametrize("kind", ["uint8", "int8", "uint64"])
def test_labels_may_be_integers_of_any_size(tmp_path: Path, kind: str) -> None:
    labels = pa.array([0, 2, 1], kind)
    parquet.write_table(pa.table({"image": [encoded(0)] * 3, "label": labels}), tmp_path / "train-0.parquet")
    found = find_labelled(str(tmp_path), "train")
    assert found is not None
    assert found.source.labels.tolist() == [0, 2, 1]
    assert found.source.labels.dtype == np.int64


def test_a_label_beyond_all_numbers_is_refused(tmp_path: Path) -> None:
    labels = pa.array([0, 2**64 - 1], "uint64")
    parquet.write_table(pa.table({"image": [encoded(0)] * 2, "label": labels}), tmp_path / "train-0.parquet")
    with pytest.raises(
        DataError, match=r"train-0\.parquet: a label can't be \(Integer value 18446744073709551615"
    ):
        find_labelled(str(tmp_path), "train")


def test_a_row_group_that_was_damaged_names_its_file(tmp_path: Path) -> None:
    file = tmp_path / "train-0.parquet"
    table(file, range(6), group=2)
    found = find_labelled(str(tmp_path), "train")
    assert found is not None
    at = parquet.read_metadata(file).row_group(1).column(0).data_page_offset
    content = bytearray(file.read_bytes())
    content[at : at + 64] = bytes([255]) * 64
    file.write_bytes(content)
    assert found.source[0]["label"] == 0
    with pytest.raises(DataError, match=r"train-0\.parquet: not readable as parquet"):
        found.source[2]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``datasets.load_dataset`` gives what is put into the dict, by split."""
    datasets = pytest.importorskip("datasets")
    stored: dict[str, Any] = {}

    def load_dataset(name: str, _: None, *, split: str, **__: Any) -> Any:
        assert name == "owner/name"
        columns, features = stored[split]
        return datasets.Dataset.from_dict(columns, features=datasets.Features(features))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return stored


def test_a_hub_id_gives_bytes_labels_and_names(hub: Any) -> None:
    from datasets import ClassLabel, Image

    features = {"image": Image(), "label": ClassLabel(names=["cat", "dog"])}
    hub["train"] = (
        {"image": [{"bytes": encoded(row), "path": None} for row in range(3)], "label": [0, 1, 1]},
        features,
    )
    found = find_labelled("owner/name", "train")
    assert found is not None
    assert (found.num_classes, found.classes) == (2, ("cat", "dog"))
    examples = [decode_labelled(found.source[row], 2) for row in range(3)]
    assert [int(example["label"]) for example in examples] == [0, 1, 1]
    assert all(example["image"].shape == picture(row).shape for row, example in enumerate(examples))


@pytest.mark.parametrize("columns", [{"image": ["a"], "label": [0]}, {"text": ["a"]}])
def test_a_hub_id_of_another_schema_is_refused(hub: Any, columns: dict[str, Any]) -> None:
    from datasets import Value

    hub["train"] = columns, {name: Value("int64" if name == "label" else "string") for name in columns}
    with pytest.raises(
        DataError, match="owner/name: needs the columns image .* and label .*has " + next(iter(columns))
    ):
        find_labelled("owner/name", "train")


def test_parquet_of_another_schema_or_cut_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train-0.parquet"
    parquet.write_table(pa.table({"img": [b""], "label": ["cat"]}), file)
    with pytest.raises(DataError, match=r"needs the columns image and label \(integers\), and has img"):
        find_labelled(str(tmp_path), "train")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match="not readable as parquet"):
        find_labelled(str(tmp_path), "train")


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"image": encoded(0), "label": 3}, "its label 3 is not one of 0 to 2"),
        ({"image": encoded(0), "label": -1}, "its label -1"),
        ({"__key__": "7", "jpg": encoded(0)}, r"7 has no \.cls"),
        ({"__key__": "7", "txt": b"", "cls": b"1"}, r"7 has none of \.jpg"),
        ({"__key__": "7", "jpg": encoded(0), "cls": b"cat"}, "its .cls holds b'cat' and no number"),
        ({"image": b"", "label": 0}, "no image bytes"),
    ],
)
def test_bad_examples_say_why(example: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_labelled(example, 3)


def test_files_in_class_folders_that_are_no_images_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders(tmp_path, {"train": range(6)})
    inside = next((tmp_path / "train").iterdir())
    for name in ("one.heic", "two.HEIC", "list.txt", ".DS_Store"):
        (inside / name).touch()
    found = find_labelled(str(tmp_path), "train")
    assert found is not None
    assert len(found.source) == 6
    assert "3 files in its class folders are left out" in capsys.readouterr().err.replace("\n", "")
