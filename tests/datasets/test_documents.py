"""Documents: files and tables by split, and mistakes."""

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from adaecho.datasets.documents import find_documents
from adaecho.errors import DataError
from tests.datasets.files import MODULES, lines, make_parent, texts, write_json_lines, write_text_table


@pytest.mark.parametrize("ending", ["jsonl", "json.gz", "jsonl.gz"])
def test_json_lines_by_split(tmp_path: Path, ending: str) -> None:
    for name in ("c4-train.00000", "c4-validation.00000"):
        file = write_json_lines(tmp_path / f"{name}.{ending}", lines()[:5])
        if "gz" in ending:
            file.write_bytes(gzip.compress(file.read_bytes()))
    found = find_documents(str(tmp_path))
    assert {split: [path.name for path in paths] for split, paths in found.splits.items()} == {
        "train": [f"c4-train.00000.{ending}"],
        "validation": [f"c4-validation.00000.{ending}"],
    }
    assert [text for _, text in found.read(found.splits["train"][0], 2)] == lines()[2:5]


def test_blank_json_lines_are_skipped_and_null_is_an_empty_document(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n\n  \n{"text": null}\n{"text": "two"}\n\n')
    expected = [(f"{file}, document {number}", text) for number, text in enumerate(["one", "", "two"])]
    found = find_documents(str(file))
    assert list(found.read(file)) == expected
    assert list(found.read(file, 1)) == expected[1:]


@pytest.mark.parametrize(
    ("names", "validation"),
    [
        (("train.txt", "val.txt"), ["val.txt"]),
        (("Train.TXT", "Val.txt"), ["Val.txt"]),
        (("wiki.train.txt", "wiki.valid.txt"), ["wiki.valid.txt"]),
        (("plain/train/a.txt", "plain/test/a.txt", "plain/validation/b.txt"), ["b.txt"]),
        (("training/a.txt", "testing/b.txt", "valid/b.txt"), ["b.txt"]),
        (("train/a.txt", "val/b.txt", ".git/c.txt", "train/.venv/d.txt"), ["b.txt"]),
        (("train.py", "model.py"), None),
        (("poems/a.txt", "val/b.txt"), None),
        (("set/a.txt", "trains/c.txt", "devil.txt"), None),
    ],
)
def test_names_of_files_and_folders_decide_the_splits(
    tmp_path: Path, names: Sequence[str], validation: list[str] | None
) -> None:
    for name in names:
        make_parent(tmp_path / name).write_text("text")
    splits = find_documents(str(tmp_path)).splits
    if validation is None:
        assert len(splits.pop("train")) == len(names)
        assert not splits
        return
    assert [path.name for path in splits["validation"]] == validation
    assert len(splits["train"]) == 1


@pytest.mark.parametrize("splits", [("train", "test"), ("validation", "test")])
def test_tables_by_split(tmp_path: Path, splits: tuple[str, str]) -> None:
    for split in splits:
        write_text_table(tmp_path / f"{split}-00000-of-00001.parquet", [split, None, *texts()])
    found = find_documents(str(tmp_path))
    assert [file.name.partition("-")[0] for file in found.files] == sorted(splits)
    shards = found.splits["train"]
    if "train" in splits:
        assert found.held_out == "test"
        assert [text for _, text in found.read(shards[0])] == ["train", "", *texts()]
        assert next(found.read(shards[0], 3)) == ("train, document 3", texts()[1])
    else:  # all splits are for training, by name
        assert found.held_out is None
        assert [next(found.read(shard))[1] for shard in shards] == ["test", "validation"]


def test_the_standard_library_is_read_in_place() -> None:
    names = {path.name for path in find_documents(None).splits["train"]}
    assert set(MODULES) <= names
    assert not {"test_abc.py", "topics.py"} & names


def _unnamed(folder: Path) -> None:
    for name in ("data.txt", "model.txt", "train.txt", "val.txt"):
        (folder / name).write_text("text")


REFUSED: dict[str, tuple[Any, str]] = {
    "other column": (lambda folder: write_text_table(folder / "a.parquet", ["a"], "b"), "text, but has b"),
    "no parquet": (lambda folder: (folder / "a.parquet").write_bytes(b"PAR1 and"), "cannot be loaded"),
    "nothing": (lambda _: None, "contains no text"),
    "absent": (lambda folder: folder.rmdir(), "there is no such file or folder"),
    "truncated": (
        lambda folder: (folder / "a.json.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-20]),
        r"a\.json\.gz: cannot be unpacked",
    ),
    "of no split": (_unnamed, r"train\.txt is named .* data\.txt and 1 others have no split in .*rename"),
}


@pytest.mark.parametrize(("write", "message"), REFUSED.values(), ids=REFUSED)
def test_other_files_are_refused(tmp_path: Path, write: Any, message: str) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")

    def read() -> None:
        found = find_documents(str(tmp_path / "data"))
        list(found.read(found.splits["train"][0]))

    with pytest.raises(DataError, match=message):
        read()


def test_a_hub_id_that_can_not_be_loaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"data\.path=owner/name: no such folder, and .*Couldn't reach"):
        find_documents("owner/name")
