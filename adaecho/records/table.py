"""Format the results of a sweep as a text table, for the terminal and for Markdown pages."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

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

# A terminal of 80 characters has room only for the TERMINAL columns; a page shows PAGE columns too.
TERMINAL, PAGE = range(2)


class Column(NamedTuple):
    """One column of the result table of a sweep.

    Attributes:
        cells: the text of each cell, one per compared configuration.
        medium: ``TERMINAL`` if the column is shown in terminals and on Markdown pages, ``PAGE`` if it is
            shown only on Markdown pages.
    """

    heading: str
    cells: list[str]
    medium: int


def as_clock(seconds: float) -> str:
    """Format a duration in seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def summarize(rows: list[Row]) -> list[Row]:
    """Summarize each arm by ``outcome``, or by ``ends`` if the experiment has no target."""
    return ends(rows) if without_target(rows) else outcome(rows)


def end_of_sweep(rows: list[Row], arms: list[Row]) -> list[Column]:
    """Return the columns of the table that summarizes a sweep, with one row per compared configuration.

    "fresh examples" is the mean number needed to reach the target, and "range" shows the lowest and highest.
    ``-`` marks a missing value, and columns without any value are left out.

    Args:
        rows: the trials of the sweep.
        arms: the result of ``summarize(rows)``.
    """
    columns = _ends_columns(arms) if without_target(rows) else _cost_columns(arms, rows)
    laid_out = [Column(heading, [cell(arm) for arm in arms], medium) for heading, cell, medium in columns]
    return [column for column in laid_out if set(column.cells) != {"-"}]


_Columns = list[tuple[str, Callable[[Row], str], int]]


def _cost_columns(arms: list[Row], rows: list[Row]) -> _Columns:
    with_interval = any(arm["ratio_low"] is not None for arm in arms)
    return [
        ("arm", _text("arm"), TERMINAL),
        ("fresh examples", _mean("fresh_examples", ",.0f"), TERMINAL),
        # A terminal has room for only one of the columns "range" and "95% interval".
        ("range", lambda arm: _cost_range(arm, rows), PAGE if with_interval else TERMINAL),
        ("ratio", lambda arm: "-" if arm["ratio_to_baseline"] is None else ratio_words(arm), TERMINAL),
        *([("95% interval", ratio_interval, TERMINAL)] if with_interval else []),
        ("steps", _mean("steps", ",.0f"), TERMINAL),
        ("seconds", _mean("train_time_s", ",.1f"), TERMINAL),
        ("searches that reached", lambda arm: f"{arm['reached']} of {arm['searches']}", PAGE),
        ("trials", _text("trials"), PAGE),
        ("diverged", _text("diverged"), TERMINAL),
        ("missed", _text("missed"), TERMINAL if any(arm["missed"] for arm in arms) else PAGE),
        ("failed", _text("failed"), PAGE),
    ]


def _ends_columns(arms: list[Row]) -> _Columns:
    columns: _Columns = [("arm", _text("arm"), TERMINAL)]
    form = ".4f"
    metrics = [key for key in (arms[0] if arms else {}) if key.startswith("final_")]
    for number, key in enumerate(metrics):
        medium = TERMINAL if number < 2 else PAGE  # a terminal has no room for detection's six metrics
        columns += [
            (key.removeprefix("final_").replace("_", " "), _mean(key, form), medium),
            ("range", _range(key, form), PAGE),
        ]
    return [
        *columns,
        ("best", _mean("best_value", form), PAGE),
        *((key.removesuffix("_examples"), _mean(key, ",.0f"), TERMINAL) for key in COUNTS),
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
    """Format the 95% confidence interval of an arm's cost ratio; ``-`` if there is none."""
    return "-" if arm["ratio_low"] is None else f"{arm['ratio_low']:.2f} to {arm['ratio_high']:.2f}"


def _cost_range(arm: Row, rows: list[Row]) -> str:
    if arm["searches"] > 1:
        return _span(arm["fresh_examples"], ",")
    costs = [counted_cost(row) for row in rows if row["arm"] == arm["arm"]]
    return _span(spread([cost for cost in costs if cost is not None]), ",")


def terminal_table(columns: list[Column]) -> Any:
    """Build a table for the library ``rich``, with the columns that fit into a terminal."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    names, *shown = [one for one in columns if one.medium == TERMINAL and set(one.cells) != {"0"}]
    table.add_column(names.heading, overflow="fold", min_width=12)
    for column in shown:
        heading = re.sub(r" (?!%)", "\n", column.heading)  # keeps a number and its unit on one line
        table.add_column(heading, justify="right", no_wrap=True)
    for name, *cells in zip(names.cells, *(column.cells for column in shown), strict=True):
        table.add_row(name, *("-" if cell == "0" else cell.replace(" to ", "-") for cell in cells))
    return table
