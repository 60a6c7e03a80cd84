"""Rows of trials as a file: a table whose columns are named once and whose constant columns are written once.

::

    {"same": {"experiment": "fig3", ...}, "columns": ["arm", ..., "hyperparameters:optimizer.momentum"],
     "rows": [
    ["baseline", ..., 0.9491],
    ...]}

One line per trial: small, and a difference shows which trial changed. A sweep's folder holds the same rows as
a plain list of dicts; both are read.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

from adaecho.records.files import dumps, read_json

Row = dict[str, Any]
# Of a folder of results: see ``records.collect``, and experiments/repeat_value for its branches.
TABLES = ("trials.json", "outcome.json", "curves.json", "branches.json")
_INSIDE = ":"  # between the name of a dict-valued column and a key of it


def digest(table: bytes) -> str:
    """A name for these bytes."""
    return hashlib.sha256(table).hexdigest()


def check_metric(name: object) -> str:
    """The name of a metric, which becomes a column's (``final_<metric>``) and stands in a report.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w .+=/@()%,&'-]{1,200}", name):
        raise ValueError(f"metric {name!r} is no name (letters, digits, blanks, ._-+=/@()%,& and ')")
    return name


def table_text(rows: list[Row]) -> str:
    """The table of these rows; what a row lacks is read back as null."""
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
    """The rows that a file holds; see ``rows_of``."""
    return rows_of(read_json(path))


def rows_of(table: Any) -> Any:
    """The rows of a table that was read; a plain list of rows is left as it is."""
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
