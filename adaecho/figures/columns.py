"""What the values of a table's columns must be, whoever wrote it and whatever happened to it since."""

from collections.abc import Callable
from typing import Any

from adaecho.figures.style import VARIANTS
from adaecho.records.outcome import ADASCALE, COSTS, COUNTS, SETTINGS
from adaecho.records.status import Status
from adaecho.records.trials import check_name

_LARGEST = 1e30  # no clock, metric or moment of a gradient lies beyond; what is drawn would overflow


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST  # which NaN isn't


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_name(value: Any) -> bool:
    try:
        return bool(check_name("", value))
    except ValueError:
        return False


Kind = tuple[Callable[[Any], bool], str]
"""Whether a value is one, and what to call it."""

_NAME: Kind = _is_name, "a name (letters, digits and . _ - + =)"
_NAME_OR_NULL: Kind = lambda value: value is None or _is_name(value), "an arm's name or null"
_VARIANT: Kind = lambda value: value in [*VARIANTS], f"one of {', '.join(VARIANTS)}"
_FACTOR: Kind = lambda value: value == "auto" or (_is_number(value) and value >= 1), "at least 1, or auto"
_EARLIER = "stopped_hopeless"  # what a pruned trial's status was called
_STATUS: Kind = lambda value: value in [*Status, _EARLIER], f"one of {', '.join(Status)}"
_FLAG: Kind = lambda value: type(value) is bool, "true or false"
_COUNT: Kind = _is_count, "a whole number"
_COUNT_OR_NULL: Kind = lambda value: value is None or _is_count(value), "a whole number or null"
_NUMBER_OR_NULL: Kind = lambda value: value is None or _is_number(value), "a finite number or null"
_NAMED: Kind = (
    lambda value: value is None or (type(value) is dict and all(map(_NUMBER_OR_NULL[0], value.values()))),
    "names with a number each",
)
_COUNTS: Kind = lambda value: type(value) is list and all(map(_is_count, value)), "a list of whole numbers"
_NUMBERS: Kind = lambda value: type(value) is list and all(map(_is_number, value)), "a list of finite numbers"

_OF_BOTH: dict[str, Kind] = {
    "arm": _NAME, "echo_variant": _VARIANT, "echo_factor": _FACTOR, "repeat": _COUNT,
}  # fmt: skip
OF_TRIALS: dict[str, Kind] = {
    **_OF_BOTH,
    **dict.fromkeys(("experiment", "task", "target_metric"), _NAME),
    **dict.fromkeys(("target_value", "best_value", "R", *ADASCALE), _NUMBER_OR_NULL),
    **dict.fromkeys((*COUNTS, *COSTS, *SETTINGS, *(f"to_target_{cost}" for cost in COSTS)), _COUNT_OR_NULL),
    **dict.fromkeys(("train_time_s", "to_target_train_time_s"), _NUMBER_OR_NULL),
    "baseline": _NAME_OR_NULL,
    "index": _COUNT,
    "status": _STATUS,
    "counted": _FLAG,
    "positions": _NAMED,
}
OF_CURVES: dict[str, Kind] = {**_OF_BOTH, "fresh_examples": _COUNTS, "values": _NUMBERS}


def fault(row: dict[str, Any], kinds: dict[str, Kind]) -> str:
    """The first value that isn't of its column's kind, in words; nothing where all are."""
    for key, value in row.items():
        kind = _NUMBER_OR_NULL if key.startswith("final_") else kinds.get(key)
        if kind is not None and not kind[0](value):
            return f"has {key} {str(value)[:40]}, which must be {kind[1]}"
    return ""
