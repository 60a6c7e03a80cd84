"""Tokens and their cache: exact contents, made once, complete or absent; bad text is counted."""

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho.config.schema import DataConfig
from adaecho.datasets import tokens as tokens_module
from adaecho.datasets.documents import find_documents
from adaecho.datasets.tokens import END, PAD, Packing, Tokens, tokenized
from adaecho.errors import ConfigError, DataError
from tests.datasets.files import MODULES, lines, texts, write_text_table, write_texts
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
    return write_texts(tmp_path / "text")


def _make(path: Path, packing: Packing = PACKED, held_out: int | None = 2, bad: int = 0, **of: Any) -> Tokens:
    data = DataConfig(validation_examples=held_out, max_bad_examples=bad)
    return tokenized(find_documents(str(path), **of), packing, data)


def _tokenizer() -> Any:
    (file,) = tokens_module.cache_folder().glob("*/tokenizer.json")
    return tokens_module._load_tokenizer(file)


def test_packed_examples_are_the_documents_joined_and_cut(folder: Path) -> None:
    found = _make(folder)
    held_out = set(np.random.default_rng(0).permutation(len(MODULES))[-2:].tolist())
    for part, chosen in ((found.train, False), (found.validation, True)):
        flat = []
        for row, text in enumerate(texts()):
            if (row in held_out) == chosen:
                flat += [*_tokenizer().encode(text).ids, END]
        slow = [flat[i : i + 17] for i in range(0, len(flat) - 16, 16)]
        assert part.tolist() == slow
    assert found.train.dtype == np.uint16
    assert found.meta["documents"] == {"train": 7, "validation": 2}


def test_a_sentence_is_an_example_with_its_mask(tmp_path: Path) -> None:
    text = [*lines()[:300], "[PAD] and [END] are text", "", "ab " * 60]
    write_text_table(tmp_path / "text" / "train.parquet", text)
    found = _make(tmp_path / "text", Packing("sentence", 12, 300), held_out=1)
    rows = {tuple(row) for part in (found.train, found.validation) for row in part.tolist()}
    for line in text[:301]:
        ids = _tokenizer().encode(line).ids
        if len(ids) >= 2:
            whole = [END, *ids, END][:13]
            assert tuple(whole + [PAD] * (13 - len(whole))) in rows
    assert _tokenizer().decode(_tokenizer().encode(text[300]).ids) == text[300]
    assert found.meta["skipped"]["empty"] == 1
    assert found.meta["skipped"]["cut"] >= 1, "one line is longer than a block"
    short = sum(len(_tokenizer().encode(line).ids) < 2 for line in text[:301])
    assert found.meta["skipped"]["too_short"] == short > 0


def test_tokens_are_made_once_for_each_data_and_packing(
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
    file = folder / "copy.py"
    file.write_bytes(file.read_bytes().replace(b"a", b"o"))  # of equal length
    changed = _make(folder)
    assert len(made) == 4
    assert changed.train.tolist() != first.train.tolist()


def test_a_tokenizer_is_trained_once_for_each_text() -> None:
    first = _train("of this text")
    assert _train("of this text", "is not read") == first
    assert _train("of another", "for b in c:\n    break\n") != first


def _train(key: str, text: str = "def a():\n    return 1\n") -> str:
    return str(tokens_module.cached_tokenizer(key, iter([text] * 9), 260).to_str())


def _make_until_killed(folder: str, die_at: int) -> None:
    calls = [0]
    for owner, name in ((tokens_module, "sentence"), (Path, "write_text"), (Path, "rename"), (Path, "mkdir")):
        setattr(owner, name, dying(getattr(owner, name), die_at, calls))
    _make(Path(folder), Packing("sentence", 16, 400))


def test_after_a_kill_the_next_process_makes_the_same(folder: Path, cache: Path) -> None:
    kills = 0
    for die_at in (1, 2, 3, 7, 12, 13):
        process = FORKS.Process(target=_make_until_killed, args=(str(folder), die_at))
        process.start()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills >= 5
    killed = _make(folder, Packing("sentence", 16, 400))
    whole = killed.train.tolist()
    shutil.rmtree(cache)
    anew = _make(folder, Packing("sentence", 16, 400))
    assert (anew.train.tolist(), anew.meta) == (whole, killed.meta)


def test_a_cache_that_another_process_has_made_is_used(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = tokens_module._move

    def second(new: Path, path: Path) -> None:
        monkeypatch.setattr(tokens_module, "_move", move)
        _make(folder)
        move(new, path)

    monkeypatch.setattr(tokens_module, "_move", second)
    assert len(_make(folder).train)
    assert len([*cache.iterdir()]) == 1


@pytest.mark.parametrize("kilobytes", [4, 8, 40])
def test_a_cache_on_a_small_disk_is_made_once_that_is_larger(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kilobytes: int
) -> None:
    disk, whole = tmp_path / "disk", _make(folder).meta
    monkeypatch.setenv("ADAECHO_CACHE", str(disk / "cache"))
    with small_disk(disk, f"size={kilobytes}k") as enlarge:
        with pytest.raises(DataError, match=r"cannot be written \(No space left on device\)"):
            _make(folder)
        assert not [path for path in disk.rglob("*") if path.is_file()]
        enlarge()
        assert _make(folder).meta == whole


def test_invalid_utf_8_is_counted_within_the_budget_and_named_beyond(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "latin.txt").write_bytes("größer".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.txt, document 0: is not UTF-8 \(byte 2.*"):
        _make(folder)
    assert _make(folder, bad=1).meta["skipped"]["bad"] == 1
    assert "latin.txt" in capsys.readouterr().err


def test_a_vocabulary_or_a_block_too_large_for_the_data(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"task\.vocab_size=30000: this text supports \d+ subwords.* or less"
    ):
        _make(folder, Packing("packed", 16, 30_000), held_out=1)
    message = r"its validation text is too short for one example of task\.block_size=5000"
    with pytest.raises(DataError, match=message):
        _make(folder, Packing("packed", 5000, 400), held_out=1)
