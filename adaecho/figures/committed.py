"""Committed tables as figures need them; one that they can't use is named, with what to do."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from adaecho.errors import DataError
from adaecho.figures.style import VARIANTS
from adaecho.figures.tables import LINES
from adaecho.masking import presentable
from adaecho.records.files import folder_errors, read_bytes, record_errors
from adaecho.records.outcome import ADASCALE, COLUMNS, COSTS, COUNTS, SETTINGS, Row
from adaecho.records.status import Status
from adaecho.records.trials import TABLES, check_metric, check_name, digest, rows_of

_LARGEST = 1e30  # no clock, metric or moment of a gradient lies beyond; what is drawn would overflow


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST  # which NaN isn't


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _passes(check: Callable[[Any], Any], value: Any) -> bool:
    try:
        check(value)
    except ValueError:
        return False
    return True


def is_name(value: Any) -> bool:
    """Whether it is a name, and no path or markup; see ``records.trials.check_name``."""
    return _passes(partial(check_name, ""), value)


def _is_column(key: str) -> bool:
    return is_name(key) or (key.startswith("final_") and _passes(check_metric, key.removeprefix("final_")))


Kind = tuple[Callable[[Any], bool], str]
"""Whether a value is one, and what to call it."""


def _or_null(is_one: Callable[[Any], bool], name: str) -> Kind:
    return lambda value: value is None or is_one(value), f"{name} or null"


_NAME: Kind = is_name, "a name (letters, digits and . _ - + =)"
_VARIANT: Kind = lambda value: value in [*VARIANTS], f"one of {', '.join(VARIANTS)}"
_FACTOR: Kind = lambda value: value == "auto" or (_is_number(value) and value >= 1), "at least 1, or auto"
_EARLIER = "stopped_hopeless"  # what a pruned trial's status was called
_STATUS: Kind = lambda value: value in [*Status, _EARLIER], f"one of {', '.join(Status)}"
_FLAG: Kind = lambda value: type(value) is bool, "true or false"
_COUNT: Kind = _is_count, "a whole number"
_COUNT_OR_NULL = _or_null(_is_count, "a whole number")
_NUMBER_OR_NULL = _or_null(_is_number, "a finite number")
_NAMED: Kind = (
    lambda value: (
        value is None
        or (type(value) is dict and all(map(is_name, value)) and all(map(_NUMBER_OR_NULL[0], value.values())))
    ),
    "names with a number each",
)
_DIRECTION: Kind = lambda value: value in (None, "min", "max"), "min or max"
_COUNTS: Kind = lambda value: type(value) is list and all(map(_is_count, value)), "a list of whole numbers"
_NUMBERS: Kind = lambda value: type(value) is list and all(map(_is_number, value)), "a list of finite numbers"

_OF_BOTH: dict[str, Kind] = {
    "arm": _NAME, "echo_variant": _VARIANT, "echo_factor": _FACTOR, "repeat": _COUNT,
}  # fmt: skip
OF_TRIALS: dict[str, Kind] = {
    **_OF_BOTH,
    **dict.fromkeys(("experiment", "task"), _NAME),
    "target_metric": (partial(_passes, check_metric), "a metric's name"),
    **dict.fromkeys(("target_value", "best_value", "R", *ADASCALE), _NUMBER_OR_NULL),
    **dict.fromkeys((*COUNTS, *COSTS, *SETTINGS, *(f"to_target_{cost}" for cost in COSTS)), _COUNT_OR_NULL),
    **dict.fromkeys(("train_time_s", "to_target_train_time_s"), _NUMBER_OR_NULL),
    "baseline": _or_null(is_name, "an arm's name"), "index": _COUNT, "status": _STATUS, "counted": _FLAG,
    "positions": _NAMED, "trials_left": _COUNT_OR_NULL, "target_direction": _DIRECTION,
}  # fmt: skip
OF_CURVES: dict[str, Kind] = {**_OF_BOTH, "fresh_examples": _COUNTS, "values": _NUMBERS}


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
    seen: set[tuple[Any, ...]] = set()
    _check(table, "row", rows, lambda row: _fault_of_row(row, table.parts[-3:-1], seen))
    if not rows:
        raise DataError(f"{table}: an empty table; {_REMEDY}")
    return list(rows)


def read_curves(table: Path, rows: list[Row]) -> list[Curve]:
    """The curves beside ``trials.json``, none where there are none.

    Raises:
        DataError: one is no curve, or of an arm that the table lacks.
    """
    path, arms = table.with_name("curves.json"), {row["arm"] for row in rows}

    def fault(curve: Curve) -> str:
        if any(key not in curve for key in OF_CURVES):
            return f"lacks one of {', '.join(OF_CURVES)}"
        if wrong := _fault(curve, OF_CURVES):
            return wrong
        if curve["arm"] not in arms:
            return f"is of no arm of {table.name} ({curve['arm']})"
        equal = len(curve["values"]) == len(curve["fresh_examples"])
        return "" if equal else "has not as many values as fresh_examples"

    curves = read_whole(path, [])
    _check(path, "curve", curves, fault)
    return [curve for curve in curves if curve["values"]]


def _check(path: Path, noun: str, entries: Any, fault: Callable[[dict[str, Any]], str]) -> None:
    """Raise DataError unless this is a list of dicts, none of which has a fault."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{path}: no list of {noun}s; {_REMEDY}")
    for number, entry in enumerate(entries):
        if wrong := fault(entry):
            raise DataError(f"{path}: {noun} {number} {wrong}; {_REMEDY}")


def _fault_of_row(row: Row, folder: tuple[str, ...], seen: set[tuple[Any, ...]]) -> str:
    """What makes a row of the table in ``<experiment>/<task>`` unusable, or nothing; remembers it as seen."""
    unnamed = [key for key in row if not _is_column(key)]
    if unnamed:
        return f"is none: its column {unnamed[0]!r} is no name"
    if wrong := _fault(row, OF_TRIALS):
        return wrong
    lines = LINES.get(row.get("experiment", ""))
    needed = (*COLUMNS, *((lines.x, lines.lines) if lines else ()))
    if missing := [column for column in needed if column not in row]:
        return f"lacks {', '.join(missing)}"
    for key, named in zip(("experiment", "task"), folder, strict=True):  # claims find tables by their folder
        if row[key] != named:
            return f"is of {key} {row[key]}, in the folder of {key} {named}"
    trial = (row["arm"], row["repeat"], row["index"])
    if trial in seen:
        return f"is trial {'/'.join(map(str, trial))} once more"
    seen.add(trial)
    return ""


def _fault(row: dict[str, Any], kinds: dict[str, Kind]) -> str:
    """The first value that isn't of its column's kind, in words; nothing where all are."""
    for key, value in row.items():
        kind = _NUMBER_OR_NULL if key.startswith("final_") else kinds.get(key)
        if kind is not None and not kind[0](value):
            return f"has {key} {str(value)[:40]}, which must be {kind[1]}"
    return ""


def read_commands(table: Path) -> list[str]:
    """The commands that made a table; none where it doesn't say."""
    origin = read_whole(table.with_name("origin.json"), {})
    commands = origin.get("commands", []) if isinstance(origin, dict) else []
    # A report shows them between such marks; with the other kind a command would be quoted otherwise.
    return [presentable(command).replace("`", "\N{ACUTE ACCENT}") for command in commands]


def read_whole(path: Path, default: Any = None) -> Any:
    """What a record holds, the one that ``origin.json`` tells of; ``default`` where it need not exist."""
    with folder_errors(path):
        content = b"" if default is not None and not path.exists() else read_bytes(path)
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
