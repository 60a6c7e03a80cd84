"""Documents: which files are read, of what part each is, and what is refused or told."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from adaecho.datasets.documents import find_documents
from adaecho.errors import DataError
from tests.datasets.text_files import MODULES, lines, texts, write_parquet


@pytest.mark.parametrize("ending", ["jsonl", "json.gz", "jsonl.gz"])
def test_json_lines_by_part(tmp_path: Path, ending: str) -> None:
    content = "".join(json.dumps({"text": line}) + "\n" for line in lines()[:5]).encode()
    for name in ("c4-train.00000", "c4-validation.00000"):
        (tmp_path / f"{name}.{ending}").write_bytes(gzip.compress(content) if "gz" in ending else content)
    found = find_documents(str(tmp_path))
    assert {part: [path.name for path in paths] for part, paths in found.parts.items()} == {
        "train": [f"c4-train.00000.{ending}"],
        "validation": [f"c4-validation.00000.{ending}"],
    }
    assert [text for _, text in found.read(found.parts["train"][0], 2)] == lines()[2:5]


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
def test_parts_are_named_by_files_or_folders(
    tmp_path: Path, names: Sequence[str], validation: list[str] | None
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    parts = find_documents(str(tmp_path)).parts
    if validation is None:
        assert len(parts.pop("train")) == len(names)
        assert not parts
        return
    assert [path.name for path in parts["validation"]] == validation
    assert len(parts["train"]) == 1


def test_no_text_is_left_out_in_silence(tmp_path: Path) -> None:
    for name in ("data.txt", "model.txt", "train.txt", "val.txt"):
        (tmp_path / name).write_text("text")
    with pytest.raises(
        DataError, match=r"train\.txt is named .* what data\.txt and 1 others are for; rename"
    ):
        find_documents(str(tmp_path))


@pytest.mark.parametrize("parts", [("train", "test"), ("validation", "test")])
def test_tables_by_split(tmp_path: Path, parts: tuple[str, str]) -> None:
    for part in parts:
        write_parquet(tmp_path / f"{part}-00000-of-00001.parquet", [part, None, *texts()])
    found = find_documents(str(tmp_path))
    assert [file.name.partition("-")[0] for file in found.files] == sorted(parts)
    shards = found.parts["train"]
    if "train" in parts:
        assert found.held_out == "test"
        assert [text for _, text in found.read(shards[0])] == ["train", "", *texts()]
        assert next(found.read(shards[0], 3)) == ("train, document 3", texts()[1])
    else:  # without a split for training all are, by name
        assert found.held_out is None
        assert [next(found.read(shard))[1] for shard in shards] == ["test", "validation"]


def test_the_library_of_this_python_is_read_in_place() -> None:
    names = {path.name for path in find_documents(None).parts["train"]}
    assert set(MODULES) <= names
    assert not {"test_abc.py", "topics.py"} & names


def _damaged(folder: Path) -> None:
    (folder / "a.json.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-20])


REFUSED: dict[str, tuple[Any, str]] = {
    "other column": (lambda folder: write_parquet(folder / "a.parquet", ["a"], "body"), "text, and has body"),
    "no parquet": (lambda folder: (folder / "a.parquet").write_bytes(b"PAR1 and no more"), "can't be loaded"),
    "nothing": (lambda _: None, "holds no text"),
    "absent": (lambda folder: folder.rmdir(), "there is no such file or folder"),
    "damaged": (_damaged, r"a\.json\.gz: can't be unpacked"),
}


@pytest.mark.parametrize(("write", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_text_is_refused(tmp_path: Path, write: Any, message: str) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")

    def read() -> None:
        found = find_documents(str(tmp_path / "data"))
        list(found.read(found.parts["train"][0]))

    with pytest.raises(DataError, match=message):
        read()


def test_a_hub_id_that_can_not_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(
        DataError, match=r"data\.path=owner/name: there is no such folder, nor .*Couldn't reach"
    ):
        find_documents("owner/name")
