"""Documents of text: files, parquet and JSON lines with a text column, the hub, or Python's own library."""

import gzip
import hashlib
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from adaecho.datasets import hub
from adaecho.datasets.fingerprint import fingerprint_of
from adaecho.datasets.parquet import check_parts, opened, values
from adaecho.datasets.split import named_part, part_in
from adaecho.datasets.storage import files_in, warn_of_unread
from adaecho.errors import DataError, warn

Text = str | Exception
"""What a document holds, or why it can't be read."""

_TEXT_ENDINGS = (".txt", ".py", ".md")
_LOOSE = {".py", ".md"}  # pages and code, whose own names rarely tell parts
_ROW_ENDINGS = (".parquet", ".jsonl", ".json.gz", ".jsonl.gz")
_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
MOST_BYTES = 1 << 28  # of a document: to tokenize it takes some hundred times as many
_POINTERS = (b"version https://git-lfs.github.com/spec/", b"/annex/objects/")  # in the place of files
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([\w.-]+))?")


@dataclass(frozen=True)
class Files:
    """Documents in files, by part.

    Attributes:
        root: what ``data.path`` names, for a hub id where its files lie; None is Python's own library.
        parts: ``train``, and ``validation`` and ``test`` where files are named so.
        column: of parquet and JSON lines.
        lines: whether each line of a text file is a document, instead of the whole file.
    """

    root: Path | None
    parts: dict[str, list[Path]]
    column: str
    lines: bool

    def read(self, shard: Path, first: int = 0) -> Iterator[tuple[str, Text]]:
        """Documents of one file from a number on, each with what to call it in a message."""
        name = shard.name.lower()
        if name.endswith(".parquet"):
            rows = _parquet_rows(shard, self.column)
        elif name.endswith(".arrow"):
            rows = _arrow_rows(shard, self.column)
        elif name.endswith(_ROW_ENDINGS):
            rows = _json_rows(shard, self.column)
        else:
            rows = _text_rows(shard, lines=self.lines)
        for number, text in enumerate(rows):
            if number >= first:
                yield f"{shard}, document {number}", text

    def key(self) -> str:
        """Changes when a file is added, removed, or written again: names, times and ``fingerprint_of``.

        Raises:
            DataError: a file can't be read.
        """
        files = self.all()
        digests = fingerprint_of(files)
        times = [(str(path), path.stat().st_mtime_ns) for path in files]
        split = {part: [str(path) for path in of_part] for part, of_part in self.parts.items()}
        told = [times, digests, self.column, self.lines, str(self.root), split]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def sha256(self) -> str:
        """The digest of all names and contents, the same wherever they lie."""
        digest = hashlib.sha256()
        for path in self.all():
            name = str(path.relative_to(_LIBRARY if self.root is None else self.root.parent))
            digest.update(os.fsencode(f"{name}\0{path.stat().st_size}\0"))
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    def all(self) -> list[Path]:
        """The files of all parts."""
        return sorted({path for paths in self.parts.values() for path in paths})


def find_documents(path: str | None, *, column: str = "text", lines: bool = False) -> Files:
    """The documents that ``data.path`` names.

    Args:
        path: a folder, searched through, or a file: parquet or JSON lines with a column of text, or text
            files (.txt, .py, .md). Names with the word train(ing), val(id, idation), dev, eval(uation),
            held-out or test(ing) are those parts: of folders, where one for training lies beside another, or
            else of files; of pages and code, of which most are named otherwise, only folders'. Where none
            has train all are training documents. Or a hub id, owner/name, with a /configuration where the
            data set has several. None: the library of this Python.
        column: of parquet and JSON lines.
        lines: each line of a text file is a document.

    Raises:
        DataError: there is nothing of the kind, or some name a part and others none, or the hub can't be
            reached.
    """
    if path is None:
        return Files(None, {"train": _standard_library()}, column, lines)
    root = Path(path).expanduser()
    if not root.exists():
        if found := _HUB_ID.fullmatch(path):
            root, parts = _from_hub(path, *found.groups())
            return Files(root, parts, column, lines)
        raise DataError(
            f"data.path={path}: there is no such file or folder, and it is no hub id (owner/name, or "
            "owner/name/configuration)"
        )
    inside = files_in(root, _ROW_ENDINGS + _TEXT_ENDINGS)
    rows = [one for one in inside if one.name.lower().endswith(_ROW_ENDINGS)]
    texts = [one for one in inside if one.name.lower().endswith(_TEXT_ENDINGS)]
    if rows and (left_out := [one.name for one in texts if one.name.lower().endswith(".txt")]):
        warn(
            f"data.path={path}: {len(left_out)} .txt files are left out ({', '.join(left_out[:3])}), "
            f"as there are tables ({rows[0].name}); to read them instead, move those away"
        )
    files = rows or texts
    warn_of_unread(root, {*inside} - {*files})
    check_parts(rows)
    _check_once(path, rows)
    if not files:
        raise DataError(
            f"data.path={path}: holds no text: neither {', '.join(_ROW_ENDINGS)} nor "
            f"{', '.join(_TEXT_ENDINGS)}"
        )
    return Files(root, _by_part(root if root.is_dir() else root.parent, files), column, lines)


def _check_once(path: str, tables: list[Path]) -> None:
    """Raises DataError where two tables have one name but for their format, or are links to one file."""
    seen: dict[str | Path, Path] = {}
    for table in tables:
        name = re.sub(r"(\.\w+?)(\.gz)?$", "", str(table), flags=re.IGNORECASE)
        for other in (seen.setdefault(name, table), seen.setdefault(table.resolve(), table)):
            if other != table:
                raise DataError(
                    f"data.path={path}: {other} and {table} seem to hold the same documents, of which "
                    "some would be held out and trained on; move one away, or rename it"
                )


def _ending(file: Path) -> str:
    return file.suffix.lower()


def _way(root: Path, file: Path) -> tuple[str, ...]:
    """Its folders below the root and its name to the first dot, in lower case."""
    return tuple(map(str.lower, (*file.relative_to(root).parts[:-1], file.name.partition(".")[0])))


def _by_place(ways: list[tuple[str, ...]]) -> list[str]:
    """The part of each file by its folders, or its own name beside such; empty where no depth tells.

    That is the first where names beside one another are for training and for another part, or where all are
    named as parts; whole names come before words of folders'.

    Args:
        ways: of each its folders and its name to the first dot, in lower case.
    """
    for part_of, unasked in ((named_part, 0), (part_in, 1)):
        for depth in range(max(map(len, ways))):
            found = [part_of(way[depth]) if depth < len(way) - unasked else "" for way in ways]
            parents = 0 if all(found) else depth
            beside: dict[tuple[str, ...], set[str]] = {}
            for way, part in zip(ways, found, strict=True):
                beside.setdefault(way[:parents], set()).add(part)
            if any("train" in parts and len(parts - {""}) > 1 for parts in beside.values()):
                return found
    return []


def _by_part(root: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Files by the part that a folder, or else their name, says; all for training if none does."""
    parts: dict[str, list[Path]] = {}
    ways = [_way(root, file) for file in files]
    by_place = _by_place(
        [(*way[:-1], "") if _ending(file) in _LOOSE else way for file, way in zip(files, ways, strict=True)]
    )
    for row, file in enumerate(files):
        by_name, *folders = map(part_in, (file.name.lower(), *ways[row][:-1]))
        part = by_place[row] or by_name if by_place else by_name or next(filter(None, folders), "")
        parts.setdefault(part, []).append(file)
    # Of code and pages train.py and training.md are documents like the others.
    loose = "" in parts and not by_place and {*map(_ending, parts.get("train", []))} <= _LOOSE
    if "train" not in parts or loose:
        _warn_of_others(root, files, [file for file in files if _has_other_word(root, file)])
        return {"train": files}
    _warn_of_others(root, parts["train"], [])
    return _without_unnamed(root, parts, len(files))


def _has_other_word(root: Path, file: Path) -> bool:
    words = map(part_in, (*_way(root, file), file.name.lower()))
    return _ending(file) not in _LOOSE and not {"validation", "test"}.isdisjoint(words)


def _without_unnamed(root: Path, parts: dict[str, list[Path]], number: int) -> dict[str, list[Path]]:
    """The parts of so many files without those that none is named for.

    Raises:
        DataError: these are texts like those for training.
    """
    # Tables may be other splits (unsupervised, of IMDB's); texts are rather what no one has named.
    kinds = {*map(_ending, parts["train"])} & {*_TEXT_ENDINGS}
    unnamed = parts.pop("", [])
    same = [file for file in unnamed if _ending(file) in kinds]
    training, *left_out = (
        str(file.relative_to(root)) for file in (parts["train"][0], *(same or unnamed)[:3])
    )
    others = ", ".join(left_out)
    if same:
        raise DataError(
            f"data.path={root}: {training} is named as the part for training, and of {len(same)} others no "
            f"name says train, validation or test ({others}); rename the one, or move away what is not to be "
            "read"
        )
    if len(unnamed) > (number - len(unnamed) if kinds else 0):  # more than a README beside the texts
        warn(
            f"data.path={root}: {training} is named as the part for training, and {len(unnamed)} others are "
            f"left out, of which no name says train, validation or test ({others}); to read them instead, "
            "move the named away"
        )
    return parts


def _warn_of_others(root: Path, training: list[Path], named: list[Path]) -> None:
    """Warn of what is read for training though the last whole name on its way says another part.

    Args:
        named: what to warn of where there is none.
    """

    def said(file: Path) -> str:
        return next(filter(None, map(named_part, reversed(_way(root, file)))), "train")

    others = [file for file in training if said(file) != "train"] or named
    if others:
        shown = ", ".join(str(file.relative_to(root)) for file in others[:3])
        warn(
            f"data.path={root}: {len(others)} named as a part for validation or test are read for training "
            f"({shown}), as a folder for training holds them, or none lies beside them; to hold them out, "
            "lay folders named train and val or test beside one another"
        )


def _from_hub(path: str, name: str, configuration: str | None) -> tuple[Path, dict[str, list[Path]]]:
    """Where ``datasets`` keeps a data set of the hub, and its Arrow files there by part."""
    splits = hub.load(name, configuration=configuration)
    parts = {str(part): hub.files_of(split) for part, split in splits.items()}
    if "train" not in parts:
        raise DataError(
            f"data.path={path}: has no split train but {', '.join(parts)}; give a local copy of one"
        )
    named: dict[str, list[Path]] = {"train": parts.pop("train")}
    for part, files in parts.items():  # both of MNLI's validation_matched and validation_mismatched
        if (said := named_part(part) or part_in(part)) not in ("", "train"):
            named.setdefault(said, []).extend(files)
    return named["train"][0].parent, named


def _standard_library() -> list[Path]:
    """Its modules without tests, documentation and what was installed beside it, in order."""
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
    files = _LIBRARY.rglob("*.py")
    return sorted(file for file in files if not left_out & set(file.relative_to(_LIBRARY).parts))


def _text_rows(file: Path, *, lines: bool) -> Iterator[Text]:
    with file.open("rb") as opened_file:
        if opened_file.peek(64).startswith(_POINTERS):
            raise DataError(f"{file}: says where Git LFS or git-annex has it, and is not the text; fetch it")
        for line in _lines(file, opened_file) if lines else [_whole(file, opened_file)]:
            for part in line.splitlines() if lines else [line]:
                try:
                    yield part.decode("utf-8")
                except UnicodeDecodeError as error:
                    yield ValueError(f"is no UTF-8 (byte {error.start}: {error.reason})")


def _whole(file: Path, opened_file: BufferedIOBase) -> bytes:
    content = opened_file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise DataError(
            f"{file}: is one document of more than {MOST_BYTES:,} bytes; task.lines=true takes each line as "
            "one, or split it"
        )
    return content


def _lines(file: Path, opened_file: BufferedIOBase) -> Iterator[bytes]:
    """The lines of a file, perhaps unpacked, none of which may ask for more memory than there is.

    Raises:
        DataError: one is too long, or the file can't be unpacked.
    """
    number = 0
    try:
        while line := opened_file.readline(MOST_BYTES + 1):
            number += 1
            if len(line) > MOST_BYTES:
                raise DataError(
                    f"{file}, line {number}: a document of more than {MOST_BYTES:,} bytes; split it"
                )
            yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{file}, after line {number}: can't be unpacked ({error}); fetch it again"
        ) from error


def _parquet_rows(file: Path, column: str) -> Iterator[Text]:
    with opened(file) as table:
        _check_column(file, table.schema_arrow, column)
        for rows in values(table, file, column):
            yield from map(_row, rows)


def _arrow_rows(file: Path, column: str) -> Iterator[Text]:
    """Rows of a file in the cache of ``datasets``."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as table:
            _check_column(file, table.schema, column)
            for rows in table:
                for row in rows.column(column):
                    yield _row(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: not readable as Arrow ({str(error).splitlines()[0]}); delete it from the cache of "
            "datasets, which then makes it anew"
        ) from error


def _row(row: Any) -> Text:
    if row.is_valid and row.as_buffer().size > MOST_BYTES:
        return ValueError(f"is a document of more than {MOST_BYTES:,} bytes; split it")
    try:
        text = row.as_py()
    except UnicodeDecodeError as error:
        return ValueError(f"is no UTF-8 (byte {error.start}: {error.reason})")
    return "" if text is None else str(text)


def _check_column(file: Path, schema: Any, column: str) -> None:
    from pyarrow import types

    if schema.names.count(column) > 1:
        raise DataError(f"{file}: has {schema.names.count(column)} columns {column!r}; keep one of them")
    if column not in schema.names:
        raise DataError(
            f"{file}: needs a column {column!r} and has {', '.join(schema.names)}; set task.column to the "
            "one that holds text"
        )
    kind = schema.field(column).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise DataError(f"{file}: column {column!r} holds {kind}, no text; set task.column to one that does")


def _json_rows(file: Path, column: str) -> Iterator[Text]:
    packed = file.suffix.lower() == ".gz"
    if packed and not file.stat().st_size:  # which gzip takes for a whole one
        raise DataError(f"{file}: can't be unpacked (it has 0 bytes); fetch it again")
    with gzip.open(file, "rb") if packed else file.open("rb") as opened_file:
        for line in _lines(file, opened_file):
            try:
                text = json.loads(line)[column]
                if isinstance(text, str):
                    text.encode()  # JSON can write halves of characters
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                yield ValueError(f"is no JSON object with {column!r} ({type(error).__name__}: {error})")
                continue
            yield (text if isinstance(text, str) else ValueError(f"{column!r} is a {type(text).__name__}"))
