"""Draw costs against a setting (the paper's Figs. 4 to 7), training curves and tuning curves."""

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
class Sweep:
    """The axes, lines and panels of a figure.

    Attributes:
        x: the setting on the horizontal axis, a key of ``SETTINGS``.
        lines: the key whose values distinguish the lines: "echo_variant", a key of ``SETTINGS``, or another
            key of the arms.
        costs: the quantities on the vertical axis, one panel each: keys of ``COSTS``, or ``final_<metric>``.
    """

    x: str
    lines: str = "echo_variant"
    costs: tuple[str, ...] = ("fresh_examples",)


def draw_lines(arms: Sequence[Arm], path: Path, title: str, sweep: Sweep, caption: str = "") -> None:
    """Draw the mean cost of each arm (configuration under comparison) against a setting.

    There is one line per echo variant or other setting. A bar shows the range over an arm's searches. A
    dashed line shows the ideal cost: the cost of the baseline divided by the echoing factor. The caption
    names the arms that never reached the target.

    Args:
        arms: an outcome; see ``records.outcome``.
        path: file to write; its suffix determines the format.
        title: the quantity, with experiment and task.
        sweep: axes, lines and panels.
        caption: the caption if the quantity is not the cost of searches to a target.
    """
    words = textwrap.fill(caption or caption_of_costs(arms), _CAPTION_WIDTH)
    with style.figure(3.5, path, title, words) as drawing:
        panels = drawing.subplots(1, len(sweep.costs), squeeze=False)[0]
        for axes, cost in zip(panels, sweep.costs, strict=True):
            _draw_costs(axes, arms, sweep, cost)
        if len(line_keys(arms, sweep.lines)) > 1:
            panels[0].legend()


def caption_of_costs(arms: Sequence[Arm]) -> str:
    """Explain in a caption what the costs of searches to a target are."""
    lost = [arm["arm"] for arm in arms if not arm["fresh_examples"]]
    missed = f" No search reached the target: {', '.join(lost)}." if lost else ""
    ideal = "Dashed: baseline / e, if repeats were as good as fresh."
    return f"{caption_of_runs(arms)}; bars: min and max. {ideal}{missed}"


def _draw_costs(axes: Axes, arms: Sequence[Arm], sweep: Sweep, cost: str) -> None:
    shown = [arm for arm in arms if arm[cost]]
    by_name = {arm["arm"]: arm for arm in arms}
    for position, key in enumerate(line_keys(shown, sweep.lines)):
        line = sorted((arm for arm in shown if arm[sweep.lines] == key), key=lambda arm: float(arm[sweep.x]))
        x, of_line = [float(arm[sweep.x]) for arm in line], [arm[cost] for arm in line]
        means = [one["mean"] for one in of_line]
        name, colour, marker = look(sweep.lines, key, position)
        bars = [[one["mean"] - one["min"] for one in of_line], [one["max"] - one["mean"] for one in of_line]]
        axes.errorbar(x, means, bars, color=colour, marker=marker, markersize=4.5, capsize=3, label=name)
        ideal = [_ideal(arm, by_name.get(arm["baseline"]), cost) for arm in line]
        if any(value < mean for value, mean in zip(ideal, means, strict=True)):
            axes.plot(x, ideal, color=colour, linestyle=(0, (4, 2)), linewidth=1.1)
    values = sorted({float(arm[sweep.x]) for arm in shown})
    if sweep.x == "learning_rate" or (values and 0 < _WIDE * values[0] < values[-1]):
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,g}" for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(SETTINGS[sweep.x])
    axes.set_ylim(0, None)
    style.counts(axes, COSTS.get(cost, f"{cost.removeprefix('final_').replace('_', ' ')} at the end"), "y")


def line_keys(arms: Sequence[Arm], of: str) -> list[Any]:
    """Return the values of a setting, or the echo variants, in the order in which their lines are drawn."""
    keys = {arm[of] for arm in arms}
    return sorted(keys, key=style.variant_order) if of == "echo_variant" else sorted(keys)


def look(of: str, key: Any, position: int) -> tuple[str, str, str]:
    """Return the name, colour and marker of a line. Markers distinguish lines in a grey print."""
    if of == "echo_variant":
        return (*style.VARIANTS[key], "osD^"[position % 4])
    name = f"{SETTINGS[of]} {key:,}" if of in SETTINGS else str(key)
    return name, style.SERIES[position % len(style.SERIES)], "osD^v"[position % 5]


def _ideal(arm: Arm, baseline: Arm | None, cost: str) -> float:
    known = baseline is not None and baseline[cost] and cost != "steps"
    return float(baseline[cost]["mean"]) / float(arm["echo_factor"]) if baseline and known else math.nan


_LEAST_ERROR = 1e-3  # smaller errors are drawn at this value, because a log axis has no zero
_PANELS = 3  # number of panels in a row
# Arms of the same colour are distinguished by these dashes.
_DASHES: Any = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)), (0, (8, 2)))
AS_FIG3 = Sweep("echo_factor")
COST = "fresh examples to the target"


def draw_curves(
    curves: Sequence[Curve], path: Path, title: str, metric: str, target: float | None, sweep: Sweep = AS_FIG3
) -> None:
    """Draw one curve per arm (configuration under comparison).

    A curve is the mean over the arm's searches, with a band of one standard deviation. There is one panel per
    value of the setting ``sweep.x``. Accuracy is drawn as error on a log axis. After the end of a search, its
    curve continues with its last value.

    Args:
        curves: each with ``arm``, ``echo_variant``, ``echo_factor``, the keys of ``sweep``, and the lists
            ``fresh_examples`` and ``values`` of the metric; see ``records.collect``.
        path: file to write; its suffix determines the format.
        title: e.g. ``digits: best trial of each search``.
        metric: name of the target's metric.
        target: value of the target, drawn as a dashed line; None for no target.
        sweep: ``x`` is the setting that differs between panels, ``lines`` the setting that differs between
            colours.
    """
    panels, keys = _panels(curves, sweep), line_keys(curves, sweep.lines)
    looks = {one["arm"]: look(sweep.lines, one[sweep.lines], keys.index(one[sweep.lines])) for one in curves}
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
    """Return the mean of some curves, with a band of one standard deviation.

    Curves are interpolated linearly, and are constant after their last point. The mean begins at the first
    point that all curves have reached.

    Returns:
        The fresh examples of all points, and at each of them the mean, the mean minus one standard deviation,
        and the mean plus one.
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


def _panels(curves: Sequence[Curve], sweep: Sweep) -> list[tuple[str, list[Curve]]]:
    """Return the name and the curves of each panel. A single arm without echoing is in every panel."""
    plain = [one for one in curves if one["echo_variant"] == "none"]
    of_all = plain if len({one["arm"] for one in plain}) == 1 else []
    groups: dict[Any, list[Curve]] = {}
    for one in curves:
        if not of_all or one["echo_variant"] != "none":
            groups.setdefault(one[sweep.x], []).append(one)
    name = "e = {}" if sweep.x == "echo_factor" else f"{SETTINGS[sweep.x]} {{:,}}"
    ordered = sorted(groups.items(), key=lambda item: style.factor_order(item[0]))
    return [(name.format(key), [*of_all, *group]) for key, group in ordered] or [("", of_all)]


def _draw_panel(
    axes: Axes, curves: Sequence[Curve], metric: str, target: float | None, looks: Any, handles: Any
) -> None:
    """Draw the arms of one panel, and add one line per name to the figure's legend."""
    if target is not None:
        axes.axhline(_shown(metric, target), color=style.INK, linestyle=(0, (4, 2)), linewidth=1)
    arms = by_arm(sorted(curves, key=lambda curve: style.variant_order(curve["echo_variant"])))
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
    """Return for each search the cost of the best of its first n trials, as a function of n.

    Searches with a single trial are omitted.

    Returns:
        Curves for ``draw_curves``. Each has the number of counted trials in place of fresh examples, and
        begins with the first trial that reached the target.
    """
    curves = []
    for search in searches(row for row in rows if row["counted"]).values():
        ordered = sorted(search, key=lambda row: int(row["index"]))
        best = accumulate(map(counted_cost, ordered), lambda *costs: lowest(costs))
        known = {number: cost for number, cost in enumerate(best, 1) if cost is not None}
        if len(search) > 1 and known:
            curves.append({**ordered[0], "fresh_examples": [*known], "values": [*known.values()]})
    return curves
