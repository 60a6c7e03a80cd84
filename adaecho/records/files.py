"""Files that are complete or absent, even if the process is killed or the disk fills."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml  # type: ignore[import-untyped]

from adaecho.errors import FolderError

# PyYAML's parser and emitter in C, if available: a trial may last only a second.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@contextmanager
def folder_errors(path: Path) -> Iterator[None]:
    """Raise an ``OSError`` inside the block as a ``FolderError`` with ``path``, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        remedy = "free space, make it writable, or choose another folder; then repeat the command"
        raise FolderError(f"{path}: {error.strerror or error}; {remedy}") from error


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that replaces ``path`` at the end of the block; an error leaves the old file.

    A library that needs a file name may write to ``Path(file.name)`` inside the block.

    Raises:
        FolderError: the disk is full, or the folder is not writable.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with folder_errors(path):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # otherwise a power cut may leave an empty file under the new name
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
    """Append ``text`` to a file, which is created if missing, and wait until it is on the disk."""
    with folder_errors(path), path.open("ab") as file:
        file.write(text.encode(errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        FolderError: the file cannot be read.
    """
    with folder_errors(path):
        return json.loads(path.read_bytes())


def read_yaml(path: Path) -> Any:
    """The value in a YAML file, by the safe loader.

    Raises:
        FolderError: the file cannot be read.
    """
    with folder_errors(path):
        return yaml.load(path.read_bytes(), _Loader)


def yaml_text(value: Any) -> str:
    """Plain values as YAML, in their order."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False))


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file without an incomplete last line; empty if the file is missing."""
    if not path.exists():
        return []
    with folder_errors(path):
        lines = path.read_bytes().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: numbers of numpy and torch become plain; NaN and infinities become null."""
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
