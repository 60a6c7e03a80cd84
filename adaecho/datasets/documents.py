"""Documents of text: text files, JSON lines, tables (parquet, the hub), or Python's own library."""

import gzip
import json
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaecho.datasets.stored import load
from adaecho.errors import DataError

Text = str | Exception
"""What a document holds, or why it can't be read."""

_TEXT_ENDINGS = (".txt", ".py", ".md")
_JSON_ENDINGS = (".jsonl", ".json.gz", ".jsonl.gz")
_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_WORDS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing"}


@dataclass(frozen=True)
class Documents:
    """Documents by part.

    Attributes:
        parts: ``train``, and ``validation`` and ``test`` where there are such: files, or splits of
            ``datasets``.
        files: that all these are read from.
        column: of tables and JSON lines.
        lines: whether each line of a text file is a document, instead of the whole file.
    """

    parts: dict[str, list[Any]]
    files: list[Path]
    column: str
    lines: bool

    @property
    def held_out(self) -> str | None:
        """The part to validate on: ``validation``, else ``test``; None where there is neither."""
        return next((part for part in ("validation", "test") if part in self.parts), None)

    def read(self, shard: Any, first: int = 0) -> Iterator[tuple[str, Text]]:
        """Documents of one file, or split, from a number on, each with what to call it in a message."""
        if not isinstance(shard, Path):
            rows = shard.select(range(first, len(shard))).with_format("arrow").iter(1000)
            texts = (text for batch in rows for text in batch[self.column].to_pylist())
            for number, text in enumerate(texts, first):
                yield f"{shard.split}, document {number}", "" if text is None else text
            return
        is_json = shard.name.lower().endswith(_JSON_ENDINGS)
        rows = _json_rows(shard, self.column) if is_json else _text_rows(shard, lines=self.lines)
        for number, text in enumerate(rows):
            if number >= first:
                yield f"{shard}, document {number}", text


def find_documents(path: str | None, *, column: str = "text", lines: bool = False) -> Documents:
    """The documents that ``data.path`` names.

    Args:
        path: a folder, searched through, with parquet files, JSON lines with a column of text, or text files
            (.txt, .py, .md); one such file of text or JSON lines; or a hub id (see ``stored.load``). Where
            some files have the word train in their name or that of a folder, and others val(id, idation), dev
            or test, these are the parts; else all are for training. None: the library of this Python.
        column: of tables and JSON lines.
        lines: each line of a text file is a document.

    Raises:
        DataError: there is nothing of the kind.
    """
    if path is None:
        files = _standard_library()
        return Documents({"train": files}, files, column, lines)
    root = Path(path).expanduser()
    inside = [root] if root.is_file() else sorted(_visible(root))
    if not root.exists() or any(file.suffix == ".parquet" for file in inside):
        stored = load(path, (column,))
        parts = {name: [stored.splits[name]] for name in sorted(stored.splits)}
        if "train" not in parts:
            parts = {"train": [split for splits in parts.values() for split in splits]}
        return Documents(parts, stored.files, column, lines)
    for endings in (_JSON_ENDINGS, _TEXT_ENDINGS):
        if files := [file for file in inside if file.name.lower().endswith(endings)]:
            return Documents(_by_part(root, files), files, column, lines)
    raise DataError(
        f"data.path={path}: holds no text: neither .parquet nor {', '.join(_JSON_ENDINGS + _TEXT_ENDINGS)}"
    )


def _visible(root: Path) -> Iterator[Path]:
    """The files in a folder and all below it that are not hidden."""
    for one in root.iterdir() if root.is_dir() else ():
        if one.name[0] != ".":
            yield from _visible(one) if one.is_dir() else [one]


def _by_part(root: Path, files: list[Path]) -> dict[str, list[Path]]:
    parts: dict[str, list[Path]] = {}
    for file in files:
        name = str(file.relative_to(root)).lower()
        said = (part for part, words in _WORDS.items() if re.search(rf"(?<![a-z])({words})(?![a-z])", name))
        parts.setdefault(next(said, ""), []).append(file)
    if "train" not in parts or {"validation", "test"}.isdisjoint(parts):
        return {"train": files}
    if unnamed := parts.pop("", []):
        raise DataError(
            f"data.path={root}: {parts['train'][0].name} is named as for training, and no name says what "
            f"{unnamed[0].name} and {len(unnamed) - 1} others are for; rename them, or move away "
            "what is not to be read"
        )
    return parts


def _standard_library() -> list[Path]:
    """Its modules without tests, documentation and what was installed beside it, in order."""
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
    files = _LIBRARY.rglob("*.py")
    return sorted(file for file in files if not left_out & set(file.relative_to(_LIBRARY).parts))


def _text_rows(file: Path, *, lines: bool) -> Iterator[Text]:
    with file.open("rb") as opened:
        for part in (line for read in opened for line in read.splitlines()) if lines else [opened.read()]:
            try:
                yield part.decode("utf-8")
            except UnicodeDecodeError as error:
                yield ValueError(f"is no UTF-8 (byte {error.start}: {error.reason})")


def _json_rows(file: Path, column: str) -> Iterator[Text]:
    try:
        with gzip.open(file, "rb") if file.suffix.lower() == ".gz" else file.open("rb") as opened:
            for line in opened:
                try:
                    text = json.loads(line)[column]
                    if isinstance(text, str):
                        text.encode()  # JSON can write halves of characters
                except (ValueError, KeyError, TypeError) as error:
                    yield ValueError(f"is no JSON object with {column!r} ({type(error).__name__}: {error})")
                    continue
                yield text if isinstance(text, str) else ValueError(f"{column!r} is a {type(text).__name__}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file}: can't be unpacked ({error}); fetch it again") from error
