"""Where the runs of each arm ended: one line per arm, one panel per quantity."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from adaecho.figures.style import FAINT, INK, VARIANTS, figure
from adaecho.records.outcome import LESS_IS_BETTER

Arm = dict[str, Any]

# Okabe and Ito's palette without its yellow, which is faint on white.
_COLOURS = ("#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#0072B2", "#D55E00")
_MARGIN = 1.25
_SAME = 0.01  # of a count: what a batch more or less at the end of a budget makes
_NARROW = 5  # ratio of a log scale's ends below which steps of 1, 2, 5 may give fewer than two labels
_COUNTS = {"steps": "steps", "trained_examples": "examples\ntrained on", "fresh_examples": "fresh examples"}


def draw_ends(arms: list[Arm], path: Path, title: str, metric: str) -> None:
    """Dots are means over an arm's runs, bars their minimum and maximum; the band is the first arm's.

    Arms that differ only before the first underscore of their names (``s2_linear``, ``s4_linear``) have one
    colour; a line separates those that differ before it. Where each arm has an echo variant of its own, it
    has the variant's colour. Scales are logarithmic, but for a metric of which more is better.

    Args:
        arms: see ``records.outcome.ends``.
        path: file to write; its suffix decides the format.
        title: what was measured where.
        metric: the target's.
    """
    name = metric.replace("_", " ")
    searched = any(arm.get("searched") for arm in arms)
    values = {"best_value": f"best {name}"} if searched else {f"final_{metric}": f"{name}\nat the end"}
    quantities = {**values, **_COUNTS}
    evaluated = [key for key in values if any(arm.get(key) for arm in arms)]
    shown = [key for key in quantities if key in evaluated or _differs(arms, key)] or ["fresh_examples"]
    equal = [key for key in _COUNTS if key not in shown and any(arm.get(key) for arm in arms)]
    with figure(1.25 + 0.2 * len(arms), path, title, caption(arms, equal)) as drawing:
        panels = drawing.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, key in zip(panels, shown, strict=True):
            _draw_panel(axes, arms, key, shares=key in values and metric not in LESS_IS_BETTER)
            axes.set_xlabel(quantities[key])
        panels[0].set_yticks(range(len(arms)), [_name(arm) for arm in arms], fontsize=8.5)
        panels[0].set_ylim(len(arms) - 0.4, -0.6)


def _differs(arms: list[Arm], key: str) -> bool:
    """Whether arms differ in a count by more than a batch at the end of a budget does."""
    ends = [arm[key][end] for arm in arms if arm.get(key) for end in ("min", "max")]
    return bool(ends) and max(ends) > (1 + _SAME) * min(ends)


def caption(arms: list[Arm], equal: Sequence[str] = ()) -> str:
    """What dots, bars and the band are, with the number of runs, and which counts all arms have in common."""
    alike = ", ".join(_alike(arms, key) for key in equal)
    return f"{_caption(arms)}\nAlike in all arms: {alike}." if alike else _caption(arms)


def _alike(arms: list[Arm], key: str) -> str:
    known = [arm[key] for arm in arms if arm.get(key)]
    low, high = min(each["min"] for each in known), max(each["max"] for each in known)
    numbers = f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
    return f"{_COUNTS[key].replace(chr(10), ' ')} ({numbers})"


def _caption(arms: list[Arm]) -> str:
    runs = sorted({arm["runs"] for arm in arms if arm["runs"]})  # an arm without any says so in its name
    of = (
        "searches per arm, of each its best trial"
        if any(arm.get("searched") for arm in arms)
        else "runs per arm"
    )
    if runs == [1]:
        return f"One run per arm. Dashed: {arms[0]['arm']}."
    number = str(runs[0]) if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    return f"Mean, minimum and maximum over {number} {of}. Grey: those of {arms[0]['arm']}."


def _name(arm: Arm) -> str:
    lost = [f"{arm[key]} {key}" for key in ("diverged", "failed") if arm[key]]
    name: str = arm["arm"].replace("_", " ")
    return f"{name} ({', '.join(lost)})" if lost else name


def _colours(arms: list[Arm]) -> dict[str, str]:
    """The colour of each arm, by its name."""
    if len({arm["echo_variant"] for arm in arms}) == len(arms):
        return {arm["arm"]: VARIANTS[arm["echo_variant"]][1] for arm in arms}
    methods = [arm["arm"].partition("_")[2] for arm in arms]
    order = list(dict.fromkeys(methods))
    return {
        arm["arm"]: _COLOURS[order.index(method) % len(_COLOURS)] if method else INK
        for arm, method in zip(arms, methods, strict=True)
    }


def _draw_panel(axes: Axes, arms: list[Arm], key: str, shares: bool) -> None:
    shown = [arm[key] for arm in arms if arm.get(key)]
    low, high = min(values["min"] for values in shown), max(values["max"] for values in shown)
    linear = shares or low <= 0  # which a log scale has no place for
    if linear:
        axes.margins(x=0.12)
    else:
        axes.set_xscale("log")
        axes.set_xlim(low / _MARGIN, high * _MARGIN)
    colours = _colours(arms)
    grouped = len({arm["echo_variant"] for arm in arms}) < len(arms)
    first = arms[0].get(key)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    if first:
        axes.axvspan(first["min"], first["max"], color="#e6e6e6", linewidth=0)
        axes.axvline(first["mean"], color=FAINT, linewidth=1, linestyle=(0, (4, 2)))
    for place, arm in enumerate(arms):
        values = arm.get(key)
        if grouped and place and arm["arm"].partition("_")[0] != arms[place - 1]["arm"].partition("_")[0]:
            axes.axhline(place - 0.5, color="#bbbbbb", linewidth=0.6)
        if values:
            colour = colours[arm["arm"]]
            axes.plot([values["min"], values["max"]], [place] * 2, color=colour, linewidth=2, alpha=0.6)
            axes.plot(values["mean"], place, "o", color=colour, markersize=5)
    _label_scale(axes, linear, shares)


def _label_scale(axes: Axes, linear: bool, shares: bool) -> None:
    """Few labels: steps of 1, 2, 5 in a narrow range, of 1 and 3 in a wider one, else powers of ten."""
    low, high = axes.get_xlim()
    axes.tick_params(axis="x", labelsize=7.5)
    if linear or high / low < _NARROW:
        axes.xaxis.set_major_locator(MaxNLocator(3))
    else:
        steps = (1, 2, 5) if high / low < 30 else (1, 3) if high / low < 300 else (1,)
        axes.xaxis.set_major_locator(LogLocator(10, subs=steps))
    axes.xaxis.set_minor_locator(NullLocator())
    if shares:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def short_number(value: float) -> str:
    """0.05, 200, 20k, 2M."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"
