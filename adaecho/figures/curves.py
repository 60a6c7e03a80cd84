"""Training curves of the best trials: mean and standard deviation per arm (paper, Figs. 9 to 15).

Drawn alike, tuning curves: what the best trial so far costs, over the trials of a search."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from adaecho.figures.lines import SETTINGS, Sweep, line_keys, look
from adaecho.figures.style import (
    INK,
    MUTED,
    count_formatter,
    count_scale,
    factor_order,
    figure,
    variant_order,
)
from adaecho.records.outcome import Row, by_arm, counted_cost, lowest, searches

Curve = dict[str, Any]
_LEAST_ERROR = 1e-3  # a log axis has no zero: what is drawn there is as much or less
_PANELS = 3  # in a row
_NARROW = 2.0  # ratio of the largest error to the least
# Of arms that share a colour; more names than these would cover the panel.
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)), (0, (8, 2)))
AS_FIG3 = Sweep("echo_factor")
COST = "fresh examples to the target"


def draw_curves(
    curves: Sequence[Curve], path: Path, title: str, metric: str, target: float | None, sweep: Sweep = AS_FIG3
) -> None:
    """One line per arm: the mean over its searches, within one standard deviation; one panel per setting.

    A few arms of one colour in a panel (three sizes of the training set, say) differ in their dashes, and
    the panel names them. A search that has reached the target stays where it ended. Accuracy is drawn as
    error on a log axis, near a target of 97 % the whole contest is between 90 and 97 %; mean and deviation
    are of the logarithm then.

    Args:
        curves: each with ``arm``, ``echo_variant``, ``echo_factor``, what ``sweep`` names, and the
            lists ``fresh_examples`` and ``values`` of the metric; see ``records.collect``.
        path: file to write; its suffix decides the format.
        title: what was trained, e.g. ``digits: best trial of each search``.
        metric: name of the target's metric.
        target: its value, drawn as a dashed line; None for none.
        sweep: what has a panel of its own (its ``x``), and what lines are told apart by.
    """
    panels = _panels(curves, sweep)
    keys = line_keys(curves, sweep.lines)
    looks = {one["arm"]: look(sweep.lines, one[sweep.lines], keys.index(one[sweep.lines])) for one in curves}
    rows = math.ceil(len(panels) / _PANELS)
    columns = math.ceil(len(panels) / rows)  # four panels are two rows of two
    with figure(1.3 + 2.1 * rows, path, title) as drawing:
        axes = drawing.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        for unused in axes[len(panels) :]:
            unused.set_axis_off()
        names: dict[str, Line2D] = {}
        for panel, (name, group) in zip(axes, panels, strict=False):
            _scale(panel, curves, metric)
            names |= _draw_panel(panel, group, metric, target, looks)
            panel.set_title(name, fontsize=9.5, loc="center")
        low, high = axes[0].get_ylim()
        if metric == "accuracy" and high < _NARROW * low:  # steps of 1, 2, 5 would leave one label
            for panel in axes[: len(panels)]:
                panel.yaxis.set_major_locator(MaxNLocator(4))
        if target is not None:
            _name_target(axes[columns - 1], _shown(metric, target))
        for panel in axes[::columns]:
            panel.set_ylabel(_axis_label(metric), fontsize=8.5)
        for panel in axes[max(len(panels) - columns, 0) : len(panels)]:
            panel.tick_params(labelbottom=True)
            unit = count_scale(_largest(curves))[1]
            panel.set_xlabel(f"{'trials of the search' if metric == COST else 'fresh examples'}{unit}")
        lines = list(names.values())
        drawing.legend(lines, list(names), loc="outside lower left", ncols=2, frameon=False, fontsize=8.5)


def mean_and_band(
    curves: Sequence[Curve], metric: str
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The fresh examples of the curves' points, the mean of what is shown there, and one standard deviation.

    Between its points a curve is straight; after its last it stays; the mean begins where all have begun.
    """
    to_axis, from_axis = (np.log, np.exp) if metric == "accuracy" else (np.asarray, np.asarray)
    places = np.unique(np.concatenate([curve["fresh_examples"] for curve in curves]))  # [points], rising
    places = places[places >= max(curve["fresh_examples"][0] for curve in curves)]
    shown = [to_axis(_shown(metric, np.asarray(curve["values"], float))) for curve in curves]
    values = np.array(  # float64 [curves, points], on the axis that is drawn
        [np.interp(places, curve["fresh_examples"], each) for curve, each in zip(curves, shown, strict=True)]
    )
    mean, std = values.mean(0), values.std(0)
    return places, from_axis(mean), from_axis(mean - std), from_axis(mean + std)


def _panels(curves: Sequence[Curve], sweep: Sweep) -> list[tuple[str, list[Curve]]]:
    """Name and curves of each; an arm without echoing that is the only one stands in every panel."""
    plain = [one for one in curves if one["echo_variant"] == "none"]
    of_all = plain if len({one["arm"] for one in plain}) == 1 else []
    groups: dict[Any, list[Curve]] = {}
    for one in curves:
        if not of_all or one["echo_variant"] != "none":
            groups.setdefault(one[sweep.x], []).append(one)
    if not groups:
        return [("", of_all)]
    ordered = sorted(groups.items(), key=lambda item: factor_order(item[0]))
    name = "e = {}" if sweep.x == "echo_factor" else f"{SETTINGS[sweep.x]} {{:,}}"
    return [(name.format(key), [*of_all, *group]) for key, group in ordered]


def _draw_panel(
    axes: Axes, curves: Sequence[Curve], metric: str, target: float | None, looks: dict[str, Any]
) -> dict[str, Line2D]:
    """Draw the arms of one panel; returns a line per name for the legend."""
    if target is not None:
        axes.axhline(_shown(metric, target), color=INK, linestyle=(0, (4, 2)), linewidth=1)
    arms = by_arm(sorted(curves, key=lambda curve: variant_order(curve["echo_variant"])))
    by_name: dict[str, list[str]] = {}
    for arm in arms:
        by_name.setdefault(looks[arm][0], []).append(arm)
    lines: dict[str, Line2D] = {}
    told_apart = len(by_name) < len(arms) <= len(_DASHES)
    for name, alike in by_name.items():
        for position, arm in enumerate(alike):
            dashes = _DASHES[position if told_apart else 0]
            line = _draw_arm(axes, arms[arm], metric, looks[arm][1], dashes)
            line.set_label(arm.replace("_", " "))
            lines.setdefault(name, line)  # the first one is solid
    if told_apart:
        axes.legend(frameon=False, fontsize=7.5, loc="upper right")
    return lines


def _draw_arm(axes: Axes, searches: Sequence[Curve], metric: str, colour: str, dashes: Any) -> Line2D:
    x, mean, low, high = mean_and_band(searches, metric)
    if len(searches) > 1:
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    (line,) = axes.plot(x, mean, color=colour, linewidth=1.3, linestyle=dashes)
    axes.plot(x[-1:], mean[-1:], "o", color=colour, markersize=4.5, clip_on=False, zorder=3)
    return line


def _name_target(axes: Axes, height: float) -> None:
    """Name the target beside the last panel, where no curve can run through it."""
    axes.annotate(
        "target",
        (1, height),
        xytext=(4, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=MUTED,
    )


def _shown(metric: str, value: Any) -> Any:
    return np.maximum(1 - value, _LEAST_ERROR) if metric == "accuracy" else value


def _floored(curves: Sequence[Curve]) -> bool:
    return any(1 - value < _LEAST_ERROR for curve in curves for value in curve["values"])


def _error_label(value: float, _: int, floored: bool) -> str:
    return "≤ " * (floored and math.isclose(value, _LEAST_ERROR)) + f"{100 * value:.10g} %"


def _axis_label(metric: str) -> str:
    if metric == COST:
        return metric
    if metric == "accuracy":
        return "validation error (log)"
    unit = ", nats" if metric == "cross_entropy" else ""
    return f"validation {metric.replace('_', ' ')}{unit}"


def _largest(curves: Sequence[Curve]) -> int:
    return max((curve["fresh_examples"][-1] for curve in curves), default=1)


def _scale(axes: Axes, curves: Sequence[Curve], metric: str) -> None:
    largest = _largest(curves)
    axes.set_xlim(0, 1.03 * largest)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(count_formatter(count_scale(largest)[0]))
    axes.grid(color="#dddddd", linewidth=0.6)
    if metric == COST:
        axes.yaxis.set_major_formatter(count_formatter(1))
    if metric == "accuracy":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(partial(_error_label, floored=_floored(curves))))
        axes.yaxis.set_minor_formatter(NullFormatter())


def tuning_curves(rows: Sequence[Row]) -> list[Curve]:
    """One curve per search of several trials that reached the target: the cheapest of its first n trials.

    A trial that was stopped early had already cost more than one that ran before it, or beside it.

    Returns:
        Curves as ``draw_curves`` takes them, with the number of counted trials in place of fresh examples,
        from the first trial on that reached the target.
    """
    found = searches(row for row in rows if row["counted"]).values()
    return [curve for search in found if len(search) > 1 and (curve := _tuning_curve(search)) is not None]


def _tuning_curve(search: Sequence[Row]) -> Curve | None:
    ordered = sorted(search, key=lambda row: int(row["index"]))
    best = list(accumulate(map(counted_cost, ordered), lambda *costs: lowest(costs)))
    known = {number: cost for number, cost in enumerate(best, 1) if cost is not None}
    if not known:
        return None
    return {**ordered[0], "metric": COST, "fresh_examples": [*known], "values": [*known.values()]}
