"""Define the statuses of trials (training runs of a sweep), and read and write the table of all trials.

The table is a compact JSON file, with one trial per line::

    {"same": {"experiment": "fig3", "task": "digits"},
    "columns": ["arm", "index", "hyperparameters:optimizer.momentum", "best_value"],
    "rows": [
    ["baseline", 0, 0.9, 0.9491],
    ["batch_e2", 0, 0.8, 0.9512]
    ]}

``same`` contains the values that are equal in all rows. A colon in the name of a column separates the name
of a dict from one of its keys. The folder of a sweep contains the same rows as a plain list of dicts, and
``read_rows`` reads both formats.
"""

from enum import StrEnum
from pathlib import Path
from typing import Any

from adaecho.records.files import dumps, read_json

Row = dict[str, Any]
# The tables in a folder of results. ``records.collect`` describes the first three; experiments/repeat_value
# writes branches.json.
TABLES = ("trials.json", "outcome.json", "curves.json", "branches.json")
_INSIDE = ":"  # separates the name of a column of dicts from a key of the dicts


class Status(StrEnum):
    """The status of a trial, as recorded in ``summary.json`` and in ``trials.json``."""

    RUNNING = "running"  # running, or killed; the same command continues a killed run
    PREEMPTED = "preempted"  # stopped by a signal, after the run wrote a checkpoint
    REACHED = "reached"  # reached the target
    BUDGET_SPENT = "budget_spent"
    DIVERGED = "diverged"
    PRUNED = "pruned"  # stopped because it could no longer be the best trial of its search
    FAILED = "failed"  # stopped by an error


# A run with one of these statuses is complete and is never continued.
FINISHED = frozenset({Status.REACHED, Status.BUDGET_SPENT, Status.DIVERGED, Status.PRUNED})
ENDED = FINISHED | {Status.FAILED}  # the run is over; if it failed, a new attempt may continue it


def table_text(rows: list[Row]) -> str:
    """Format rows as the table that the module describes. Missing values become null."""
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
    """Read the rows of trials, from the compact table or from a plain list of rows."""
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
