"""Where the runs of each arm ended: one line per arm, one panel per quantity."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from adaecho.figures.style import FAINT, INK, MUTED, figure

Arm = dict[str, Any]

# Okabe and Ito's palette without its yellow, which is faint on white.
_COLOURS = ("#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#0072B2", "#D55E00")
_MARGIN = 1.25
_COUNTS = {"steps": "steps", "trained_examples": "examples\ntrained on", "fresh_examples": "fresh examples"}


def draw_ends(arms: list[Arm], path: Path, title: str, metric: str) -> None:
    """Dots are means over an arm's runs, bars their minimum and maximum; the band is the first arm's.

    Arms that differ only before the first underscore of their names (``s2_linear``, ``s4_linear``) have one
    colour; a line separates those that differ before it. All scales are logarithmic.

    Args:
        arms: see ``records.ends``.
        path: file to write; its suffix decides the format.
        title: what was measured where.
        metric: the target's.
    """
    name = metric.replace("_", " ")
    searched = any(arm.get("searched") for arm in arms)
    values = {"best_value": f"best {name}"} if searched else {f"final_{metric}": f"{name}\nat the end"}
    quantities = {**values, **_COUNTS}
    shown = [key for key in quantities if any(arm.get(key) for arm in arms)]
    with figure(1.25 + 0.2 * len(arms), path) as drawing:
        panels = drawing.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, key in zip(panels, shown, strict=True):
            _draw_panel(axes, arms, key)
            axes.set_xlabel(quantities[key])
        panels[0].set_yticks(range(len(arms)), [_name(arm) for arm in arms], fontsize=8.5)
        panels[0].set_ylim(len(arms) - 0.4, -0.6)
        drawing.suptitle(title, x=0.01, ha="left", fontsize=10)
        drawing.supxlabel(caption(arms), fontsize=7.5, color=MUTED, x=0.01, ha="left")


def caption(arms: list[Arm]) -> str:
    """What dots, bars and the band are, with the number of runs."""
    runs = sorted({arm["runs"] for arm in arms})
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


def _draw_panel(axes: Axes, arms: list[Arm], key: str) -> None:
    axes.set_xscale("log")
    shown = [arm[key] for arm in arms if arm.get(key)]
    low, high = min(values["min"] for values in shown), max(values["max"] for values in shown)
    axes.set_xlim(low / _MARGIN, high * _MARGIN)
    methods = list(dict.fromkeys(arm["arm"].partition("_")[2] for arm in arms))
    first = arms[0].get(key)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    if first:
        axes.axvspan(first["min"], first["max"], color="#e6e6e6", linewidth=0)
        axes.axvline(first["mean"], color=FAINT, linewidth=1, linestyle=(0, (4, 2)))
    for place, arm in enumerate(arms):
        method, values = arm["arm"].partition("_")[2], arm.get(key)
        if place and arm["arm"].partition("_")[0] != arms[place - 1]["arm"].partition("_")[0]:
            axes.axhline(place - 0.5, color="#bbbbbb", linewidth=0.6)
        if values:
            colour = _COLOURS[methods.index(method) % len(_COLOURS)] if method else INK
            axes.plot([values["min"], values["max"]], [place] * 2, color=colour, linewidth=2, alpha=0.6)
            axes.plot(values["mean"], place, "o", color=colour, markersize=5)
    _label_scale(axes)


def _label_scale(axes: Axes) -> None:
    """Few labels: steps of 1, 2, 5 in a narrow range, of 1 and 3 in a wider one, else powers of ten."""
    low, high = axes.get_xlim()
    steps = (1, 2, 5) if high / low < 30 else (1, 3) if high / low < 300 else (1,)
    axes.xaxis.set_major_locator(LogLocator(10, subs=steps))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.tick_params(axis="x", labelsize=7.5)


def short_number(value: float) -> str:
    """0.05, 200, 20k, 2M."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"
