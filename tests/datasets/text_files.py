"""Small real text for tests: modules of this Python's standard library."""

import sysconfig
from pathlib import Path

import pyarrow
from pyarrow import parquet

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
MODULES = (
    "abc.py", "bisect.py", "calendar.py", "cmd.py", "copy.py", "csv.py", "heapq.py", "queue.py", "shlex.py",
)  # fmt: skip


def texts() -> list[str]:
    return [(LIBRARY / name).read_text(encoding="utf-8") for name in MODULES]


def lines() -> list[str]:
    return [line.strip() for text in texts() for line in text.splitlines() if line.strip()]


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(MODULES, texts(), strict=True):
        (folder / name).write_text(text)
    return folder


def write_parquet(path: Path, values: list[object], column: str = "text", kind: object = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({column: pyarrow.array(values, type=kind)}), path)
    return path
