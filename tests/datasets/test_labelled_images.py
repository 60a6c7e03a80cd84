"""LabelledImages images in each layout, and what is wrong with them."""

import errno
import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from adaecho import EchoLoader
from adaecho.datasets import cifar10
from adaecho.datasets.labelled_images import IMAGE_ENDINGS, LabelledImages, find_both, find_labelled
from adaecho.datasets.parquet import check_parts
from adaecho.datasets.storage import files_in
from adaecho.errors import DataError
from adaecho.tasks.images import decode_labelled
from tests.transforms.pictures import encoded, picture


def table(
    file: Path,
    rows: range,
    *,
    labels: list[Any] | None = None,
    group: int = 2,
    about: bytes = b"",
    checksums: bool = False,
) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "image": [{"bytes": encoded(row), "path": f"{row}.jpg"} for row in rows],
        "label": [row % 3 for row in rows] if labels is None else labels,
    }
    made = pa.table(columns).replace_schema_metadata({b"huggingface": about} if about else None)
    parquet.write_table(made, file, row_group_size=group, write_page_checksum=checksums, compression="none")


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


def labelled(top: Path | str, part: Any = "train") -> LabelledImages:
    found = find_labelled(str(top), part)
    assert found is not None
    return found


@pytest.mark.parametrize("layout", ["parquet", "folders", "tar"])
def test_every_layout_gives_the_same_images_and_labels(tmp_path: Path, layout: str) -> None:
    make(layout, tmp_path)
    train, validation = (labelled(tmp_path, part) for part in ("train", "validation"))
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
    found = labelled(tmp_path)
    assert found.source.shard_lengths.tolist() == [2, 2, 1] * 6
    for row in np.random.default_rng(0).permutation(30).tolist():
        assert found.source[row] == {"image": encoded(row), "label": row % 3}
    assert found.source.origin(7).endswith("train-1.parquet, row 0 of row group 1")


def test_a_table_that_is_written_anew_meanwhile_is_no_bad_example(tmp_path: Path) -> None:
    """Its labels were read before: images would get those of other rows."""
    table(tmp_path / "train-0.parquet", range(40))
    found = labelled(tmp_path)
    assert found.source[1]["label"] == 1
    table(tmp_path / "train-1.parquet", range(39, -1, -1))
    (tmp_path / "train-1.parquet").replace(tmp_path / "train-0.parquet")
    loader = EchoLoader(found.source, 4, max_bad_examples=100)
    with pytest.raises(OSError, match=r"changed since this command began: .*train-0\.parquet"):
        next(iter(loader))


def test_tables_can_be_pickled_also_once_they_were_read(tmp_path: Path) -> None:
    make("parquet", tmp_path)
    source = labelled(tmp_path).source
    rows = [source[row] for row in range(9)]
    assert [pickle.loads(pickle.dumps(source))[row] for row in range(9)] == rows


def test_folders_of_classes_alone_are_all_for_training(tmp_path: Path) -> None:
    folders(tmp_path, {".": range(6)})
    found = labelled(tmp_path)
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


TABLE = Path("train-0.parquet")


@pytest.mark.parametrize(
    ("parts", "classes", "told"),
    [
        ("train eval holdout", 3, "2 are left out (eval, holdout), as none is named"),
        ("train_images test_images more", 3, "test_images and train_images are taken for classes; if they"),
        ("train_station bus_station", 2, ""),
        ("train val eval", 3, ""),
    ],
)
def test_folders_that_may_be_parts_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parts: str, classes: int, told: str
) -> None:
    for part in parts.split():
        folders(tmp_path, {part: range(8)})
    assert find_both(str(tmp_path))[0].num_classes == classes
    shown = capsys.readouterr().err.replace("\n", " ")
    assert told in shown
    assert bool(told) or "left out" not in shown


@pytest.mark.parametrize(("part", "told"), [("dev", True), ("unsupervised", False)])
def test_tables_that_may_be_for_validation_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, told: bool
) -> None:
    for name in ("train-0.parquet", f"{part}-0.parquet"):
        table(tmp_path / name, range(6))
    assert find_both(str(tmp_path))[1] is None
    assert ("1 are left out (dev-0.parquet)" in capsys.readouterr().err.replace("\n", " ")) == told


def _labels(*labels: Any, kind: str | None = None) -> None:
    images = [{"bytes": encoded(0), "path": ""}] * len(labels)
    parquet.write_table(pa.table({"image": images, "label": pa.array(labels, kind)}), TABLE)


def _empty_class() -> None:
    folders(Path(), {"train": range(6)})
    Path("train/class7").mkdir()


def _other_schema() -> None:
    parquet.write_table(pa.table({"img": [b""], "label": ["cat"]}), TABLE)


def _cut() -> None:
    _labels(0)
    TABLE.write_bytes(TABLE.read_bytes()[:100])


REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    "empty class": (_empty_class, ".", r"class7: this class folder holds no image"),
    "nothing in it": (Path, ".", "holds no folders of classes"),
    "no folder": (Path, "no/such/folder", "there is no such folder"),
    "url": (Path, "http://example.org/images.zip", "there is no such folder"),
    "file": (partial(_labels, 0), str(TABLE), "is a file; name the folder that holds it"),
    "no shards": (Path, "train-00.tar", r"data\.path: .*train-00\.tar"),
    "no label": (
        partial(_labels, 0, None, 1), ".",
        "row 1 of row group 0: its label is -1; this split is not labelled",
    ),
    "billions of classes": (
        partial(_labels, 0, 2**33, 1), ".",
        r"row 1 of row group 0: its label is 8589934592; .* at most 1,048,576",
    ),
    "label beyond all numbers": (
        partial(_labels, 0, 2**64 - 1, kind="uint64"), ".",
        r"train-0\.parquet: a label can't be \(Integer value 18446744073709551615",
    ),
    "other schema": (
        _other_schema, ".", r"needs the columns image and label \(integers\), and has img",
    ),
    "cut": (_cut, ".", "not readable as parquet"),
}  # fmt: skip


@pytest.mark.parametrize(("write", "path", "message"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_is_refused(write: Callable[[], object], path: str, message: str) -> None:
    write()
    with pytest.raises(DataError, match=message):
        find_labelled(path, "train")


@pytest.mark.parametrize("kind", ["uint8", "int8", "uint64"])
def test_labels_may_be_integers_of_any_size(kind: str) -> None:
    _labels(0, 2, 1, kind=kind)
    labels = labelled(".").source.labels
    assert (labels.tolist(), labels.dtype) == ([0, 2, 1], np.int64)


def test_a_row_group_that_was_damaged_names_its_file() -> None:
    table(TABLE, range(6), group=2)
    at = parquet.read_metadata(TABLE).row_group(1).column(0).data_page_offset
    content = bytearray(TABLE.read_bytes())
    content[at : at + 64] = bytes([255]) * 64
    TABLE.write_bytes(content)
    found = labelled(".")
    assert found.source[0]["label"] == 0
    with pytest.raises(DataError, match=r"train-0\.parquet: not readable as parquet"):
        found.source[2]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``datasets.load_dataset`` gives what is put into the dict, by split."""
    datasets = pytest.importorskip("datasets")
    stored: dict[str, Any] = {}

    def load_dataset(name: str, _: None, *, split: None, **__: Any) -> Any:
        assert (name, split) == ("owner/name", None)
        return {
            part: datasets.Dataset.from_dict(columns, features=datasets.Features(features))
            for part, (columns, features) in stored.items()
        }

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return stored


def test_a_hub_id_gives_bytes_labels_and_names(hub: Any) -> None:
    from datasets import ClassLabel, Image

    columns = {"image": [{"bytes": encoded(row), "path": None} for row in range(3)], "label": [0, 1, 1]}
    hub["train"] = columns, {"image": Image(), "label": ClassLabel(names=["cat", "dog"])}
    found = labelled("owner/name")
    assert (found.num_classes, found.classes) == (2, ("cat", "dog"))
    examples = [decode_labelled(found.source[row], 2) for row in range(3)]
    assert [int(example["label"]) for example in examples] == [0, 1, 1]
    assert all(example["image"].shape == picture(row).shape for row, example in enumerate(examples))
    assert find_both("owner/name")[1] is None
    hub["test"] = hub["train"]
    assert len(find_both("owner/name")[1].source) == 3
    del hub["train"]
    with pytest.raises(DataError, match="owner/name: has no split train but test"):
        find_both("owner/name")


@pytest.mark.parametrize("columns", [{"image": ["a"], "label": [0]}, {"text": ["a"]}])
def test_a_hub_id_of_another_schema_is_refused(hub: Any, columns: dict[str, Any]) -> None:
    from datasets import Value

    hub["train"] = columns, {name: Value("int64" if name == "label" else "string") for name in columns}
    message = "owner/name: needs the columns image .* and label .*has " + next(iter(columns))
    with pytest.raises(DataError, match=message):
        find_labelled("owner/name", "train")


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
    (inside / ".ipynb_checkpoints").mkdir()
    for name in ("one.heic", "two.HEIC", "list.txt", ".DS_Store", ".ipynb_checkpoints/0-checkpoint.jpg"):
        (inside / name).touch()
    found = labelled(tmp_path)
    assert len(found.source) == 6
    assert "3 files in its class folders are left out" in capsys.readouterr().err.replace("\n", "")


def test_records_of_runs_and_sweeps_beside_the_data_are_none(tmp_path: Path) -> None:
    folders(tmp_path, {"train": range(2)})
    expected = files_in(tmp_path, IMAGE_ENDINGS)
    for folder, names in (
        ("run", ["config.yaml", "environment.json"]),
        ("sweep", ["design.json", "data.json"]),
    ):
        (tmp_path / "runs" / folder / "arm").mkdir(parents=True)
        for name in [*names, "fig3.png", "arm/metrics.jsonl"]:
            (tmp_path / "runs" / folder / name).touch()
    assert files_in(tmp_path, IMAGE_ENDINGS) == expected


@pytest.mark.parametrize("name", ["train/class1", "train/class1/more.jpg", "validation"])
def test_a_link_to_what_is_not_there_is_told(tmp_path: Path, name: str) -> None:
    """As of a data set that was fetched in part: there would be fewer classes, or fewer examples."""
    folders(tmp_path, {"train": range(9), "validation": range(3)})
    link = tmp_path / name
    if link.is_dir():
        shutil.rmtree(link)
    link.symlink_to(tmp_path / "elsewhere")
    for other in ("train/class0/.#000.jpg", "train/class0/notes.txt", "latest.log", ".venv"):
        (tmp_path / other).symlink_to("of an editor")  # which is no data
    with pytest.raises(DataError, match=f"{link}: a link to what isn't there"):
        find_both(str(tmp_path), None)


def test_a_link_to_what_is_not_there_is_told_among_classes_with_dots(tmp_path: Path) -> None:
    for name in ("001.Albatross", "003.Bunting"):
        folders(tmp_path, {name: range(2)})
    (tmp_path / "002.Auklet").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"/002\.Auklet: a link to what isn't there"):
        find_both(str(tmp_path), None)


@pytest.mark.parametrize("layout", ["tar", "folders"])
@pytest.mark.parametrize(
    "name", ["train-9.tar.gz", "val.zip", "class9.tar", "train/class9.tgz", "train/class9.dvc"]
)
def test_what_is_not_unpacked_or_fetched_yet_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, name: str
) -> None:
    """As where gunzip was interrupted, or of ILSVRC's archives, one for each class."""
    shard(tmp_path / "train-0.tar", range(4)) if layout == "tar" else folders(tmp_path, {"train": range(4)})
    (tmp_path / "train").mkdir(exist_ok=True)
    (tmp_path / "train/class0.zip").touch()  # which has been unpacked
    (tmp_path / name).touch()
    labelled(tmp_path)
    told = f"1 packed or unfinished files are left out ({Path(name).name})"
    assert (told in capsys.readouterr().err.replace("\n", "")) == (layout == "folders" or "/" not in name)


def test_the_files_of_w_and_b_beside_classes_are_no_class(tmp_path: Path) -> None:
    """They lie in the current folder, which may be that of the data."""
    folders(tmp_path, {".": range(9)})
    pictures = tmp_path / "wandb/offline-run-1/files/media"
    pictures.mkdir(parents=True)
    (pictures / "fig3.png").write_bytes(encoded(0))
    (tmp_path / "wandb/latest-run").symlink_to("offline-run-1")
    for name in ("debug.log", "debug-internal.log"):
        (tmp_path / "wandb" / name).touch()
    train, _ = find_both(str(tmp_path), None)
    assert train.classes == ("class0", "class1", "class2")
    assert not [file for file in files_in(tmp_path, IMAGE_ENDINGS) if "wandb" in str(file)]


def test_a_folder_that_can_not_be_listed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be left out without a word."""
    folders(tmp_path, {".": range(9)})
    scandir = os.scandir

    def failing(path: Any) -> Any:
        if str(path).endswith("class1"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(DataError, match=r"class1: can't be read \(Permission denied\)"):
        files_in(tmp_path, IMAGE_ENDINGS)


def named(*names: str) -> bytes:
    """What ``datasets.Dataset.to_parquet`` writes beside a column of ``ClassLabel``."""
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    return json.dumps({"info": {"features": features}}).encode()


def test_tables_that_number_other_classes_are_not_mixed(tmp_path: Path) -> None:
    table(tmp_path / "train-0.parquet", range(6), about=named("cat", "dog", "emu"))
    table(tmp_path / "validation-0.parquet", range(6, 9))  # written by what tells no names
    train, validation = find_both(str(tmp_path))
    assert validation is not None
    assert (train.classes, validation.classes) == (("cat", "dog", "emu"), ())
    for broken in (b"{", b"[]", b'{"info": 1}', b"[" * 10**5):
        table(tmp_path / "validation-0.parquet", range(6, 9), about=broken)
        assert find_both(str(tmp_path))[0].classes == train.classes
    table(tmp_path / "validation-0.parquet", range(6, 9), about=named("emu", "dog", "cat"))
    with pytest.raises(DataError, match="name other classes: the same names in another order"):
        find_both(str(tmp_path))
    table(tmp_path / "validation-0.parquet", range(6, 9), labels=[0, 1, 0], about=named("dog", "emu"))
    with pytest.raises(DataError, match="name other classes: only in training: cat"):
        find_both(str(tmp_path))
    table(tmp_path / "train-1.parquet", range(6, 9), about=named("emu", "dog", "cat"))
    with pytest.raises(DataError, match=r"train-1\.parquet: its labels number other classes .*emu, dog"):
        find_both(str(tmp_path))


def test_a_page_that_is_not_what_its_checksum_says_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train-0.parquet"
    table(file, range(6), checksums=True)
    content = file.read_bytes()
    at = content.index(encoded(1)[-64:])
    file.write_bytes(content[:at] + bytes(32) + content[at + 32 :])
    source = labelled(tmp_path).source
    with pytest.raises(DataError, match=r"train-0\.parquet: not readable as parquet"):
        [source[row] for row in range(6)]


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00001.parquet", "train-00000-of-00001-0f3c9a1b2c3d4e5f.parquet"),
        ("train-00000-of-00002.parquet", "train-00001-of-00003.parquet"),
    ],
)
def test_two_downloads_of_one_data_set_are_not_both_read(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        table(tmp_path / name, range(6))
    with pytest.raises(DataError, match=r"lies beside train-0.* as of another download of the same data"):
        labelled(tmp_path)


def test_tables_in_a_folder_and_in_its_data_are_not_both_read(tmp_path: Path) -> None:
    for name in ("train-0.parquet", "data/train-0.parquet"):
        table(tmp_path / name, range(6))
    with pytest.raises(
        DataError, match=r"data/train-0\.parquet: lies beside .*train-0\.parquet, as of another"
    ):
        labelled(tmp_path)


def test_shards_of_two_divisions_are_not_both_read(tmp_path: Path) -> None:
    for name in ("train-00000-of-00001.tar", "train-00000-of-00002.tar"):
        shard(tmp_path / name, range(3))
    for find in (labelled, partial(cifar10.find_shards, validation_shards="a.tar", seed=0)):
        with pytest.raises(DataError, match=r"lies beside train-00000-of-0000[12]\.tar"):
            find(str(tmp_path))


def test_parts_of_several_data_sets_and_some_of_one_are_no_two_downloads() -> None:
    names = [
        "train-00000-of-00003",
        "train-00002-of-00003",
        "test-00000-of-00001-0f3c9a1b2c3d4e5f",
        "train-a",
    ]
    check_parts([Path(f"{name}.parquet") for name in names])
    check_parts([Path("en/c4-train.00000-of-01024.json.gz"), Path("de/c4-train.00000-of-01000.json.gz")])
