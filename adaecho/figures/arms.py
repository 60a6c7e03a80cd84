"""Each arm as a row of dots: its cost to the target (the paper's Fig. 3), or where its runs ended."""

import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from adaecho.figures.style import (
    FAINT,
    INK,
    SERIES,
    VARIANTS,
    count_axis,
    factor_order,
    figure,
    variant_order,
)
from adaecho.records.outcome import ratio_words

Arm = dict[str, Any]
_MANY_RUNS = 10  # from which on an interval of the mean says more than extremes, which grow with the number
_SHORT = {
    "none": "baseline",
    "batch": "batch",
    "example_after_augmentation": "example, after augmentation",
    "example_before_augmentation": "example, before augmentation",
    "example": "example",
}


def draw_fig3(arms: list[Arm], path: Path, title: str) -> None:
    """Mean fresh examples to the target of each arm, a row each, by echoing factor and in the paper's order.

    Lines are minimum and maximum over searches, as in the paper; over ten runs or more they are the 95 %
    interval of the mean. The dashed mark of an echoed arm is the baseline's mean divided by the factor: where
    it would be if repeated examples were as useful as fresh ones. An arm none of whose searches reached the
    target has no dot and says so.

    Args:
        arms: an outcome; see ``records.outcome``.
        path: file to write; its suffix decides the format.
        title: what was measured where, e.g. ``digits: fresh examples to 97 % validation accuracy``.
    """
    ordered = sorted(arms, key=lambda arm: (_factor(arm), variant_order(arm["echo_variant"])))
    with figure(1.0 + 0.26 * len(arms), path, title, caption_of_dots(arms)) as drawing:
        axes = drawing.add_subplot()
        largest = max((_ends(arm)[1] for arm in ordered if arm["fresh_examples"]), default=1.0)
        axes.set_xlim(0, 1.18 * largest)
        for place, arm in enumerate(ordered):
            if place and _factor(arm) != _factor(ordered[place - 1]):
                axes.axhline(place - 0.5, color="#bbbbbb", linewidth=0.6)
            _draw_cost(axes, arm, place, _common_baseline(arms))
        axes.set_yticks(range(len(ordered)), _names(ordered), fontsize=8.5)
        axes.set_ylim(len(ordered) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        count_axis(axes, "fresh examples", "x")


def _names(ordered: list[Arm]) -> list[str]:
    """Of variant and factor where these tell the arms apart, else the arms' own."""
    kinds = [(arm["echo_variant"], arm["echo_factor"]) for arm in ordered]
    names = []
    for arm, (variant, factor) in zip(ordered, kinds, strict=True):
        if kinds.count((variant, factor)) > 1:
            names.append(readable(arm["arm"]))
        else:
            names.append(_SHORT[variant] + f", e = {factor}" * (variant != "none"))
    return names


def readable(arm: str) -> str:
    """An arm's name as one says it: ``e2_steps_7000`` is "e = 2, 7,000 steps"."""
    words = re.sub(r"(?<![a-z])e(\d+)(?=_|$)", r"e = \1,", arm).replace("_", " ").rstrip(",")
    words = re.sub(r"(?<=[a-z]{3})(?=\d)", " ", words)
    return re.sub(r"\d{4,}", lambda found: f"{int(found[0]):,}", words)


def _draw_cost(axes: Axes, arm: Arm, place: int, baseline: float | None) -> None:
    costs, factor = arm["fresh_examples"], _factor(arm)
    if baseline is not None and 1 < factor < math.inf:
        axes.plot([baseline / factor] * 2, [place - 0.42, place + 0.42], color=INK, linestyle=(0, (3, 1.5)))
    notes = [f"{arm['reached']} of {arm['searches']} reached"] if arm["reached"] < arm["searches"] else []
    if arm["ratio_to_baseline"] is not None and arm["echo_variant"] != "none":
        notes.insert(0, ratio_words(arm))
    right = 0.0
    if costs is not None:
        low, high = _ends(arm) if arm["reached"] > 1 else (costs["mean"],) * 2
        colour = VARIANTS[arm["echo_variant"]][1]
        axes.plot([low, high], [place] * 2, color=colour, linewidth=2, alpha=0.6)
        axes.plot(costs["mean"], place, "o", color=colour, markersize=6)
        right = high
    text = ", ".join(notes) if costs is not None else "target not reached"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the dashed mark
    axes.annotate(
        text, (right, place), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8.5, bbox=box
    )


def caption_of_dots(arms: list[Arm]) -> str:
    """What dots, lines and the dashed marks are, with numbers of trials and searches."""
    searches = _range([arm["searches"] for arm in arms])
    trials = _range([end(arm["trials"] / arm["searches"]) for arm in arms for end in (math.floor, math.ceil)])
    many = all(arm["searches"] >= _MANY_RUNS for arm in arms)
    ends = "95 % interval of the mean" if many else "minimum and maximum"
    those = "those that reached it of " * any(arm["reached"] < arm["searches"] for arm in arms)
    if trials == searches == "1":
        dots = "Dots: one run per arm."
    elif trials == "1":
        dots = f"Dots: mean over {those}{searches} runs per arm; lines: {ends}."
    elif searches == "1":
        dots = f"Dots: best of {trials} non-divergent trials per arm (one search, so no lines)."
    else:
        dots = (
            f"Dots: mean over {those}{searches} searches per arm of the best of {trials} non-divergent "
            f"trials; lines: {ends}."
        )
    if all(arm["ratio_to_baseline"] is None for arm in arms):
        return dots
    bounds = " (> and <: bounds, as searches missed)" if any("ratio_bound" in arm for arm in arms) else ""
    if _common_baseline(arms) is None:
        return f"{dots}\nNumbers: ratio to the arm's own baseline{bounds}."
    return (
        f"{dots}\nDashed: baseline / e, if repeats were as useful as fresh examples.\n"
        f"Numbers: ratio to the baseline{bounds}."
    )


def _common_baseline(arms: list[Arm]) -> float | None:
    """The mean of the one baseline that all arms have; None where there are several, or it wasn't reached."""
    names = {arm["baseline"] for arm in arms} - {None}
    plain = [arm for arm in arms if arm["arm"] in names]
    reached = len(plain) == 1 and plain[0]["fresh_examples"]
    return plain[0]["fresh_examples"]["mean"] if reached else None


def _range(numbers: list[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _ends(arm: Arm) -> tuple[float, float]:
    """The two ends of the line of an arm that reached the target."""
    costs = arm["fresh_examples"]
    has_interval = arm["searches"] >= _MANY_RUNS and "low" in costs
    return (costs["low"], costs["high"]) if has_interval else (costs["min"], costs["max"])


def _factor(arm: Arm) -> float:
    return factor_order(arm["echo_factor"])


_MARGIN = 1.25
_LONGEST_LINE = 36  # letters of an arm's name: longer ones would leave the panels no room
_SAME = 0.01  # of a count: what a batch more or less at the end of a budget makes
_NARROW = 5  # ratio of a log scale's ends below which steps of 1, 2, 5 may give fewer than two labels
_COUNTS = {"steps": "steps", "trained_examples": "examples\ntrained on", "fresh_examples": "fresh examples"}


def draw_ends(arms: list[Arm], path: Path, title: str, metric: str) -> None:
    """Dots are means over an arm's runs, bars their minimum and maximum; the band is the first arm's.

    Arms that differ only before the first underscore of their names (``s2_linear``, ``s4_linear``) have one
    colour; a line separates those that differ before it. Where arms of an echo variant have one name, but for
    its factor, they have the variant's colour. Scales are logarithmic, but for a metric of which more is
    better.

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
    names = [textwrap.fill(_name(arm), _LONGEST_LINE) for arm in arms]
    row_inches = 0.07 + 0.13 * max(name.count("\n") + 1 for name in names)
    with figure(1.25 + row_inches * len(arms), path, title, caption(arms, equal)) as drawing:
        panels = drawing.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, key in zip(panels, shown, strict=True):
            _draw_panel(axes, arms, key, shares=key in values and _is_share(arms, key, metric))
            axes.set_xlabel(quantities[key] + " (log)" * (axes.get_xscale() == "log"), fontsize=8.5)
        panels[0].set_yticks(range(len(arms)), names, fontsize=8.5)
        panels[0].set_ylim(len(arms) - 0.4, -0.6)


def _is_share(arms: list[Arm], key: str, metric: str) -> bool:
    """Whether a metric is a part of all: of one's own it isn't known, and then it is a number."""
    highest = max((arm[key]["max"] for arm in arms if arm.get(key)), default=0)
    return highest <= 1 and (metric == "accuracy" or metric.startswith("mAP"))


def _differs(arms: list[Arm], key: str) -> bool:
    """Whether arms differ in a count by more than a batch at the end of a budget does."""
    ends = [arm[key][end] for arm in arms if arm.get(key) for end in ("min", "max")]
    return bool(ends) and max(ends) > (1 + _SAME) * min(ends)


def caption(arms: list[Arm], equal: Sequence[str] = ()) -> str:
    """What dots, bars and the band are, with the number of runs, and which counts all arms have in common."""
    alike = ", ".join(_alike(arms, key) for key in equal)
    whose = "all arms" if all(arm["runs"] for arm in arms) else "arms that ended a run"
    return f"{_caption(arms)}\nAlike in {whose}: {alike}." if alike else _caption(arms)


def _alike(arms: list[Arm], key: str) -> str:
    known = [arm[key] for arm in arms if arm.get(key)]
    low, high = min(each["min"] for each in known), max(each["max"] for each in known)
    numbers = f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
    return f"{_COUNTS[key].replace(chr(10), ' ')} ({numbers})"


def _caption(arms: list[Arm]) -> str:
    runs = sorted({arm["runs"] for arm in arms if arm["runs"]})  # an arm without any says so in its name
    if not runs:
        return "No run came to the end of its budgets."
    searched = any(arm.get("searched") for arm in arms)
    of = "searches per arm, of each its best trial" if searched else "runs per arm"
    if runs == [1]:
        one = "The best trial of one search" if searched else "One run"
        return f"{one} per arm. Dashed: {arms[0]['arm']}."
    number = str(runs[0]) if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    return f"Mean, minimum and maximum over {number} {of}. Grey: those of {arms[0]['arm']}."


def _name(arm: Arm) -> str:
    lost = [f"{arm[key]} {key}" for key in ("diverged", "failed") if arm[key]]
    name = readable(arm["arm"])
    return f"{name} ({', '.join(lost)})" if lost else name


def _colours(arms: list[Arm]) -> dict[str, str]:
    """The colour of each arm, by its name."""
    named = {(arm["echo_variant"], re.sub(r"_e[\d.]+$", "", arm["arm"])) for arm in arms}
    if len(named) == len({variant for variant, _ in named}) > 1:
        return {arm["arm"]: VARIANTS[arm["echo_variant"]][1] for arm in arms}
    methods = [arm["arm"].partition("_")[2] for arm in arms]
    order = list(dict.fromkeys(filter(None, methods)))
    return {
        arm["arm"]: SERIES[order.index(method) % len(SERIES)] if method else INK
        for arm, method in zip(arms, methods, strict=True)
    }


def _draw_panel(axes: Axes, arms: list[Arm], key: str, shares: bool) -> None:
    shown = [arm[key] for arm in arms if arm.get(key)]
    low = min((values["min"] for values in shown), default=0)  # where no run has ended there are none
    high = max((values["max"] for values in shown), default=0)
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
        axes.xaxis.set_major_formatter(FuncFormatter(_share))
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def _share(value: float, _: int) -> str:
    return f"{100 * value:.4g} %" if value < 1 + 1e-9 else ""  # dots at 100 % have a margin beside them


def short_number(value: float) -> str:
    """0.05, 200, 20k, 2M."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"
