"""Files that are whole or absent, whenever the process is killed or the disk fills."""

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml  # type: ignore[import-untyped]

from adaecho.errors import FolderError
from adaecho.masking import masked

# The parser and emitter in C where PyYAML has them: a trial may last a second.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@contextmanager
def folder_errors(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` inside into a ``FolderError`` that names ``path``, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FolderError(
                f"{path}: the disk is full; free some space and run the same command again: a run continues "
                "from its last checkpoint"
            ) from error
        raise FolderError(
            f"{path}: {error.strerror or error}; make it writable, or choose another folder"
        ) from error


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes ``path`` when the block ends without an error; else the old one stays.

    What writes files by name may write to ``Path(file.name)`` instead, in the block.

    Raises:
        FolderError: the disk is full or the folder can't be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with folder_errors(path):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # a power cut would leave an empty file under the new name
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` atomically."""
    with atomic_file(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by indented JSON atomically; see ``dumps``."""
    write_text(path, dumps(value, indent=2) + "\n")


def append(path: Path, text: str) -> None:
    """Add ``text`` to the end of a file, which is made if it is missing, and have it reach the disk."""
    with folder_errors(path), path.open("ab") as file:
        file.write(text.encode(errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        FolderError: it can't be read or is no JSON.
    """
    return _parsed(path, json.loads)


def read_yaml(path: Path) -> Any:
    """The value in a YAML file.

    Raises:
        FolderError: it can't be read or is no YAML.
    """
    return _parsed(path, lambda data: yaml.load(data, _Loader))


def _parsed(path: Path, parse: Any) -> Any:
    with folder_errors(path):
        data = path.read_bytes()
    try:
        return parse(data)
    except (ValueError, yaml.YAMLError) as error:
        raise FolderError(f"{path}: damaged ({error}). Restore it, or start anew with fresh=true") from error


def yaml_text(value: Any) -> str:
    """Plain values as YAML, in their order, urls without credentials."""
    return str(yaml.dump(masked(value), Dumper=_Dumper, sort_keys=False))


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that end in a newline: without a torn last one; none where the file is missing."""
    if not path.exists():
        return []
    with folder_errors(path):
        lines = path.read_bytes().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: numbers of numpy and torch become plain, NaN and infinities (which JSON lacks) null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
