"""The end of a sweep as a table of text, computed here once; terminal, Markdown and HTML only lay it out."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adaecho.records.outcome import (
    COUNTS,
    Row,
    counted_cost,
    ends,
    outcome,
    ratio_words,
    spread,
    without_target,
)

# Which columns a medium has room for: a narrow terminal, one of 80 columns, a page.
NARROW, TERMINAL, PAGE = range(3)


@dataclass(frozen=True)
class Column:
    """A heading, one cell per arm, and the least medium that shows it."""

    heading: str
    cells: list[str]
    medium: int


def as_clock(seconds: float) -> str:
    """A duration as minutes and seconds, with the hours before them where there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def summarize(rows: list[Row]) -> list[Row]:
    """One dict per arm: costs to the target, or where the runs ended if there was none."""
    return ends(rows) if without_target(rows) else outcome(rows)


def end_of_sweep(rows: list[Row], arms: list[Row]) -> list[Column]:
    """The columns of the table for these trials and what ``summarize`` makes of them.

    With several searches per arm a cost is the mean of their best trials and its range theirs; with one, the
    best trial's, and the range that of all its trials that reached the target. ``-`` where an arm has none,
    and no column where all have none.
    """
    if without_target(rows):
        columns = _ends_columns(arms, decimals_of(validation_images(rows)))
    else:
        columns = _cost_columns(arms, rows)
    laid_out = [Column(heading, [cell(arm) for arm in arms], medium) for heading, cell, medium in columns]
    return [column for column in laid_out if set(column.cells) != {"-"}]


def validation_images(rows: list[Row]) -> int | None:
    """How many images are held out; None where the rows don't say, or not the same."""
    numbers = {row.get("validation_images") for row in rows}
    return numbers.pop() if len(numbers) == 1 else None


def decimals_of(number: int | None) -> int:
    """Decimals of a metric that so many held-out images carry: of 20, one makes 0.05. Else four."""
    return 4 if number is None else min(max(math.ceil(math.log10(number)), 1), 4)


_SHORT = {"fresh_examples": "fresh", "trained_examples": "trained"}
_Columns = list[tuple[str, Callable[[Row], str], int]]


def _cost_columns(arms: list[Row], rows: list[Row]) -> _Columns:
    with_interval = any(arm["ratio_low"] is not None for arm in arms)
    return [
        ("arm", _text("arm"), NARROW),
        ("fresh examples", _mean("fresh_examples", ",.0f"), NARROW),
        # A terminal has room for one of the two; where several searches allow an interval, it says more.
        ("range", lambda arm: _cost_range(arm, rows), PAGE if with_interval else TERMINAL),
        ("ratio", lambda arm: "-" if arm["ratio_to_baseline"] is None else ratio_words(arm), NARROW),
        *([("95 % interval", ratio_interval, TERMINAL)] if with_interval else []),
        ("steps", _mean("steps", ",.0f"), TERMINAL),
        ("seconds", _mean("train_time_s", ",.1f"), TERMINAL),
        ("searches that reached", lambda arm: f"{arm['reached']} of {arm['searches']}", PAGE),
        ("trials", _text("trials"), PAGE),
        ("diverged", _text("diverged"), TERMINAL),
        ("missed", _text("missed"), NARROW if any(arm["missed"] for arm in arms) else PAGE),
        ("failed", _text("failed"), PAGE),
    ]


def _ends_columns(arms: list[Row], decimals: int) -> _Columns:
    columns: _Columns = [("arm", _text("arm"), NARROW)]
    form = f".{decimals}f"
    metrics = [key for key in (arms[0] if arms else {}) if key.startswith("final_")]
    for number, key in enumerate(metrics):
        columns += [
            # Detection has six of them: more than two would leave a terminal no room for the arms' names.
            (key.removeprefix("final_").replace("_", " "), _mean(key, form), NARROW if number < 2 else PAGE),
            ("range", _range(key, form), PAGE),
        ]
    return [
        *columns,
        ("best", _mean("best_value", form), PAGE),
        *((_SHORT.get(key, key).replace("_", " "), _mean(key, ",.0f"), TERMINAL) for key in COUNTS),
        ("mean gain", _mean("mean_gain", ".2f"), TERMINAL),
        ("runs", _text("runs"), TERMINAL),
        ("diverged", _text("diverged"), TERMINAL),
        ("failed", _text("failed"), PAGE),
    ]


def _text(key: str) -> Callable[[Row], str]:
    return lambda arm: str(arm[key])


def _mean(key: str, form: str) -> Callable[[Row], str]:
    return lambda arm: format(arm[key]["mean"], form) if arm[key] else "-"


def _range(key: str, form: str) -> Callable[[Row], str]:
    return lambda arm: _span(arm[key], form)


def _span(spread: dict[str, Any] | None, form: str) -> str:
    return f"{spread['min']:{form}} to {spread['max']:{form}}" if spread else "-"


def ratio_interval(arm: Row) -> str:
    """The 95 % interval of an arm's ratio to its baseline."""
    return "-" if arm["ratio_low"] is None else f"{arm['ratio_low']:.2f} to {arm['ratio_high']:.2f}"


def _cost_range(arm: Row, rows: list[Row]) -> str:
    if arm["searches"] > 1:
        return _span(arm["fresh_examples"], ",")
    costs = [counted_cost(row) for row in rows if row["arm"] == arm["arm"]]
    return _span(spread([cost for cost in costs if cost is not None]), ",")
