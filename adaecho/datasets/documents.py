"""Read text documents from text files, JSON lines, tables (parquet or the hub) or the standard library."""

import gzip
import json
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaecho.datasets.storage import load_tables, visible_files
from adaecho.errors import DataError

Text = str | ValueError
"""The text of a document, or an error that says why the document cannot be read."""

_TEXT_ENDINGS = (".txt", ".py", ".md")
_JSON_ENDINGS = (".jsonl", ".json.gz", ".jsonl.gz")
_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_WORDS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing"}


@dataclass(frozen=True)
class Documents:
    """Text documents, grouped into splits.

    Attributes:
        splits: the files or tables by split. The keys are ``train`` and optionally ``validation`` and
            ``test``.
        files: all files of the splits.
        column: name of the text column in tables and JSON lines.
        lines: whether each line of a text file is a document; otherwise the whole file is one.
    """

    splits: dict[str, list[Any]]
    files: list[Path]
    column: str
    lines: bool

    @property
    def held_out(self) -> str | None:
        """The name of the held-out split: ``validation``, or else ``test``; None without both."""
        return next((name for name in ("validation", "test") if name in self.splits), None)

    def read(self, shard: Any, first: int = 0) -> Iterator[tuple[str, Text]]:
        """Yield the documents of a file or table from ``first`` on, as pairs (name, text)."""
        if not isinstance(shard, Path):
            rows = shard.select(range(first, len(shard))).with_format("arrow").iter(1000)
            texts = (text for batch in rows for text in batch[self.column].to_pylist())
            for number, text in enumerate(texts, first):
                yield f"{shard.split}, document {number}", text or ""
            return
        is_json = shard.name.lower().endswith(_JSON_ENDINGS)
        documents = _json_lines(shard, self.column) if is_json else _texts(shard, lines=self.lines)
        for number, text in enumerate(documents):
            if number >= first:
                yield f"{shard}, document {number}", text


def find_documents(path: str | None, *, column: str = "text", lines: bool = False) -> Documents:
    """Find the text documents of ``data.path``, and assign them to the splits train, validation and test."""
    # path is a folder with parquet files, JSON lines or text files at any depth, a single file with text or
    # JSON lines, an id on the Hugging Face Hub, or None for Python's standard library.
    if path is None:
        files = _standard_library()
        return Documents({"train": files}, files, column, lines)
    root = Path(path).expanduser()
    inside = [root] if root.is_file() else sorted(visible_files(root))
    if not root.exists() or any(file.suffix == ".parquet" for file in inside):
        tables = load_tables(path, (column,))
        splits = {name: [tables.splits[name]] for name in sorted(tables.splits)}
        if "train" not in splits:
            splits = {"train": [table for tables in splits.values() for table in tables]}
        return Documents(splits, tables.files, column, lines)
    for endings in (_JSON_ENDINGS, _TEXT_ENDINGS):
        if files := [file for file in inside if file.name.lower().endswith(endings)]:
            return Documents(_by_split(root, files), files, column, lines)
    raise DataError(
        f"data.path={path}: contains no text files (.parquet, {', '.join(_JSON_ENDINGS + _TEXT_ENDINGS)})"
    )


def _by_split(root: Path, files: list[Path]) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    for file in files:
        name = str(file.relative_to(root)).lower()
        named = (
            split for split, words in _WORDS.items() if re.search(rf"(?<![a-z])({words})(?![a-z])", name)
        )
        splits.setdefault(next(named, ""), []).append(file)
    # Use all files for training, unless some are named for training and others for validation or testing.
    if "train" not in splits or {"validation", "test"}.isdisjoint(splits):
        return {"train": files}
    if unnamed := splits.pop("", []):
        raise DataError(
            f"data.path={root}: {splits['train'][0].name} is named as training data, but {unnamed[0].name} "
            f"and {len(unnamed) - 1} others have no split in their names; rename or remove these files"
        )
    return splits


def _standard_library() -> list[Path]:
    """Return the source files of Python's standard library, without tests and documentation."""
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
    files = _LIBRARY.rglob("*.py")
    return sorted(file for file in files if not left_out & set(file.relative_to(_LIBRARY).parts))


def _texts(file: Path, *, lines: bool) -> Iterator[Text]:
    with file.open("rb") as opened:
        for part in (line for read in opened for line in read.splitlines()) if lines else [opened.read()]:
            try:
                yield part.decode("utf-8")
            except UnicodeDecodeError as error:
                yield ValueError(f"is not UTF-8 (byte {error.start}: {error.reason})")


def _json_lines(file: Path, column: str) -> Iterator[Text]:
    """Yield the texts in a JSON lines file, with empty texts for nulls."""
    try:
        with gzip.open(file, "rb") if file.suffix.lower() == ".gz" else file.open("rb") as opened:
            for line in filter(bytes.strip, opened):
                try:
                    text = json.loads(line)[column]
                    if isinstance(text, str):
                        text.encode()  # raises an error for unpaired surrogates, which JSON can contain
                except (ValueError, KeyError, TypeError) as error:
                    text = ValueError(f"not a JSON object with {column!r} ({type(error).__name__}: {error})")
                if not isinstance(text, str | ValueError | None):
                    text = ValueError(f"{column!r} is of type {type(text).__name__}, not str")
                yield text or ""
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file}: cannot be unpacked ({error}); download the file again") from error
