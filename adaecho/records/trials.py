"""Rows of trials: their statuses, and the table in which they are committed.

::

    {"same": {"experiment": "fig3", ...}, "columns": ["arm", ..., "hyperparameters:optimizer.momentum"],
     "rows": [
    ["baseline", ..., 0.9491],
    ...]}

The table names columns once and writes constant columns once. It has one line per trial, so a diff shows
which trial changed. A sweep's folder contains the same rows as a plain list of dicts; ``read_rows`` reads
both.
"""

import hashlib
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

from adaecho.records.files import dumps, read_json

Row = dict[str, Any]
# The tables in a folder of results: see ``records.collect``, and experiments/repeat_value for its branches.
TABLES = ("trials.json", "outcome.json", "curves.json", "branches.json")
_INSIDE = ":"  # between the name of a dict-valued column and a key of the dict


class Status(StrEnum):
    """The values of ``status`` in ``summary.json`` and in the rows of ``trials.json``."""

    RUNNING = "running"  # or killed; the same command continues the run
    PREEMPTED = "preempted"  # ended by a signal, after a checkpoint
    REACHED = "reached"  # met the target
    BUDGET_SPENT = "budget_spent"
    DIVERGED = "diverged"
    PRUNED = "pruned"  # could no longer be the best of its search
    FAILED = "failed"  # ended by an error


# Runs with these statuses are never continued.
FINISHED = frozenset({Status.REACHED, Status.BUDGET_SPENT, Status.DIVERGED, Status.PRUNED})
ENDED = FINISHED | {Status.FAILED}  # no process works on such a run


def digest(table: bytes) -> str:
    """The SHA-256 of these bytes, in hexadecimal."""
    return hashlib.sha256(table).hexdigest()


def check_metric(name: object) -> str:
    """Check the name of a metric, which becomes part of a column name (``final_<metric>``).

    Raises:
        ValueError: the name contains other characters.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w .+=/@()%,&'-]{1,200}", name):
        raise ValueError(f"metric {name!r}: use letters, digits, blanks, ._-+=/@()%,& and '")
    return name


def table_text(rows: list[Row]) -> str:
    """The table of these rows. A value that a row lacks is read back as null."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    same = {
        name: flat[0].get(name)
        for name in names
        if all(name in row and row[name] == flat[0].get(name) for row in flat)
    }
    columns = [name for name in names if name not in same]
    lines = [dumps([row.get(name) for name in columns]) for row in flat]
    head = f'{{"same": {dumps(same)},\n"columns": {dumps(columns)},\n"rows": [\n'
    return head + ",\n".join(lines) + "\n]}\n"


def read_rows(path: Path) -> Any:
    """The rows of the table in a file; a plain list of rows is returned unchanged."""
    table = read_json(path)
    if not isinstance(table, dict) or not {"same", "columns", "rows"} <= table.keys():
        return table
    return [
        _nested({**table["same"], **dict(zip(table["columns"], row, strict=True))}) for row in table["rows"]
    ]


def _flat(row: Row) -> Row:
    flat: Row = {}
    for name, value in row.items():
        if isinstance(value, dict) and value:
            flat |= {f"{name}{_INSIDE}{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    return flat


def _nested(flat: Row) -> Row:
    row: Row = {}
    for name, value in flat.items():
        outer, inside, key = name.partition(_INSIDE)
        if inside:
            row[outer] = {**(row.get(outer) or {}), **({} if value is None else {key: value})}
        else:
            row.setdefault(name, value)
    return row
