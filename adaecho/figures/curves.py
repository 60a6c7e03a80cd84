"""Figures with curves: costs against a setting (the paper's Figs. 4 to 7), training and tuning curves."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from adaecho.figures import style
from adaecho.figures.arms import caption_of_runs
from adaecho.records.outcome import Row, by_arm, counted_cost, lowest, searches

Arm = dict[str, Any]
Curve = dict[str, Any]
_CAPTION_WIDTH = 125  # number of characters that fit into a line
_WIDE = 6  # an axis is logarithmic if the ratio of its largest to its smallest value exceeds this
COSTS = {"fresh_examples": "fresh examples", "train_time_s": "wall time (s)", "steps": "SGD steps"}
SETTINGS = {
    "echo_factor": "echoing factor e",
    "batch_size": "batch size",
    "shuffle_buffer": "shuffle buffer (examples)",
    "batch_shuffle_buffer": "shuffle buffer (batches)",
    "learning_rate": "learning rate",
}


@dataclass(frozen=True)
class Plot:
    """The layout of a figure: which quantities its axes show, and what distinguishes its lines."""

    # The setting on the horizontal axis of draw_lines. draw_curves has one panel for each value instead.
    x: str
    lines: str = "echo_variant"  # setting that distinguishes lines or colors
    # The quantities on the vertical axes of draw_lines, with one panel for each.
    costs: tuple[str, ...] = ("fresh_examples",)


def draw_lines(arms: Sequence[Arm], path: Path, title: str, plot: Plot, caption: str = "") -> None:
    """Plot the mean cost of each configuration (arm) against a setting such as the echoing factor.

    There is one line per value of a second setting, such as the echo variant. Bars show the minimum and
    maximum over hyperparameter searches. A dashed line shows the ideal cost: the baseline's cost divided by
    the echoing factor.

    Args:
        arms: the result of ``records.table.summarize``.
        caption: text below the figure; by default ``caption_of_costs``.
    """
    words = textwrap.fill(caption or caption_of_costs(arms), _CAPTION_WIDTH)
    with style.figure(3.5, path, title, words) as drawing:
        panels = drawing.subplots(1, len(plot.costs), squeeze=False)[0]
        for axes, cost in zip(panels, plot.costs, strict=True):
            _draw_costs(axes, arms, plot, cost)
        if len(line_keys(arms, plot.lines)) > 1:
            panels[0].legend()


def caption_of_costs(arms: Sequence[Arm]) -> str:
    """Return the default caption of ``draw_lines``."""
    lost = [arm["arm"] for arm in arms if not arm["fresh_examples"]]
    missed = f" No search reached the target: {', '.join(lost)}." if lost else ""
    ideal = "Dashed: baseline / e, if repeats were as good as fresh."
    return f"{caption_of_runs(arms)}; bars: min and max. {ideal}{missed}"


def _draw_costs(axes: Axes, arms: Sequence[Arm], plot: Plot, cost: str) -> None:
    shown = [arm for arm in arms if arm[cost]]
    by_name = {arm["arm"]: arm for arm in arms}
    for position, key in enumerate(line_keys(shown, plot.lines)):
        line = sorted((arm for arm in shown if arm[plot.lines] == key), key=lambda arm: float(arm[plot.x]))
        x, of_line = [float(arm[plot.x]) for arm in line], [arm[cost] for arm in line]
        means = [one["mean"] for one in of_line]
        name, color, marker = look(plot.lines, key, position)
        bars = [[one["mean"] - one["min"] for one in of_line], [one["max"] - one["mean"] for one in of_line]]
        axes.errorbar(x, means, bars, color=color, marker=marker, markersize=4.5, capsize=3, label=name)
        ideal = [_ideal(arm, by_name.get(arm["baseline"]), cost) for arm in line]
        if any(value < mean for value, mean in zip(ideal, means, strict=True)):
            axes.plot(x, ideal, color=color, linestyle=(0, (4, 2)), linewidth=1.1)
    values = sorted({float(arm[plot.x]) for arm in shown})
    if plot.x == "learning_rate" or (values and 0 < _WIDE * values[0] < values[-1]):
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,g}" for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(SETTINGS[plot.x])
    axes.set_ylim(0, None)
    style.counts(axes, COSTS.get(cost, f"{cost.removeprefix('final_').replace('_', ' ')} at the end"), "y")


def line_keys(arms: Sequence[Arm], of: str) -> list[Any]:
    """Return the values of the setting ``of``, in the order in which their lines are drawn."""
    keys = {arm[of] for arm in arms}
    return sorted(keys, key=style.variant_order) if of == "echo_variant" else sorted(keys)


def look(of: str, key: Any, position: int) -> tuple[str, str, str]:
    """Return the legend text, color and marker of a line."""
    if of == "echo_variant":
        return (*style.VARIANTS[key], "osD^"[position % 4])
    name = f"{SETTINGS[of]} {key:,}" if of in SETTINGS else str(key)
    return name, style.SERIES[position % len(style.SERIES)], "osD^v"[position % 5]


def _ideal(arm: Arm, baseline: Arm | None, cost: str) -> float:
    known = baseline is not None and baseline[cost] and cost != "steps"
    return float(baseline[cost]["mean"]) / float(arm["echo_factor"]) if baseline and known else math.nan


_LEAST_ERROR = 1e-3  # smaller errors are drawn at this value, because a log axis has no zero
_PANELS = 3  # number of panels in a row
# Arms of the same color are distinguished by these dashes.
_DASHES: Any = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)), (0, (8, 2)))
AS_FIG3 = Plot("echo_factor")
COST = "fresh examples to the target"


def draw_curves(
    curves: Sequence[Curve], path: Path, title: str, metric: str, target: float | None, plot: Plot = AS_FIG3
) -> None:
    """Plot a validation metric during training, with one mean curve for each configuration."""
    # There is one dict per hyperparameter search, whose lists fresh_examples and values are the points of the
    # curve. Its other keys are arm, echo_variant, plot.x and plot.lines. For tuning_curves, metric is COST.
    panels, keys = _panels(curves, plot), line_keys(curves, plot.lines)
    looks = {one["arm"]: look(plot.lines, one[plot.lines], keys.index(one[plot.lines])) for one in curves}
    rows = math.ceil(len(panels) / _PANELS)
    columns = math.ceil(len(panels) / rows)  # for example, four panels make two rows of two
    with style.figure(1.3 + 2.1 * rows, path, title) as drawing:
        grid = drawing.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        handles: dict[str, Any] = {}
        for axes, (name, group) in zip(grid.flat, panels, strict=False):
            _draw_panel(axes, group, metric, target, looks, handles)
            axes.set_title(name, fontsize=9.5, loc="center")
            axes.tick_params(labelbottom=True)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        _label(grid, curves, metric)
        if target is not None:  # write its name outside the panel, where it hides no curve
            height = _shown(metric, target)
            grid[0, -1].annotate(
                "target", (1, height), xytext=(4, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", fontsize=8, color=style.MUTED,
            )  # fmt: skip
        drawing.legend(handles.values(), handles, loc="outside lower left", ncols=2)


def mean_and_band(
    curves: Sequence[Curve], metric: str
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Average several training curves, with a band of one standard deviation around the mean.

    The curves are interpolated linearly, and stay constant after their last point. The mean starts where all
    curves have started. Accuracies are converted to errors, and averaged on a log scale.

    Returns:
        Arrays [points]: numbers of fresh examples, mean, lower end and upper end of the band.
    """
    to_axis, from_axis = (np.log, np.exp) if metric == "accuracy" else (np.asarray, np.asarray)
    places = np.unique(np.concatenate([curve["fresh_examples"] for curve in curves]))  # [points], ascending
    places = places[places >= max(curve["fresh_examples"][0] for curve in curves)]
    shown = [to_axis(_shown(metric, np.asarray(curve["values"], float))) for curve in curves]
    values = np.array(  # float64 [curves, points], on the axis that is drawn
        [np.interp(places, curve["fresh_examples"], each) for curve, each in zip(curves, shown, strict=True)]
    )
    mean, std = values.mean(0), values.std(0)
    return places, from_axis(mean), from_axis(mean - std), from_axis(mean + std)


def _panels(curves: Sequence[Curve], plot: Plot) -> list[tuple[str, list[Curve]]]:
    """Return the name and curves of each panel. If there is one baseline, every panel shows its curves."""
    plain = [one for one in curves if one["echo_variant"] == "none"]
    of_all = plain if len({one["arm"] for one in plain}) == 1 else []
    groups: dict[Any, list[Curve]] = {}
    for one in curves:
        if not of_all or one["echo_variant"] != "none":
            groups.setdefault(one[plot.x], []).append(one)
    name = "e = {}" if plot.x == "echo_factor" else f"{SETTINGS[plot.x]} {{:,}}"
    ordered = sorted(groups.items(), key=lambda item: style.factor_order(item[0]))
    return [(name.format(key), [*of_all, *group]) for key, group in ordered] or [("", of_all)]


def _draw_panel(
    axes: Axes, curves: Sequence[Curve], metric: str, target: float | None, looks: Any, handles: Any
) -> None:
    """Draw the curves of one panel, and add new names to the legend of the figure."""
    if target is not None:
        axes.axhline(_shown(metric, target), color=style.INK, linestyle=(0, (4, 2)), linewidth=1)
    arms = by_arm(sorted(curves, key=lambda curve: style.variant_order(curve["echo_variant"])))
    names = [looks[arm][0] for arm in arms]
    for position, (arm, of_arm) in enumerate(arms.items()):
        name, color, _ = looks[arm]
        x, mean, low, high = mean_and_band(of_arm, metric)
        if len(of_arm) > 1:
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        dashes = _DASHES[names[:position].count(name) % len(_DASHES)]
        label = arm.replace("_", " ")
        (line,) = axes.plot(x, mean, color=color, linewidth=1.3, linestyle=dashes, label=label)
        axes.plot(x[-1:], mean[-1:], "o", color=color, markersize=4.5, clip_on=False, zorder=3)
        handles.setdefault(name, line)  # the legend shows the first line, which is solid
    if len({*names}) < len(names) <= len(_DASHES):  # a longer legend would hide the curves
        axes.legend(fontsize=7.5, loc="upper right")


def _shown(metric: str, value: Any) -> Any:
    return np.maximum(1 - value, _LEAST_ERROR) if metric == "accuracy" else value


def _label(grid: Any, curves: Sequence[Curve], metric: str) -> None:
    """Set the labels and ticks of all panels, which share their axes."""
    axes = grid[0, 0]
    for each in grid.flat:
        style.counts(each, "trials of the search" if metric == COST else "fresh examples", "x")
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
        # In a narrow range, ticks at 1, 2 and 5 would leave a single label.
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)) if high > 2 * low else MaxNLocator(4))
        axes.yaxis.set_major_formatter(style.per_cent)
        axes.yaxis.set_minor_formatter(NullFormatter())
    for first in grid[:, 0]:
        first.set_ylabel(words, fontsize=8.5)


def tuning_curves(rows: Sequence[Row]) -> list[Curve]:
    """Return how the lowest cost decreases with the number of trials, for each hyperparameter search."""
    # A cost is the number of fresh examples to the target. Diverged trials do not count, and a search with a
    # single trial has no curve.
    curves = []
    for search in searches(row for row in rows if row["counted"]).values():
        ordered = sorted(search, key=lambda row: int(row["index"]))
        best = accumulate(map(counted_cost, ordered), lambda *costs: lowest(costs))
        known = {number: cost for number, cost in enumerate(best, 1) if cost is not None}
        if len(search) > 1 and known:
            # draw_curves takes the horizontal axis from fresh_examples. Here it is the number of trials.
            curves.append({**ordered[0], "fresh_examples": [*known], "values": [*known.values()]})
    return curves
