"""Documents: which files are read, of what part each is, and what is refused or told."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from adaecho.datasets.documents import find_documents
from adaecho.errors import DataError
from tests.datasets.text_files import MODULES, lines


def test_parts_are_found_by_their_names(tmp_path: Path) -> None:
    for name in ("c4-train.00000.json", "c4-validation.00000.json"):
        (tmp_path / f"{name}l").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines()[:5]))
    files = find_documents(str(tmp_path))
    assert {part: [path.name for path in paths] for part, paths in files.parts.items()} == {
        "train": ["c4-train.00000.jsonl"],
        "validation": ["c4-validation.00000.jsonl"],
    }
    assert [text for _, text in files.read(files.parts["train"][0], 2)] == lines()[2:5]


@pytest.mark.parametrize(
    ("names", "validation"),
    [
        (("train.txt", "val.txt"), ["val.txt"]),
        (("train/a.txt", "validation/a.txt", "README.md"), ["a.txt"]),
        (("Train.TXT", "Val.txt"), ["Val.txt"]),
        (("TRAIN/a.JSONL", "Validation/a.jsonl"), ["a.jsonl"]),
        (("train/test-of-time.txt", "val/train-to-rome.txt"), ["train-to-rome.txt"]),
        (("plain/train/a.txt", "plain/test/a.txt", "plain/validation/b.txt"), ["b.txt"]),
        (("README.md", "data/train/a.txt", "data/test/a.txt", "data/val/b.txt"), ["b.txt"]),
        (
            ("c/train/0.parquet", "c/test/0.parquet", "c/val/1.parquet", "c/unsupervised/0.parquet"),
            ["1.parquet"],
        ),
        (("mnli/train/0.jsonl", "mnli/test_b/0.jsonl", "mnli/validation_b/1.jsonl"), ["1.jsonl"]),
        (("wiki_train/a.txt", "wiki_val/b.txt"), ["b.txt"]),
        (("training/a.txt", "testing/b.txt", "valid/b.txt"), ["b.txt"]),
        (("training_set/a.txt", "test_set/b.txt", "dev-set/b.txt"), ["b.txt"]),
        (("Train Data/a.txt", "EvalSet/b.txt"), ["b.txt"]),
        (("training.txt", "dev.txt", "testing.txt"), ["dev.txt"]),
        (("pile/train/0.jsonl", "pile/test.jsonl", "pile/val.jsonl"), ["val.jsonl"]),
        (("train/val.txt", "val/train.txt"), ["train.txt"]),
        (("train-clean-100/a.txt", "dev-clean/b.txt"), ["b.txt"]),
        (("split=train/a.txt", "split=val/b.txt", "split=test/c.txt"), ["b.txt"]),
        (("wiki_training/a.txt", "wiki_validation/b.txt"), ["b.txt"]),
        (("training-monolingual/a.txt", "heldout-monolingual/b.txt"), ["b.txt"]),
        (
            ("training-0-of-1.jsonl", "held_out-0-of-1.jsonl", "testing-0-of-1.jsonl"),
            ["held_out-0-of-1.jsonl"],
        ),
        (("training/a.txt", "evaluation/b.txt"), ["b.txt"]),
        (("lib/train/a.py", "tools/test/b.py", "c.py"), None),
        (("en/train/a.txt", "fr/val/b.txt", "README.md"), ["b.txt"]),
        (("train/a.txt", "val/b.txt", ".git/c.txt", "train/.venv/d.txt"), ["b.txt"]),
        (("test/train.txt", "test/valid.txt", "test/test.txt"), ["valid.txt"]),
        (("train/train.txt", "train/val.txt"), ["val.txt"]),
        (("training/a.py", "train.py", "models/b.py", "README.md"), None),
        (("train.py", "eval.py", "training.md", "testing.md", "install.md", "model.py"), None),
        (("set/a.txt", "data/b.txt", "trains/c.txt"), None),
        (("poems/a.txt", "val/b.txt"), None),
        (("poems/a.txt", "wiki.test.txt"), None),
        (("poems/a.txt", "wiki-dev/b.txt"), None),
        (("poems/a.txt", "test/b-test.py", "models/test_c.py"), None),
        (("poems/a.txt", "testset/b.txt", "devil.txt", "evaluated.txt"), None),
    ],
)
def test_parts_are_named_by_files_or_folders(
    tmp_path: Path, names: Sequence[str], validation: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    parts = find_documents(str(tmp_path)).parts
    if validation is None:
        assert len(parts.pop("train")) == len(names)
        assert not parts
        others = [name for name in names if re.search(r"(^|/|[.-])(val|valid|test|dev)(set)?[/.]", name)]
        told = capsys.readouterr().err.replace("\n", " ")
        assert (f"{len(others)} named as a part for validation or test are read" in told) == bool(others)
        return
    assert [path.name for path in parts["validation"]] == validation
    assert len(parts["train"]) == 1


def test_what_a_folder_for_training_holds_of_another_part_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train/train.jsonl", "train/valid.jsonl", "test/test.jsonl", "train/test-of-time.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert len(find_documents(str(tmp_path)).parts["train"]) == 3
    told = capsys.readouterr().err.replace("\n", " ")
    assert "1 named as a part for validation or test are read for training (train/valid.jsonl)" in told


def test_what_lies_beside_parts_below_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """IMDB's archive as it unpacks, and the hub's own copy of it as tables."""
    for name in ("imdb/train/a.txt", "imdb/test/b.txt", "imdb/vocabulary.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    with pytest.raises(DataError, match=r"a\.txt is named .* 1 others .*\(imdb/vocabulary\.txt\); rename"):
        find_documents(str(tmp_path))
    for name in ("train", "test", "unsupervised"):
        (tmp_path / "plain_text" / name).mkdir(parents=True)
        (tmp_path / "plain_text" / name / f"0-{name[0]}.jsonl").write_text('{"text": "a"}')
    assert [file.name for file in find_documents(str(tmp_path / "plain_text")).all()] == ["0-t.jsonl"] * 2
    assert "1 others are left out" in capsys.readouterr().err
    assert len(find_documents(str(tmp_path)).all()) == 2


def test_texts_beside_tables_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "b.txt", "README.md", "notes.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}')
    assert find_documents(str(tmp_path)).parts == {"train": [tmp_path / "notes.jsonl"]}
    assert "2 .txt files are left out (a.txt, b.txt), as there are tables" in capsys.readouterr().err


def test_no_text_is_left_out_in_silence(tmp_path: Path) -> None:
    for name in ("data.txt", "model.txt", "train.txt"):
        (tmp_path / name).write_text("text")
    with pytest.raises(DataError, match=r"train\.txt is named .* 2 others .*\(data\.txt, model\.txt\); ren"):
        find_documents(str(tmp_path))


def test_texts_beside_a_folder_with_the_word_train_are_told(tmp_path: Path) -> None:
    for name in ("train-easy", "train-hard", "extrapolate"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "algebra.txt").write_text("text")
    with pytest.raises(DataError, match=r"algebra\.txt is named .* 1 others .*\(extrapolate/algebra\.txt\)"):
        find_documents(str(tmp_path))


def test_more_texts_of_another_kind_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train.txt", "train_v1.txt", "README.md"):
        (tmp_path / name).write_text("text")
    assert len(find_documents(str(tmp_path)).all()) == 2
    assert not capsys.readouterr().err
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text("text")
    assert len(find_documents(str(tmp_path)).all()) == 2
    assert "3 others are left out, of which no name says" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["more.jsonl.xz", "more.txt.gz", "val.zip", "de.txt.crdownload", "books"])
def test_what_is_not_unpacked_or_not_fetched_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / ("a.jsonl" if "json" in name else "a.txt")).write_text('{"text": "a"}')
    link = name == "books"
    (tmp_path / name).symlink_to(tmp_path / "elsewhere") if link else (tmp_path / name).touch()
    assert len(find_documents(str(tmp_path)).all()) == 1
    told = (
        "1 links to what isn't there are left out"
        if link
        else f"1 packed or unfinished files are left out ({name})"
    )
    assert told in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    "content", ["version https://git-lfs.github.com/spec/v1\noid sha256:0", "/annex/objects/A"]
)
def test_what_stands_for_a_text_that_was_not_fetched_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    found = find_documents(str(tmp_path))
    with pytest.raises(DataError, match=r"a\.txt: says where Git LFS or git-annex has it"):
        list(found.read(tmp_path / "a.txt"))


def test_the_library_of_this_python_is_read_in_place() -> None:
    names = {path.name for path in find_documents(None).parts["train"]}
    assert set(MODULES) <= names
    assert not {"test_abc.py", "topics.py"} & names


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach the hub"),
        RuntimeError("Dataset scripts are no longer supported, but ..."),
    ],
    ids=["unreachable", "script"],
)
def test_a_hub_id_that_can_not_be_loaded(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    message = rf"data\.path=owner/name: .*{error}.*local copy; a data set that is a script can't be loaded"
    with pytest.raises(DataError, match=message):
        find_documents("owner/name")


@pytest.mark.parametrize("other", ["a.jsonl.gz", "a.json.gz", "a.jsonl.GZ", "a.parquet"])
def test_a_table_beside_itself_in_another_format_is_refused(tmp_path: Path, other: str) -> None:
    for name in ("a.jsonl", "b.jsonl", other):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"a\.\w+.* and .*a\.\w+.* seem to hold the same documents"):
        find_documents(str(tmp_path))
    (tmp_path / other).rename(tmp_path / f"more-{other}")
    assert len(find_documents(str(tmp_path)).parts["train"]) == 3


def test_two_links_to_one_table_are_refused(tmp_path: Path) -> None:
    """As two snapshots of a data set are in the hub's cache."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "f00d").touch()
    for snapshot in ("1111", "2222"):
        (tmp_path / "snapshots" / snapshot).mkdir(parents=True)
        (tmp_path / "snapshots" / snapshot / "train-00000-of-00001.parquet").symlink_to(
            tmp_path / "blobs/f00d"
        )
    with pytest.raises(DataError, match=r"1111/.* and .*2222/.* seem to hold the same documents"):
        find_documents(str(tmp_path))
    assert find_documents(str(tmp_path / "snapshots" / "1111")).parts["train"]
