"""Figures with one row per configuration (arm) of an experiment: costs to the target, or final results."""

import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from adaecho.figures import style
from adaecho.records.outcome import ratio_words

Arm = dict[str, Any]
# With at least this many runs, show the interval of the mean instead of the minimum and maximum, because the
# range between extremes grows with the number of runs.
_MANY_RUNS = 10
_SHORT = {
    "none": "baseline",
    "batch": "batch",
    "example_after_augmentation": "example, after augmentation",
    "example_before_augmentation": "example, before augmentation",
    "example": "example",
}
# Arm names are wrapped to lines of at most this many characters, to leave room for the panels.
_LONGEST_LINE = 36


def draw_fig3(arms: list[Arm], path: Path, title: str) -> None:
    """Plot how many fresh examples each configuration needs to reach the target, as in the paper's Fig. 3.

    A dot shows the mean over hyperparameter searches. A line shows the minimum and maximum or, for ten or
    more searches, the 95% interval of the mean. A dashed mark shows the ideal cost: the baseline's mean cost
    divided by the echoing factor.

    Args:
        arms: the result of ``records.outcome.outcome``.
    """
    arms = sorted(arms, key=lambda arm: (_factor(arm), style.variant_order(arm["echo_variant"])))
    with style.figure(1.0 + 0.26 * len(arms), path, title, caption_of_dots(arms)) as drawing:
        axes = drawing.add_subplot()
        axes.set_xlim(0, 1.18 * max((_ends(arm)[1] for arm in arms if arm["fresh_examples"]), default=1.0))
        for place, arm in enumerate(arms):
            _draw_cost(axes, arm, place, _common_baseline(arms))
        _rows(axes, _names(arms), [_factor(arm) for arm in arms])
        style.counts(axes, "fresh examples", "x")


def _rows(axes: Axes, names: list[str], groups: Sequence[Any]) -> None:
    """Label the rows of a plot, and separate groups of rows by lines."""
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    for place in range(1, len(groups)):
        if groups[place] != groups[place - 1]:
            axes.axhline(place - 0.5, color="#bbbbbb", linewidth=0.6)


def _dot(axes: Axes, place: int, mean: float, ends: tuple[float, float], color: str) -> None:
    axes.plot(ends, [place] * 2, color=color, linewidth=2, alpha=0.6)
    axes.plot(mean, place, "o", color=color, markersize=6)


def _names(arms: list[Arm]) -> list[str]:
    """Label each row with its echo variant and factor, or with its name if several rows share both."""
    kinds = [(arm["echo_variant"], arm["echo_factor"]) for arm in arms]
    return [
        readable(arm["arm"])
        if kinds.count((variant, factor)) > 1
        else _SHORT[variant] + f", e = {factor}" * (variant != "none")
        for arm, (variant, factor) in zip(arms, kinds, strict=True)
    ]


def readable(arm: str) -> str:
    """Return a configuration's name in readable form, e.g. "e = 2, steps 7,000" for ``e2_steps_7000``."""
    words = re.sub(r"(?<![a-z])e(\d+)(?=_|$)", r"e = \1,", arm).replace("_", " ").rstrip(",")
    words = re.sub(r"(?<=[a-z]{3})(?=\d)", " ", words)
    return re.sub(r"\d{4,}", lambda found: f"{int(found[0]):,}", words)


def _draw_cost(axes: Axes, arm: Arm, place: int, baseline: float | None) -> None:
    costs, factor, right = arm["fresh_examples"], _factor(arm), 0.0
    if baseline is not None and 1 < factor < math.inf:
        axes.plot(
            [baseline / factor] * 2, [place - 0.42, place + 0.42], color=style.INK, linestyle=(0, (3, 1.5))
        )
    notes = []
    if arm["ratio_to_baseline"] is not None and arm["echo_variant"] != "none":
        notes.append(ratio_words(arm))
    if arm["reached"] < arm["searches"]:
        notes.append(f"{arm['reached']} of {arm['searches']} reached" if costs else "target not reached")
    if costs:
        _dot(axes, place, costs["mean"], _ends(arm), style.VARIANTS[arm["echo_variant"]][1])
        right = _ends(arm)[1]
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # keeps the note readable on the dashed mark
    axes.annotate(
        ", ".join(notes), (right, place), xytext=(8, 0), textcoords="offset points", va="center",
        fontsize=8.5, bbox=box if notes else None,
    )  # fmt: skip


def caption_of_dots(arms: list[Arm]) -> str:
    """Return the caption of ``draw_fig3``."""
    many = all(arm["searches"] >= _MANY_RUNS for arm in arms)
    words = f"{caption_of_runs(arms)}; lines: {'95% interval of the mean' if many else 'min and max'}."
    if _common_baseline(arms) is not None:
        words += "\nDashed: baseline / e, if repeats were as useful as fresh examples."
    if any(arm["ratio_to_baseline"] is not None for arm in arms):
        words += "\nNumbers: ratio to the baseline"
        bounds = any("ratio_bound" in arm for arm in arms)
        words += f"{' (> and <: bounds, as searches missed)' if bounds else ''}."
    return words


def caption_of_runs(arms: Sequence[Arm]) -> str:
    """Return a caption that counts the runs behind each mean, e.g. ``Mean over 5 runs per arm``."""
    searches = _range([arm["searches"] for arm in arms])
    trials = _range([end(arm["trials"] / arm["searches"]) for arm in arms for end in (math.floor, math.ceil)])
    those = "those that reached it of " * any(arm["reached"] < arm["searches"] for arm in arms)
    if trials == "1":
        return f"Mean over {those}{searches} run{'s' * (searches != '1')} per arm"
    return (
        f"Mean over {those}{searches} search{'es' * (searches != '1')} per arm, each by the best of {trials} "
        "non-divergent trials"
    )


def _common_baseline(arms: list[Arm]) -> float | None:
    """Return the mean cost of the shared baseline; None if there is none, or it missed the target."""
    names = {arm["baseline"] for arm in arms} - {None}
    plain = [arm for arm in arms if arm["arm"] in names]
    reached = len(plain) == 1 and plain[0]["fresh_examples"]
    return plain[0]["fresh_examples"]["mean"] if reached else None


def _range(numbers: list[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _ends(arm: Arm) -> tuple[float, float]:
    """Return the left and right end of a configuration's line in ``draw_fig3``."""
    costs = arm["fresh_examples"]
    has_interval = arm["searches"] >= _MANY_RUNS and "low" in costs
    return (costs["low"], costs["high"]) if has_interval else (costs["min"], costs["max"])


def _factor(arm: Arm) -> float:
    return style.factor_order(arm["echo_factor"])


_COUNTS = {"steps": "steps", "trained_examples": "examples\ntrained on", "fresh_examples": "fresh examples"}


def draw_ends(arms: list[Arm], path: Path, title: str, metric: str) -> None:
    """Plot the final metric of each configuration, for an experiment without a target."""
    # ``arms`` is the result of ``records.outcome.ends``. Dots are means over runs, and bars show the minimum
    # and the maximum. If hyperparameters were searched, the best value at any evaluation is plotted.
    name = metric.replace("_", " ")
    searched = any(arm.get("searched") for arm in arms)
    values = {"best_value": f"best {name}"} if searched else {f"final_{metric}": f"{name}\nat the end"}
    shown = {key: words for key, words in values.items() if any(arm.get(key) for arm in arms)}
    # Counts that are equal in all configurations have no panel, but the caption lists them.
    shown |= {key: words for key, words in _COUNTS.items() if not _alike(arms, key)}
    equal = [words.replace("\n", " ") for key, words in _COUNTS.items() if key not in shown]
    names = [textwrap.fill(_with_losses(arm), _LONGEST_LINE) for arm in arms]
    height = 1.25 + (0.07 + 0.13 * max(one.count("\n") + 1 for one in names)) * len(arms)
    with style.figure(height, path, title, caption_of_ends(arms, equal)) as drawing:
        panels = drawing.subplots(1, len(shown) or 1, sharey=True, squeeze=False)[0]
        for axes, (key, words) in zip(panels, shown.items(), strict=False):
            _draw_panel(axes, arms, key)
            if key in values and (metric == "accuracy" or metric.startswith("mAP")):
                axes.xaxis.set_major_formatter(style.per_cent)
            axes.set_xlabel(words + " (log)" * (axes.get_xscale() == "log"), fontsize=8.5)
        _rows(panels[0], names, [])


def caption_of_ends(arms: list[Arm], equal: Sequence[str] = ()) -> str:
    """Return the caption of ``draw_ends``. ``equal`` names the numbers that are equal in all rows."""
    runs = _range([arm["runs"] for arm in arms if arm["runs"]])
    of = f"run{'s' * (runs != '1')} per arm"
    if any(arm.get("searched") for arm in arms):
        of = f"search{'es' * (runs != '1')} per arm, of each its best trial"
    alike = f"\nAlike in all arms: {', '.join(equal)}." if equal else ""
    return f"Mean, min and max over {runs} {of}. Gray: those of {arms[0]['arm']}.{alike}"


def _alike(arms: list[Arm], key: str) -> bool:
    """Return whether a number, such as ``steps``, differs by at most 1% between all runs."""
    ends = [arm[key][end] for arm in arms if arm.get(key) for end in ("min", "max")]
    return not ends or max(ends) <= 1.01 * min(ends)


def _with_losses(arm: Arm) -> str:
    lost = ", ".join(f"{arm[key]} {key}" for key in ("diverged", "failed") if arm[key])
    return f"{readable(arm['arm'])} ({lost})" if lost else readable(arm["arm"])


def colors(arms: list[Arm]) -> dict[str, str]:
    """Return each configuration's color by its echo variant, or by its method (``steps`` in ``e2_steps``)."""
    named = {(arm["echo_variant"], re.sub(r"_e[\d.]+$", "", arm["arm"])) for arm in arms}
    if len(named) == len({variant for variant, _ in named}) > 1:
        return {arm["arm"]: style.VARIANTS[arm["echo_variant"]][1] for arm in arms}
    methods = {arm["arm"]: arm["arm"].partition("_")[2] for arm in arms}
    order = list(dict.fromkeys(filter(None, methods.values())))
    return {
        name: style.SERIES[order.index(of) % len(style.SERIES)] if of else style.INK
        for name, of in methods.items()
    }


def _draw_panel(axes: Axes, arms: list[Arm], key: str) -> None:
    ends = [arm[key][end] for arm in arms if arm.get(key) for end in ("min", "max")]
    if max(ends) > 3.2 * min(ends) > 0:
        axes.set_xscale("log")
        axes.set_xlim(min(ends) / 1.25, max(ends) * 1.25)
        ratio = max(ends) / min(ends)
        steps = (1, 2, 5) if ratio < 19 else (1, 3) if ratio < 190 else (1,)
        axes.xaxis.set_major_locator(LogLocator(10, subs=steps))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if key in _COUNTS else "{x:g}")
    axes.tick_params(axis="x", labelsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    if first := arms[0].get(key):  # a gray band shows the range of the first configuration in all rows
        axes.axvspan(first["min"], first["max"], color="#e6e6e6", linewidth=0)
        axes.axvline(first["mean"], color=style.FAINT, linewidth=1, linestyle=(0, (4, 2)))
    if len({arm["echo_variant"] for arm in arms}) < len(arms) - 1:
        _rows(axes, [], [arm["arm"].partition("_")[0] for arm in arms])
    for place, arm in enumerate(arms):
        if values := arm.get(key):
            _dot(axes, place, values["mean"], (values["min"], values["max"]), colors(arms)[arm["arm"]])
