"""Training curves of the best trials: mean and standard deviation per arm (paper, Figs. 9 to 15).

Drawn alike, tuning curves: what the best trial so far costs, over the trials of a search."""

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from adaecho.figures.lines import SETTINGS, Sweep, line_keys, look
from adaecho.figures.style import INK, MUTED, counts, factor_order, figure, per_cent, variant_order
from adaecho.records.outcome import Row, by_arm, counted_cost, lowest, searches

Curve = dict[str, Any]
_LEAST_ERROR = 1e-3  # a log axis has no zero: what is drawn there is as much or less
_PANELS = 3  # in a row
# Of arms that share a colour.
_DASHES: Any = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)), (0, (8, 2)))
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
    panels, keys = _panels(curves, sweep), line_keys(curves, sweep.lines)
    looks = {one["arm"]: look(sweep.lines, one[sweep.lines], keys.index(one[sweep.lines])) for one in curves}
    rows = math.ceil(len(panels) / _PANELS)
    columns = math.ceil(len(panels) / rows)  # four panels are two rows of two
    with figure(1.3 + 2.1 * rows, path, title) as drawing:
        grid = drawing.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        handles: dict[str, Any] = {}
        for axes, (name, group) in zip(grid.flat, panels, strict=False):
            _draw_panel(axes, group, metric, target, looks, handles)
            axes.set_title(name, fontsize=9.5, loc="center")
            axes.tick_params(labelbottom=True)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        _label(grid, curves, metric)
        if target is not None:  # named beside a panel, where no curve can run through it
            height = _shown(metric, target)
            grid[0, -1].annotate(
                "target", (1, height), xytext=(4, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", fontsize=8, color=MUTED,
            )  # fmt: skip
        drawing.legend(handles.values(), handles, loc="outside lower left", ncols=2)


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
    name = "e = {}" if sweep.x == "echo_factor" else f"{SETTINGS[sweep.x]} {{:,}}"
    ordered = sorted(groups.items(), key=lambda item: factor_order(item[0]))
    return [(name.format(key), [*of_all, *group]) for key, group in ordered] or [("", of_all)]


def _draw_panel(
    axes: Axes, curves: Sequence[Curve], metric: str, target: float | None, looks: Any, handles: Any
) -> None:
    """Draw the arms of one panel; adds a line per name for the legend of the figure."""
    if target is not None:
        axes.axhline(_shown(metric, target), color=INK, linestyle=(0, (4, 2)), linewidth=1)
    arms = by_arm(sorted(curves, key=lambda curve: variant_order(curve["echo_variant"])))
    names = [looks[arm][0] for arm in arms]
    for position, (arm, of_arm) in enumerate(arms.items()):
        name, colour, _ = looks[arm]
        x, mean, low, high = mean_and_band(of_arm, metric)
        if len(of_arm) > 1:
            axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        dashes = _DASHES[names[:position].count(name) % len(_DASHES)]
        label = arm.replace("_", " ")
        (line,) = axes.plot(x, mean, color=colour, linewidth=1.3, linestyle=dashes, label=label)
        axes.plot(x[-1:], mean[-1:], "o", color=colour, markersize=4.5, clip_on=False, zorder=3)
        handles.setdefault(name, line)  # the first one is solid
    if len({*names}) < len(names) <= len(_DASHES):  # more would cover the panel
        axes.legend(fontsize=7.5, loc="upper right")


def _shown(metric: str, value: Any) -> Any:
    return np.maximum(1 - value, _LEAST_ERROR) if metric == "accuracy" else value


def _label(grid: Any, curves: Sequence[Curve], metric: str) -> None:
    """Words and ticks of all panels, whose axes are shared."""
    axes = grid[0, 0]
    for each in grid.flat:
        counts(each, "trials of the search" if metric == COST else "fresh examples", "x")
        each.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        each.grid(axis="y")
    axes.set_xlim(0, 1.03 * max((curve["fresh_examples"][-1] for curve in curves), default=1))
    words = f"validation {metric.replace('_', ' ')}{', nats' * (metric == 'cross_entropy')}"
    if metric == COST:
        words = metric
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif metric == "accuracy":
        words = "validation error (log)"
        low, high = axes.get_ylim()
        axes.set_yscale("log")
        # Steps of 1, 2, 5 would leave a narrow range one label.
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)) if high > 2 * low else MaxNLocator(4))
        axes.yaxis.set_major_formatter(per_cent)
        axes.yaxis.set_minor_formatter(NullFormatter())
    for first in grid[:, 0]:
        first.set_ylabel(words, fontsize=8.5)


def tuning_curves(rows: Sequence[Row]) -> list[Curve]:
    """One curve per search of several trials that reached the target: the cheapest of its first n trials.

    A trial that was stopped early had already cost more than one that ran before it, or beside it.

    Returns:
        Curves as ``draw_curves`` takes them, with the number of counted trials in place of fresh examples,
        from the first trial on that reached the target.
    """
    curves = []
    for search in searches(row for row in rows if row["counted"]).values():
        ordered = sorted(search, key=lambda row: int(row["index"]))
        best = accumulate(map(counted_cost, ordered), lambda *costs: lowest(costs))
        known = {number: cost for number, cost in enumerate(best, 1) if cost is not None}
        if len(search) > 1 and known:
            curves.append({**ordered[0], "fresh_examples": [*known], "values": [*known.values()]})
    return curves
