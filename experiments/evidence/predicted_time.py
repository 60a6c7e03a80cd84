"""Compare the measured time of whole training runs with the predicted time.

The prediction is the total reading time or the total time of the training steps, whichever is larger.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from adaecho.figures.report import laid_out, markdown_table
from adaecho.figures.style import INK, MUTED, SERIES, figure

BAND = "#eeeeee"
WITHIN = 0.1  # the rule allows a deviation of this share of the predicted time
_MARKERS = {"digits": "s", "cifar10": "o"}


def draw_time_ratios(record: Mapping[str, Any], path: Path, title: str) -> None:
    """Plot the measured training time divided by the predicted time, against the predicted time.

    Each dot is one training run. A gray band marks the ratios that the decision rule allows (0.9 to 1.1).

    Args:
        record: the JSON file that ``experiments.fig4.predicted_time`` writes.
    """
    colors = dict(zip(sorted({row["e"] for row in record["rows"]}), SERIES, strict=False))
    with figure(3.4, path, title) as drawing:
        axes = drawing.subplots()
        axes.axhspan(1 - WITHIN, 1 + WITHIN, color=BAND, zorder=0)
        axes.axhline(1, color=MUTED, linewidth=0.8)
        for row in record["rows"]:
            at = row["predicted_s"], row["measured_over_predicted"]
            axes.plot(*at, _MARKERS[row["task"]], color=colors[row["e"]], markersize=6)
        axes.set_xscale("log", base=2)
        axes.set_xticks([8, 16, 32, 64, 128], ["8", "16", "32", "64", "128"])
        axes.set_xlabel("predicted seconds to the target")
        axes.set_ylabel("measured over predicted")
        axes.grid()
        names: list[Artist] = [
            Line2D([], [], color=INK, marker=marker, linestyle="", label=task)
            for task, marker in _MARKERS.items()
        ]
        names += [Line2D([], [], color=color, linewidth=3, label=f"e = {e}") for e, color in colors.items()]
        names.append(Patch(color=BAND, label="within 10%, the rule"))
        drawing.legend(handles=names, loc="outside lower left", ncols=6)


def section_of_cells(title: str, record: Mapping[str, Any], figure: str) -> str:
    """Return a report section with the figure, the verdict on each task, and a table of all runs."""
    rows: Sequence[Mapping[str, Any]] = record["rows"]
    verdicts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        inside = sum(abs(row["measured_over_predicted"] - 1) <= WITHIN for row in of_task)
        word = "holds" if inside == len(of_task) else "does not hold"
        verdicts.append(f"{task}: {word}, {inside} of {len(of_task)} cells within {100 * WITHIN:.0f}%")
    forms = {"task": "", "R": "g", "e": "", "predicted_s": ".1f", "measured_s": ".1f"}
    forms["measured_over_predicted"] = ".2f"
    cells = [tuple(format(row[key], form) for key, form in forms.items()) for row in rows]
    table = markdown_table(tuple(key.replace("_", " ") for key in forms), cells)
    return laid_out(title, [figure], f"{'; '.join(verdicts)}.", table, commands=[record["command"]])
