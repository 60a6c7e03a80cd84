"""Committed tables as figures need them."""

from pathlib import Path
from typing import Any

from adaecho.errors import DataError
from adaecho.records.files import read_json
from adaecho.records.outcome import Row
from adaecho.records.trials import read_rows

Curve = dict[str, Any]
RowsAndCurves = dict[tuple[str, str], tuple[list[Row], list[Curve]]]
"""By experiment and task."""


def read_tables(results: Path) -> RowsAndCurves:
    """The rows and curves of all tables ``<experiment>/<task>/trials.json``, in the order of their names.

    Raises:
        DataError: there are no tables.
        FolderError: one is no JSON.
    """
    tables = {
        (path.parts[-3], path.parts[-2]): (read_rows(path), read_beside(path, "curves.json", []))
        for path in sorted(results.glob("*/*/trials.json"))
    }
    if not tables:
        raise DataError(
            f"{results}: no <experiment>/<task>/trials.json in it; "
            "`python -m adaecho.records.collect` makes them"
        )
    return tables


def read_commands(table: Path) -> list[str]:
    """The commands that made a table; none where it doesn't say."""
    commands: list[str] = read_beside(table, "origin.json", {}).get("commands", [])
    return commands


def read_beside(table: Path, name: str, default: Any) -> Any:
    """What a record beside a table holds; ``default`` where there is none."""
    path = table.with_name(name)
    return read_json(path) if path.exists() else default
