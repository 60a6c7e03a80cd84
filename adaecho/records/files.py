"""Read and write files so that a killed process or a full disk never leaves a half-written file."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml  # type: ignore[import-untyped]

from adaecho.errors import FolderError

# Use PyYAML's faster C parser and emitter if available, because a trial may last only a second.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@contextmanager
def folder_errors(path: Path) -> Iterator[None]:
    """Convert an ``OSError`` in the ``with`` block to a ``FolderError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        remedy = "free space, make it writable, or choose another folder; then repeat the command"
        raise FolderError(f"{path}: {error.strerror or error}; {remedy}") from error


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary binary file that replaces ``path`` if the ``with`` block succeeds."""
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
    """Atomically replace the content of a file."""
    with atomic_file(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def write_json(path: Path, value: Any) -> None:
    """Atomically write a value to a file as indented JSON (see ``dumps``)."""
    write_text(path, dumps(value, indent=2) + "\n")


def append(path: Path, text: str) -> None:
    """Append text to a file, and wait until it is on disk."""
    with folder_errors(path), path.open("ab") as file:
        file.write(text.encode(errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """Read a JSON file, or raise a ``FolderError`` that names the file."""
    with folder_errors(path):
        return json.loads(path.read_bytes())


def read_yaml(path: Path) -> Any:
    """Read a YAML file that contains only plain values."""
    with folder_errors(path):
        return yaml.load(path.read_bytes(), _Loader)


def yaml_text(value: Any) -> str:
    """Format plain values as YAML. Dicts keep the order of their keys."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False))


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, without an incomplete last line; none if the file is missing."""
    if not path.exists():
        return []
    with folder_errors(path):
        lines = path.read_bytes().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Format a value as JSON, with null for NaN and infinities. NumPy and torch scalars are allowed."""
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
