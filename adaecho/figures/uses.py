"""The training loss of first uses of examples, of second ones, ...: what repeats still teach."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.figures.style import INK, MUTED, SERIES, VARIANTS, figure, variant_order
from adaecho.records.outcome import BY_ECHO_INDEX, by_arm

Curve = dict[str, Any]
_ORDINALS = ("first use", "second use", "third use", "fourth use")
_TITLE_WIDTH = 24  # characters of a panel


def of_uses(curves: Sequence[Curve]) -> list[Curve]:
    """The curves of runs with ``evaluate.loss_by_echo_index``."""
    return [curve for curve in curves if f"{BY_ECHO_INDEX}0" in curve]


def losses(curve: Curve) -> NDArray[np.float64]:
    """The mean loss since the evaluation before, NaN for none; float64 [uses, evaluations]."""
    number = sum(key.startswith(BY_ECHO_INDEX) for key in curve)
    return np.array([curve[f"{BY_ECHO_INDEX}{index}"] for index in range(number)], dtype=np.float64)


def draw_uses(curves: Sequence[Curve], path: Path, title: str) -> None:
    """One panel per arm: the mean over runs of each use's loss against SGD steps, on a log axis.

    Dashed: the validation's cross entropy, where that is the target's metric. Of runs that ended at different
    evaluations what all of them had is drawn.

    Args:
        curves: those of ``of_uses``.
        path: file to write; its suffix decides the format.
        title: what was trained.
    """
    arms = by_arm(sorted(curves, key=lambda curve: variant_order(curve["echo_variant"])))
    with figure(3.4, path, title) as drawing:
        panels = drawing.subplots(1, len(arms), sharey=True, squeeze=False)[0]
        for axes, runs in zip(panels, arms.values(), strict=True):
            common = min(len(run["steps"]) for run in runs)
            steps = np.mean([run["steps"][:common] for run in runs], axis=0)
            found = np.mean([losses(run)[:, :common] for run in runs], axis=0)  # [uses, evaluations]
            for index, line in enumerate(found):
                name = _ORDINALS[index] if index < len(_ORDINALS) else f"{index + 1}th use"
                colour = INK if index == 0 else SERIES[(index - 1) % len(SERIES)]
                axes.plot(steps, line, color=colour, linewidth=1.7 if index == 0 else 1.2, label=name)
            if runs[0]["metric"] == "cross_entropy":
                held_out = np.mean([run["values"][:common] for run in runs], axis=0)
                axes.plot(steps, held_out, color=MUTED, linestyle=(0, (4, 2)), label="validation")
            axes.set_yscale("log")
            axes.set_xlim(0, None)
            axes.set_xlabel("SGD steps")
            name, e = VARIANTS[runs[0]["echo_variant"]][0], runs[0]["echo_factor"]
            axes.set_title(textwrap.fill(f"{name}, e = {e}", _TITLE_WIDTH), fontsize=8.5)
            axes.grid(color="#dddddd", linewidth=0.6)
        panels[0].set_ylabel("training loss")
        lines, names = max((axes.get_legend_handles_labels() for axes in panels), key=lambda two: len(two[1]))
        drawing.legend(lines, names, loc="outside lower left", ncols=6, frameon=False, fontsize=8.5)
