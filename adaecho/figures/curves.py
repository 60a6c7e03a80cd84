"""Training curves of the best trials: the metric over fresh examples (paper, appendix A)."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from adaecho.figures.style import (
    INK,
    MUTED,
    VARIANTS,
    count_formatter,
    count_scale,
    factor_order,
    figure,
    variant_order,
)

Curve = dict[str, Any]
_LEAST_ERROR = 1e-4  # a log axis has no zero


def draw_curves(curves: list[Curve], path: Path, title: str, metric: str, target: float | None) -> None:
    """One line per search, of its best trial, ending in a dot; one panel per echoing factor, the baseline in
    each.

    Accuracy is drawn as error on a log axis: near a target of 97 % the whole contest is between 90 and 97 %.

    Args:
        curves: each with ``arm``, ``echo_variant``, ``echo_factor``, and the lists ``fresh_examples`` and
            ``values`` of the metric; see ``records.collect``.
        path: file to write; its suffix decides the format.
        title: what was trained, e.g. ``digits: best trial of each search``.
        metric: name of the target's metric.
        target: its value, drawn as a dashed line; None for none.
    """
    plain = [curve for curve in curves if curve["echo_variant"] == "none"]
    groups: dict[Any, list[Curve]] = {}
    for curve in sorted(curves, key=lambda curve: variant_order(curve["echo_variant"])):
        if curve["echo_variant"] != "none":
            groups.setdefault(curve["echo_factor"], []).append(curve)
    panels = sorted(groups.items(), key=lambda item: factor_order(item[0])) or [(1, [])]
    with figure(3.3, path) as drawing:
        axes = drawing.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        lines: dict[str, Line2D] = {}
        for panel, (factor, group) in zip(axes, panels, strict=True):
            _scale(panel, curves, metric)
            lines |= _draw_panel(panel, plain + group, metric, target)
            panel.set_title(f"e = {factor}" if group else "", fontsize=9.5, loc="center")
        if target is not None:
            _name_target(axes[-1], _shown(metric, target))
        axes[0].set_ylabel(_axis_label(metric))
        drawing.suptitle(title, x=0.01, ha="left", fontsize=10)
        drawing.legend(
            list(lines.values()), list(lines), loc="outside lower left", ncols=2, frameon=False, fontsize=8.5
        )


def _draw_panel(axes: Axes, curves: list[Curve], metric: str, target: float | None) -> dict[str, Line2D]:
    """Draw the curves of one factor; returns a line per name for the legend."""
    if target is not None:
        axes.axhline(_shown(metric, target), color=INK, linestyle=(0, (4, 2)), linewidth=1)
    lines: dict[str, Line2D] = {}
    for curve in curves:
        name, colour = VARIANTS[curve["echo_variant"]]
        values = [_shown(metric, value) for value in curve["values"]]
        (lines[name],) = axes.plot(curve["fresh_examples"], values, color=colour, linewidth=1.3)
        axes.plot(
            curve["fresh_examples"][-1:],
            values[-1:],
            "o",
            color=colour,
            markersize=4.5,
            clip_on=False,
            zorder=3,
        )
    return lines


def _name_target(axes: Axes, height: float) -> None:
    """Beside the last panel, where no curve can run through it."""
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


def _shown(metric: str, value: float) -> float:
    return max(1 - value, _LEAST_ERROR) if metric == "accuracy" else value


def _axis_label(metric: str) -> str:
    if metric == "accuracy":
        return "validation error"
    unit = ", nats" if metric == "cross_entropy" else ""
    return f"validation {metric.replace('_', ' ')}{unit}"


def _scale(axes: Axes, curves: list[Curve], metric: str) -> None:
    largest = max((curve["fresh_examples"][-1] for curve in curves), default=1)
    scale, unit = count_scale(largest)
    axes.set_xlim(0, 1.03 * largest)
    axes.xaxis.set_major_formatter(count_formatter(scale))
    axes.set_xlabel(f"fresh examples{unit}")
    axes.grid(color="#dddddd", linewidth=0.6)
    if metric == "accuracy":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.10g} %"))
        axes.yaxis.set_minor_formatter(NullFormatter())
