"""Committed tables as figures need them; one that they can't use is named, with what to do."""

import json
from pathlib import Path
from typing import Any

from adaecho.errors import DataError
from adaecho.figures.columns import OF_CURVES, OF_TRIALS, fault
from adaecho.figures.tables import LINES
from adaecho.masking import presentable
from adaecho.records.files import record_errors
from adaecho.records.outcome import COLUMNS, Row
from adaecho.records.trials import TABLES, check_name, digest, rows_of

Curve = dict[str, Any]
RowsAndCurves = dict[tuple[str, str], tuple[list[Row], list[Curve]]]
"""By experiment and task."""
_REMEDY = "collect it again, or remove it"


def read_tables(results: Path) -> RowsAndCurves:
    """The rows and curves of all tables ``<experiment>/<task>/trials.json``, in the order of their names.

    Raises:
        DataError: there are no tables, or one can't be used.
    """
    tables: RowsAndCurves = {}
    for path in sorted(results.glob("*/*/trials.json")):
        with record_errors(path, DataError):
            rows = read_table(path)
            tables[path.parts[-3], path.parts[-2]] = rows, read_curves(path, rows)
    if not tables:
        raise DataError(
            f"{results}: no <experiment>/<task>/trials.json in it; "
            "`python -m adaecho.records.collect` makes them"
        )
    return tables


def read_table(table: Path) -> list[Row]:
    """The rows of ``trials.json``: each once, of the experiment and task of its folder, with all columns.

    Raises:
        DataError: it holds anything else; naming the row.
    """
    try:
        rows = rows_of(read_whole(table))
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{table}: a damaged table ({error}); {_REMEDY}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{table}: no list of rows; {_REMEDY}")
    if not rows:
        raise DataError(f"{table}: an empty table; {_REMEDY}")
    seen: set[tuple[Any, ...]] = set()
    for number, row in enumerate(rows):
        if wrong := _fault(row, table.parts[-3:-1], seen):
            raise DataError(f"{table}: row {number} {wrong}; {_REMEDY}")
    return rows


def _fault(row: Row, folder: tuple[str, ...], seen: set[tuple[Any, ...]]) -> str:
    """What makes a row of the table in ``<experiment>/<task>`` unusable, or nothing; remembers it as seen."""
    try:
        for key in row:
            check_name("column", key)
    except ValueError as error:
        return f"is none: {error}"
    if wrong := fault(row, OF_TRIALS):
        return wrong
    lines = LINES.get(row.get("experiment", ""))
    needed = (*COLUMNS, *((lines.x, lines.lines) if lines else ()))
    missing = [column for column in needed if column not in row]
    if missing:
        return f"lacks {', '.join(missing)}"
    for key, named in zip(("experiment", "task"), folder, strict=True):  # claims find tables by their folder
        if row[key] != named:
            return f"is of {key} {row[key]}, in the folder of {key} {named}"
    trial = (row["arm"], row["repeat"], row["index"])
    if trial in seen:
        return f"is trial {'/'.join(map(str, trial))} once more"
    seen.add(trial)
    return ""


def read_curves(table: Path, rows: list[Row]) -> list[Curve]:
    """The curves beside ``trials.json``, none where there are none.

    Raises:
        DataError: one is no curve, or of an arm that the table lacks.
    """
    path = table.with_name("curves.json")
    curves = read_whole(path, [])
    arms = {row["arm"] for row in rows}
    if not isinstance(curves, list):
        raise DataError(f"{path}: no list of curves; {_REMEDY}")
    for number, curve in enumerate(curves):
        if not isinstance(curve, dict) or any(key not in curve for key in OF_CURVES):
            raise DataError(f"{path}: curve {number} lacks one of {', '.join(OF_CURVES)}; {_REMEDY}")
        if wrong := fault(curve, OF_CURVES):
            raise DataError(f"{path}: curve {number} {wrong}; {_REMEDY}")
        if curve["arm"] not in arms:
            raise DataError(
                f"{path}: curve {number} is of no arm of {table.name} ({curve['arm']}); {_REMEDY}"
            )
        if len(curve["values"]) != len(curve["fresh_examples"]):
            raise DataError(f"{path}: curve {number} has not as many values as fresh_examples; {_REMEDY}")
    return [curve for curve in curves if curve["values"]]


def read_commands(table: Path) -> list[str]:
    """The commands that made a table; none where it doesn't say."""
    origin = read_whole(table.with_name("origin.json"), {})
    commands = origin.get("commands", []) if isinstance(origin, dict) else []
    return [
        presentable(command).replace("`", "'") for command in commands
    ]  # a report shows them between such marks


def read_whole(path: Path, default: Any = None) -> Any:
    """What a record holds, the one that ``origin.json`` tells of; ``default`` where it need not exist."""
    content = b"" if default is not None and not path.exists() else path.read_bytes()
    if path.name in TABLES:
        _check_whole(path, content)
    if not content and default is not None:
        return default
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: no JSON ({error}); restore it from git, or collect it again") from error


def _check_whole(table: Path, content: bytes) -> None:
    """Raise DataError unless a table is that of its ``origin.json``, if that holds digests."""
    origin = read_whole(table.with_name("origin.json"), {})
    digests = origin.get("sha256") if isinstance(origin, dict) else None
    if isinstance(digests, dict) and digests.get(table.name) != (digest(content) if content else None):
        raise DataError(
            f"{table}: not what origin.json tells of, as a collect was interrupted or it was changed since; "
            "restore it from git, or collect it again"
        )
