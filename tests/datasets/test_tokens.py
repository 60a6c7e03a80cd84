"""Tokens and their cache: exact contents, made once, whole or absent, and bad text named or counted."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from adaecho.datasets import tokens as tokens_module
from adaecho.datasets.documents import find_documents
from adaecho.datasets.tokens import END, PAD, Packing, Tokens, tokenized
from adaecho.errors import ConfigError, DataError
from tests.datasets.text_files import MODULES, lines, texts, write_folder, write_parquet
from tests.forks import FORKS
from tests.helpers import dying, small_disk

PACKED = Packing("packed", 16, 400)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ADAECHO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return tmp_path / "cache"


def _make(
    path: Path, packing: Packing = PACKED, held_out: int | None = 2, bad: int = 0, **find: Any
) -> Tokens:
    return tokenized(find_documents(str(path), **find), packing, held_out, 0, bad)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``text`` and the ``cache`` of its tokens, made once."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADAECHO_CACHE", str(folder / "cache"))
        _make(write_folder(folder / "text"))
    return folder


def test_packed_examples_are_the_documents_joined_and_cut(tmp_path: Path) -> None:
    found = _make(write_folder(tmp_path / "text"))
    held_out = set(np.random.default_rng(0).permutation(len(MODULES))[-2:].tolist())
    for part, chosen in ((found.train, False), (found.validation, True)):
        flat = []
        for row, text in enumerate(texts()):
            if (row in held_out) == chosen:
                flat += [*found.tokenizer.encode(text).ids, END]
        slow = [flat[i : i + 17] for i in range(0, len(flat) - 16, 16)]
        assert part.tolist() == slow
    assert found.train.dtype == np.uint16
    assert found.meta["documents"] == {"train": 7, "validation": 2}


def test_a_sentence_is_an_example_with_its_mask(tmp_path: Path) -> None:
    text = [*lines()[:300], "", "ab " * 60]
    file = write_parquet(tmp_path / "train.parquet", text)
    found = _make(file, Packing("sentence", 12, 300), held_out=1)
    rows = {tuple(row) for part in (found.train, found.validation) for row in part.tolist()}
    for line in lines()[:300]:
        ids = found.tokenizer.encode(line).ids
        if len(ids) >= 2:
            whole = [END, *ids, END][:13]
            assert tuple(whole + [PAD] * (13 - len(whole))) in rows
    assert found.meta["skipped"]["empty"] == 1
    assert found.meta["skipped"]["cut"] >= 1, "what is longer than a block"
    short = sum(len(found.tokenizer.encode(line).ids) < 2 for line in lines()[:300])
    assert found.meta["skipped"]["too_short"] == short > 0


def test_tokens_are_made_once_and_anew_for_other_data_or_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = write_folder(tmp_path / "text"), []
    train = tokens_module.train_tokenizer
    monkeypatch.setattr(tokens_module, "train_tokenizer", lambda *given: made.append(1) or train(*given))
    first, again = _make(folder), _make(folder)
    assert (len(made), first.meta) == (1, again.meta)
    _make(folder, Packing("packed", 8, 400))
    _make(folder, Packing("packed", 16, 380))
    assert len(made) == 3
    (folder / "abc.py").write_text(texts()[0] + "\n# changed between two runs\n")
    changed = _make(folder)
    assert len(made) == 4
    assert changed.meta["data sha256"] != first.meta["data sha256"]


def _rewrite(file: Path) -> None:
    """Other text of equal length, with its time put back."""
    about, text = file.stat(), file.read_bytes()
    file.write_bytes(text.replace(b"a", b"o"))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert file.stat().st_size == about.st_size
    assert file.stat().st_mtime_ns == about.st_mtime_ns


def test_text_that_was_rewritten_with_its_time_put_back_is_tokenized_anew(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text")
    first = _make(folder)
    _rewrite(folder / "copy.py")
    again = _make(folder)
    assert again.meta["data sha256"] != first.meta["data sha256"]
    assert again.train.tolist() != first.train.tolist()
    assert _make(folder).meta == again.meta


def test_text_that_changes_while_its_tokens_are_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, finish = write_folder(tmp_path / "text"), tokens_module._Maker._finish
    cache = tmp_path / "cache"

    def meanwhile(maker: Any, meta: dict[str, Any]) -> None:
        _rewrite(folder / "copy.py")
        finish(maker, meta)

    monkeypatch.setattr(tokens_module._Maker, "_finish", meanwhile)
    with pytest.raises(DataError, match=r"data\.path=\S*text: the text was written again"):
        _make(folder)
    assert [*cache.iterdir()] == []


def test_a_tokenizer_of_other_text_is_trained_anew() -> None:
    def train(key: str, text: str) -> str:
        return str(tokens_module.cached_tokenizer(key, iter([text] * 9), 260).to_str())

    first = train("of this text", "def a():\n    return 1\n")
    assert train("of this text", "is not read") == first
    assert train("of another", "for b in c:\n    break\n") != first


def test_equal_text_makes_equal_tokenizers(tmp_path: Path, cache: Path) -> None:
    first = _make(write_folder(tmp_path / "text")).meta
    for path in cache.glob("*/meta.json"):
        path.unlink()
    assert _make(tmp_path / "text").meta == first


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("kind", ["zeros", "a bit", "cut", "gone"])
def test_a_cache_that_was_damaged_is_made_anew_with_one_line(
    made: Path, cache: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "cache", cache)
    whole = _make(made / "text")
    train, validation = whole.train.tolist(), whole.validation.tolist()
    (file,) = cache.glob(f"*/{name}")
    if kind == "gone":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        if kind == "cut":
            del content[len(content) // 2 :]
        else:
            content[100:140] = bytes(40) if kind == "zeros" else [content[100] ^ 1, *content[101:140]]
        file.write_bytes(content)
    again = _make(made / "text")
    assert (again.train.tolist(), again.validation.tolist(), again.meta) == (train, validation, whole.meta)
    told = capsys.readouterr().err.splitlines()
    if (name, kind) == ("meta.json", "gone"):
        assert told == []  # as one that was never finished
    else:
        (line,) = told
        assert f"damaged ({name}" in line
        assert line.endswith("made anew")
    assert len([*cache.iterdir()]) == 1
    assert _make(made / "text").train.tolist() == train
    assert capsys.readouterr().err == ""


def test_any_damage_to_what_is_sealed_is_seen() -> None:
    text = tokens_module._sealed({"a": [1, 2.5, None, "\u00fc"], "b": {"c": True}}).encode()
    assert tokens_module._unsealed(text) == {"a": [1, 2.5, None, "\u00fc"], "b": {"c": True}}
    for at in range(len(text)):
        for bit in range(8):
            damaged = bytes([*text[:at], text[at] ^ 1 << bit, *text[at + 1 :]])
            try:
                found = tokens_module._unsealed(damaged)
            except ValueError:
                continue
            assert found == tokens_module._unsealed(text)  # one blank for another
    with pytest.raises(ValueError, match="nested too deeply"):
        tokens_module._unsealed(b"[" * 100_000)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b"\xff", None])
def test_a_tokenizer_that_was_damaged_is_trained_anew(
    cache: Path, damage: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> str:
        text: str = tokens_module.cached_tokenizer(
            "key", iter(["def a():\n    return 1\n"] * 9), 260
        ).to_str()
        return text

    first = train()
    (file,) = cache.glob("*.tokenizer.json")
    text = file.read_bytes()
    file.write_bytes(text.replace(b"BPE", b"EPB") if damage is None else damage)
    assert train() == first
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("trained anew")
    assert train() == first
    assert capsys.readouterr().err == ""


def _make_until_killed(folder: str, die_at: int) -> None:
    calls = [0]
    for owner, name in ((os, "fsync"), (os, "mkdir"), (tokens_module._Maker, "_add"), (Path, "rename")):
        setattr(owner, name, dying(getattr(owner, name), die_at, calls))
    _make(Path(folder))


def test_killed_anywhere_the_next_makes_the_same_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(tmp_path / "text")
    kills = 0
    for die_at in (1, 2, 3, 7, 12, 13, 14, 15, 16):
        process = FORKS.Process(target=_make_until_killed, args=(str(folder), die_at))
        process.start()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills >= 6
    killed = _make(folder)
    assert [path.name for path in cache.iterdir() if path.name.endswith(".partial")] == []
    whole = killed.train.tolist()
    for path in cache.glob("*/meta.json"):
        path.unlink()
    assert _make(folder).train.tolist() == whole


def test_a_cache_that_another_process_made_meanwhile_is_taken(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has this one's host and number, as in two containers."""
    folder, finish = write_folder(tmp_path / "text"), tokens_module._Maker._finish
    theirs: list[int] = []

    def second(maker: Any, meta: dict[str, Any]) -> None:
        monkeypatch.setattr(tokens_module._Maker, "_finish", finish)
        _make(folder)
        theirs.append(next(cache.glob("[!.]*/train.bin")).stat().st_ino)
        finish(maker, meta)

    monkeypatch.setattr(tokens_module._Maker, "_finish", second)
    made = _make(folder)
    assert len(made.train)
    (file,) = cache.glob("*/train.bin")
    assert theirs == [file.stat().st_ino]
    assert [path.name for path in cache.iterdir()] == [file.parent.name]


def test_a_cache_that_is_removed_as_soon_as_it_is_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = tokens_module._put

    def put_and_removed(made: Path, place: Path) -> None:
        put(made, place)
        shutil.rmtree(place)

    monkeypatch.setattr(tokens_module, "_put", put_and_removed)
    with pytest.raises(DataError, match=r"the cache of tokens was removed .* set ADAECHO_CACHE"):
        _make(write_folder(tmp_path / "text"))


def test_what_another_host_is_making_is_left_alone(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(tmp_path / "text")
    _make(folder)
    (whole,) = cache.iterdir()
    theirs = cache / f".{whole.name}.another-host.{2**22 + 1}.partial"
    theirs.mkdir()
    (whole / "meta.json").unlink()
    _make(folder)
    assert theirs.is_dir()


def test_a_disk_that_fills_gets_one_message_and_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = write_folder(tmp_path / "text")
    monkeypatch.setattr(tokens_module._Maker, "_add", full)
    with pytest.raises(DataError, match=r"can't be written \(No space left on device\).*set ADAECHO_CACHE"):
        _make(folder)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("kilobytes", [4, 8, 40])
def test_a_cache_on_a_small_disk_is_made_once_that_is_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kilobytes: int
) -> None:
    folder, disk = write_folder(tmp_path / "text"), tmp_path / "disk"
    whole = _make(folder).meta
    monkeypatch.setenv("ADAECHO_CACHE", str(disk / "cache"))
    with small_disk(disk, f"size={kilobytes}k") as enlarge:
        with pytest.raises(DataError, match=r"can't be written \(No space left on device\)"):
            _make(folder)
        assert not [path for path in disk.rglob("*") if path.is_file()]
        enlarge()
        assert _make(folder).meta == whole


def test_invalid_utf_8_is_counted_within_the_budget_and_named_beyond(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "text")
    (folder / "latin.txt").write_bytes("größer".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.txt, document 0: is no UTF-8 \(byte 2.*"):
        _make(folder)
    assert _make(folder, bad=1).meta["skipped"]["bad"] == 1
    assert "latin.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("column", "values", "kind", "message"),
    [
        ("body", ["a text"], None, r"needs a column 'text' and has body; set task\.column"),
        ("text", [1, 2], None, r"column 'text' holds int64, no text"),
        ("text", [["a"]], pyarrow.list_(pyarrow.string()), r"column 'text' holds list.*no text"),
    ],
)
def test_a_column_that_is_no_text(
    tmp_path: Path, column: str, values: list[object], kind: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        _make(write_parquet(tmp_path / "train.parquet", values, column, kind))


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    columns = [pyarrow.array(texts())] * 2
    (tmp_path / "text").mkdir()
    parquet.write_table(pyarrow.table(columns, names=["text"] * 2), tmp_path / "text" / "train.parquet")
    with pytest.raises(DataError, match=r"train\.parquet: has 2 columns 'text'; keep one"):
        _make(tmp_path / "text")


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"train\.parquet: not readable as parquet"):
        _make(tmp_path / "train.parquet")


def test_a_vocabulary_beyond_the_data(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"task\.vocabulary=30000: this text supports \d+ subwords .*or less"
    ):
        _make(write_folder(tmp_path / "text"), Packing("packed", 16, 30_000))


def test_too_little_text_and_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"its validation text gives not one example of task\.block=5000"):
        _make(write_folder(tmp_path / "text"), Packing("packed", 5000, 400), held_out=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no text"):
        find_documents(str(tmp_path / "empty"))
    with pytest.raises(DataError, match="no such file or folder"):
        find_documents(str(tmp_path / "absent"))


def test_parts_are_found_by_their_names(tmp_path: Path) -> None:
    for name in ("c4-train.00000.json", "c4-validation.00000.json"):
        (tmp_path / f"{name}l").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines()[:5]))
    files = find_documents(str(tmp_path))
    assert {part: [path.name for path in paths] for part, paths in files.parts.items()} == {
        "train": ["c4-train.00000.jsonl"],
        "validation": ["c4-validation.00000.jsonl"],
    }
    assert [text for _, text in files.read(files.parts["train"][0], 2)] == lines()[2:5]


def test_the_library_of_this_python_is_read_in_place() -> None:
    names = {path.name for path in find_documents(None).parts["train"]}
    assert set(MODULES) <= names
    assert not {"test_abc.py", "topics.py"} & names


def _stub_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, splits: list[str]) -> list[tuple[Any, ...]]:
    """``datasets.load_dataset`` gives parquet files of this machine; what it was asked for."""
    datasets = pytest.importorskip("datasets")
    files = {name: str(write_parquet(tmp_path / f"{name}.parquet", list(texts()))) for name in splits}
    load, asked = datasets.load_dataset, []

    def load_dataset(name: str, configuration: str | None, **options: Any) -> Any:
        asked.append((name, configuration))
        return load("parquet", data_files=files, cache_dir=str(tmp_path / "hub"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("adaecho.datasets.hub.skip_retries_offline", lambda: None)
    return asked


def test_a_hub_id_is_read_like_its_parquet_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _stub_hub(monkeypatch, tmp_path / "files", ["train", "test", "unsupervised"])
    from_hub, local = find_documents("owner/name/config"), find_documents(str(tmp_path / "files"))
    assert asked == [("owner/name", "config")]
    assert set(from_hub.parts) == {"train", "test"}
    for part in ("train", "test"):
        (hub_file,), (file,) = from_hub.parts[part], local.parts[part]
        assert [text for _, text in from_hub.read(hub_file, 1)] == texts()[1:]
        assert [text for _, text in local.read(file, 1)] == texts()[1:]
    of_hub, of_files = (tokenized(files, PACKED, None, 0, 0) for files in (from_hub, local))
    assert of_hub.train.tolist() == of_files.train.tolist()
    assert of_hub.meta["tokenizer sha256"] == of_files.meta["tokenizer sha256"]
    with pytest.raises(DataError, match=r"needs a column 'body' and has text; set task\.column"):
        _make(Path("owner/name"), column="body")


def test_a_hub_id_without_a_split_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stub_hub(monkeypatch, tmp_path, ["test"])
    with pytest.raises(DataError, match=r"data\.path=owner/name: has no split train but test"):
        find_documents("owner/name")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach the hub"),
        RuntimeError("Dataset scripts are no longer supported, but found lm1b.py"),
    ],
)
def test_a_hub_id_that_can_not_be_loaded(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = rf"data\.path=owner/name: .*{error}.*local copy; a data set that is a script can't be loaded"
    with pytest.raises(DataError, match=message):
        find_documents("owner/name")
