"""Cost to the target against a setting that was swept: the form of the paper's Figs. 4 to 7."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from adaecho.figures.arms import caption_of_runs
from adaecho.figures.style import SERIES, VARIANTS, counts, figure, variant_order

_CAPTION_WIDTH = 125  # characters: more would not fit beside each other
_WIDE = 6  # ratio of a setting's largest to its smallest value from which on its axis is logarithmic
Arm = dict[str, Any]
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
    """What a figure shows.

    Attributes:
        x: the setting on the horizontal axis, a key of ``SETTINGS``.
        lines: what a line stands for: "echo_variant", a key of ``SETTINGS``, or any other key of the arms.
        costs: one panel each, keys of ``COSTS``, or ``final_<metric>``.
    """

    x: str
    lines: str = "echo_variant"
    costs: tuple[str, ...] = ("fresh_examples",)


def draw_lines(arms: Sequence[Arm], path: Path, title: str, sweep: Sweep, caption: str = "") -> None:
    """Mean cost per arm with minimum and maximum over searches, one line per variant or setting.

    Dashed, in the colour of its line: the arm's baseline divided by its factor, where it would lie if
    repeated examples were as useful as fresh ones. Arms that never reached the target are named below.

    Args:
        arms: an outcome; see ``records.outcome``.
        path: file to write; its suffix decides the format.
        title: what was measured where.
        sweep: what is drawn against what.
        caption: what is drawn, where it is not costs of searches to a target.
    """
    words = textwrap.fill(caption or caption_of_costs(arms), _CAPTION_WIDTH)
    with figure(3.5, path, title, words) as drawing:
        panels = drawing.subplots(1, len(sweep.costs), squeeze=False)[0]
        for axes, cost in zip(panels, sweep.costs, strict=True):
            _draw_panel(axes, arms, sweep, cost)
        if len(line_keys(arms, sweep.lines)) > 1:
            panels[0].legend()


def caption_of_costs(arms: Sequence[Arm]) -> str:
    """What is drawn of searches to a target."""
    lost = [arm["arm"] for arm in arms if not arm["fresh_examples"]]
    missed = f" No search reached the target: {', '.join(lost)}." if lost else ""
    ideal = "Dashed: baseline / e, if repeats were as good as fresh."
    return f"{caption_of_runs(arms)}; bars: min and max. {ideal}{missed}"


def _draw_panel(axes: Axes, arms: Sequence[Arm], sweep: Sweep, cost: str) -> None:
    shown = [arm for arm in arms if arm[cost]]
    by_name = {arm["arm"]: arm for arm in arms}
    for position, key in enumerate(line_keys(shown, sweep.lines)):
        line = sorted((arm for arm in shown if arm[sweep.lines] == key), key=lambda arm: float(arm[sweep.x]))
        x, means = [float(arm[sweep.x]) for arm in line], [arm[cost]["mean"] for arm in line]
        name, colour, marker = look(sweep.lines, key, position)
        bars = [
            [arm[cost]["mean"] - arm[cost]["min"] for arm in line],
            [arm[cost]["max"] - arm[cost]["mean"] for arm in line],
        ]
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
    counts(axes, COSTS.get(cost, f"{cost.removeprefix('final_').replace('_', ' ')} at the end"), "y")


def line_keys(arms: Sequence[Arm], of: str) -> list[Any]:
    """What lines stand for, in their order: the values of a setting, or echo variants."""
    keys = {arm[of] for arm in arms}
    return sorted(keys, key=variant_order) if of == "echo_variant" else sorted(keys)


def look(of: str, key: Any, position: int) -> tuple[str, str, str]:
    """Name, colour and marker of a line; markers tell lines apart in grey."""
    if of == "echo_variant":
        return (*VARIANTS[key], "osD^"[position % 4])
    name = f"{SETTINGS[of]} {key:,}" if of in SETTINGS else str(key)
    return name, SERIES[position % len(SERIES)], "osD^v"[position % 5]


def _ideal(arm: Arm, baseline: Arm | None, cost: str) -> float:
    known = baseline is not None and baseline[cost] and cost != "steps"
    return float(baseline[cost]["mean"]) / float(arm["echo_factor"]) if baseline and known else math.nan
