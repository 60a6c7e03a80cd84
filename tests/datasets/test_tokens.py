"""Tokens and their cache: exact contents, made once, whole or absent, and bad text named or counted."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from adaecho.datasets import tokens as tokens_module
from adaecho.datasets.documents import find_documents
from adaecho.datasets.text_stream import TokenStream
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of text."""
    return write_folder(tmp_path / "text")


def _make(path: Path, packing: Packing = PACKED, held_out: int | None = 2, bad: int = 0, **of: Any) -> Tokens:
    return tokenized(find_documents(str(path), **of), packing, held_out, 0, bad)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``text`` and the ``cache`` of its tokens, made once."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADAECHO_CACHE", str(folder / "cache"))
        _make(write_folder(folder / "text"))
    return folder


def test_packed_examples_are_the_documents_joined_and_cut(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAECHO_CACHE", str(made / "cache"))
    found = _make(made / "text")
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


def _rewrite(file: Path) -> None:
    """Other text of equal length, with its time put back."""
    about, text = file.stat(), file.read_bytes()
    file.write_bytes(text.replace(b"a", b"o"))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (about.st_size, about.st_mtime_ns)


def test_names_of_special_tokens_are_text_in_a_text(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    line = "pad it with [PAD] and end it with [END]."
    (tmp_path / "text.txt").write_text("\n".join([*lines(), line]))
    found = _make(tmp_path / "text.txt", Packing("sentence", 300, 300), held_out=1, lines=True)
    decode = found.tokenizer.decode
    assert line in [decode(row.tolist()) for part in (found.train, found.validation) for row in part]
    files = find_documents(str(tmp_path / "text.txt"), lines=True)
    assert line in [
        decode(one["tokens"]) for one in TokenStream(files, "train", found.tokenizer, 300, np.int64)
    ]


def test_tokens_are_made_once_and_anew_for_other_data_or_packing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    train = tokens_module.train_tokenizer
    monkeypatch.setattr(tokens_module, "train_tokenizer", lambda *given: made.append(1) or train(*given))
    first, again = _make(folder), _make(folder)
    assert (len(made), first.meta) == (1, again.meta)
    _make(folder, Packing("packed", 8, 400))
    _make(folder, Packing("packed", 16, 380))
    assert len(made) == 3
    _rewrite(folder / "copy.py")
    changed = _make(folder)
    assert len(made) == 4
    assert changed.meta["data sha256"] != first.meta["data sha256"]
    assert changed.train.tolist() != first.train.tolist()
    assert _make(folder).meta == changed.meta
    assert len(made) == 4


def test_text_that_changes_while_its_tokens_are_made_is_told(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = tokens_module._Maker._finish

    def meanwhile(maker: Any, meta: dict[str, Any]) -> None:
        _rewrite(folder / "copy.py")
        finish(maker, meta)

    monkeypatch.setattr(tokens_module._Maker, "_finish", meanwhile)
    with pytest.raises(DataError, match=r"data\.path=\S*text: the text was written again"):
        _make(folder)
    assert [*cache.iterdir()] == []


def test_a_tokenizer_of_other_text_is_trained_anew() -> None:
    first = _train("of this text")
    assert _train("of this text", "is not read") == first
    assert _train("of another", "for b in c:\n    break\n") != first


def _train(key: str, text: str = "def a():\n    return 1\n") -> str:
    return str(tokens_module.cached_tokenizer(key, iter([text] * 9), 260).to_str())


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


def _with_a_link(folder: Path) -> dict[str, Any]:
    (folder / "train.bin").rename(folder.parent.parent / "of somebody's own")
    (folder / "train.bin").symlink_to(folder.parent.parent / "of somebody's own")
    return {}


def _with_another_size(folder: Path) -> dict[str, Any]:
    (folder / "train.bin").write_bytes(b"odd")
    digests = {path.name: tokens_module._sha256_of_file(path) for path in folder.iterdir()}
    return {"sha256 of files": {name: digests[name] for name in tokens_module._FILES}}


@pytest.mark.parametrize(
    "change",
    [
        lambda _: {"sha256 of files": {}},
        lambda _: {"sha256 of files": {"../other": ""}},
        lambda _: {"sha256 of files": None},
        _with_a_link,
        _with_another_size,
    ],
)
def test_a_cache_from_others_says_neither_types_nor_sizes(
    folder: Path, cache: Path, change: Callable[[Path], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers taken for addresses of objects would end the process, or worse."""
    whole = _make(folder)
    train = whole.train.tolist()
    (file,) = cache.glob("*/meta.json")
    file.write_text(tokens_module._sealed({**whole.meta, "dtype": "O", "kind": "sentence"}))
    assert _make(folder).train.tolist() == train
    capsys.readouterr()
    file.write_text(tokens_module._sealed({**whole.meta, **change(file.parent)}))
    assert _make(folder).train.tolist() == train
    (line,) = capsys.readouterr().err.splitlines()
    assert "the cache of tokens is damaged" in line


@pytest.mark.parametrize(
    "damage",
    [b"", b"{}", b"[]", b"\xff", b"[" * 100_000, None],
    ids=["empty", "object", "list", "no UTF-8", "deep", "other kind"],
)
def test_a_tokenizer_that_was_damaged_is_trained_anew(
    cache: Path, damage: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _train("key")
    (file,) = cache.glob("*.tokenizer.json")
    text = file.read_bytes()
    file.write_bytes(text.replace(b"BPE", b"EPB") if damage is None else damage)
    assert _train("key") == first
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("trained anew")
    assert _train("key") == first
    assert capsys.readouterr().err == ""


def _make_until_killed(folder: str, die_at: int) -> None:
    calls = [0]
    for owner, name in ((os, "fsync"), (os, "mkdir"), (tokens_module._Maker, "_add"), (Path, "rename")):
        setattr(owner, name, dying(getattr(owner, name), die_at, calls))
    _make(Path(folder))


def test_killed_anywhere_the_next_makes_the_same_and_leaves_nothing(folder: Path, cache: Path) -> None:
    kills = 0
    for die_at in (1, 2, 3, 7, 12, 13, 14, 15, 16):
        process = FORKS.Process(target=_make_until_killed, args=(str(folder), die_at))
        process.start()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills >= 6
    killed = _make(folder)
    assert list(cache.glob("*.partial")) == []
    whole = killed.train.tolist()
    for path in cache.glob("*/meta.json"):
        path.unlink()
    anew = _make(folder)
    assert (anew.train.tolist(), anew.meta) == (whole, killed.meta)


def test_a_cache_that_another_process_made_meanwhile_is_taken(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has this one's host and number, as in two containers."""
    finish = tokens_module._Maker._finish
    theirs: list[int] = []

    def second(maker: Any, meta: dict[str, Any]) -> None:
        monkeypatch.setattr(tokens_module._Maker, "_finish", finish)
        _make(folder)
        theirs.append(next(cache.glob("[!.]*/train.bin")).stat().st_ino)
        finish(maker, meta)

    monkeypatch.setattr(tokens_module._Maker, "_finish", second)
    assert len(_make(folder).train)
    (file,) = cache.glob("*/train.bin")
    assert theirs == [file.stat().st_ino]
    assert [path.name for path in cache.iterdir()] == [file.parent.name]


def test_a_cache_that_is_removed_as_soon_as_it_is_made_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = tokens_module._put

    def put_and_removed(made: Path, place: Path, packing: Packing) -> None:
        put(made, place, packing)
        shutil.rmtree(place)

    monkeypatch.setattr(tokens_module, "_put", put_and_removed)
    with pytest.raises(DataError, match=r"the cache of tokens was removed .* set ADAECHO_CACHE"):
        _make(folder)


def test_what_another_host_is_making_is_left_alone(folder: Path, cache: Path) -> None:
    _make(folder)
    (whole,) = cache.iterdir()
    theirs = cache / f".{whole.name}.another-host.{2**22 + 1}.partial"
    theirs.mkdir()
    (whole / "meta.json").unlink()
    _make(folder)
    assert theirs.is_dir()


def test_a_disk_that_fills_gets_one_message_and_leaves_nothing(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tokens_module._Maker, "_add", full)
    with pytest.raises(DataError, match=r"can't be written \(No space left on device\).*set ADAECHO_CACHE"):
        _make(folder)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("kilobytes", [4, 8, 40])
def test_a_cache_on_a_small_disk_is_made_once_that_is_larger(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kilobytes: int
) -> None:
    disk, whole = tmp_path / "disk", _make(folder).meta
    monkeypatch.setenv("ADAECHO_CACHE", str(disk / "cache"))
    with small_disk(disk, f"size={kilobytes}k") as enlarge:
        with pytest.raises(DataError, match=r"can't be written \(No space left on device\)"):
            _make(folder)
        assert not [path for path in disk.rglob("*") if path.is_file()]
        enlarge()
        assert _make(folder).meta == whole


def test_invalid_utf_8_is_counted_within_the_budget_and_named_beyond(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "latin.txt").write_bytes("größer".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.txt, document 0: is no UTF-8 \(byte 2.*"):
        _make(folder)
    assert _make(folder, bad=1).meta["skipped"]["bad"] == 1
    assert "latin.txt" in capsys.readouterr().err


def _column(name: str, values: list[object], kind: Any = None) -> Callable[[], object]:
    return partial(write_parquet, Path("train.parquet"), values, name, kind)


def _twice() -> None:
    columns = [pyarrow.array(texts())] * 2
    parquet.write_table(pyarrow.table(columns, names=["text"] * 2), "train.parquet")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "other column": (_column("body", ["a"]), r"needs a column 'text' and has body; set task\.column"),
    "numbers": (_column("text", [1, 2]), r"column 'text' holds int64, no text"),
    "lists": (
        _column("text", [["a"]], pyarrow.list_(pyarrow.string())), r"column 'text' holds list.*no text",
    ),
    "column twice": (_twice, r"train\.parquet: has 2 columns 'text'; keep one"),
    "no parquet": (
        lambda: Path("train.parquet").write_bytes(b"PAR1 and no more"),
        r"train\.parquet: not readable as parquet",
    ),
    "nothing": (lambda: None, "holds no text"),
    "absent": (lambda: Path("../data").rmdir(), "no such file or folder"),
}  # fmt: skip


@pytest.mark.parametrize(("write", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[], object], message: str
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    write()
    with pytest.raises(DataError, match=message):
        _make(tmp_path / "data")


@pytest.mark.parametrize(
    ("packing", "error", "message"),
    [
        (
            Packing("packed", 16, 30_000),
            ConfigError,
            r"task\.vocabulary=30000: this text supports \d+ subwords .*or less",
        ),
        (
            Packing("packed", 5000, 400),
            DataError,
            r"its validation text gives not one example of task\.block=5000",
        ),
    ],
)
def test_a_vocabulary_or_a_block_beyond_the_data(
    folder: Path, packing: Packing, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _make(folder, packing, held_out=1)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Any]]:
    """``hub("train")``: that ``load_dataset`` gives files of this machine; what it was asked for."""
    datasets = pytest.importorskip("datasets")
    load, asked = datasets.load_dataset, []
    monkeypatch.setattr("adaecho.datasets.hub.skip_retries_offline", lambda: None)

    def stub(*splits: str) -> list[Any]:
        files = {name: str(write_parquet(tmp_path / f"files/{name}.parquet", texts())) for name in splits}

        def load_dataset(name: str, configuration: str | None, **options: Any) -> Any:
            asked.append((name, configuration))
            return load("parquet", data_files=files, cache_dir=str(tmp_path / "hub"), **options)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return stub


def test_a_hub_id_is_read_like_its_parquet_files(tmp_path: Path, hub: Callable[..., list[Any]]) -> None:
    asked = hub("train", "test", "unsupervised")
    from_hub, local = find_documents("owner/name/config"), find_documents(str(tmp_path / "files"))
    assert asked == [("owner/name", "config")]
    assert set(from_hub.parts) == {"train", "test"}
    for part in ("train", "test"):
        for files in (from_hub, local):
            (file,) = files.parts[part]
            assert [text for _, text in files.read(file, 1)] == texts()[1:]
    of_hub, of_files = (tokenized(files, PACKED, None, 0, 0) for files in (from_hub, local))
    assert of_hub.train.tolist() == of_files.train.tolist()
    assert of_hub.meta["tokenizer sha256"] == of_files.meta["tokenizer sha256"]
    with pytest.raises(DataError, match=r"needs a column 'body' and has text; set task\.column"):
        _make(Path("owner/name"), column="body")
    hub("train", "val", "validation_mismatched")
    parts = find_documents("owner/name").parts
    assert {part: len(files) for part, files in parts.items()} == {"train": 1, "validation": 2}
    hub("test")
    with pytest.raises(DataError, match=r"data\.path=owner/name: has no split train but test"):
        find_documents("owner/name")
