"""Plot the value of a repeat: the number of new examples that one repeat replaces."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from adaecho.figures.style import MUTED, VARIANTS, figure
from adaecho.records.files import read_json

ENOUGH = 0.9  # lines mark this share of the value of a new example, or of a repeat a whole epoch later
# For each arm, the mean number of examples between two uses of an example, at echoing factor 4 with 8,192
# distinct examples.
DISTANCES = {"batch": 16, **{f"buffer_{size}": size for size in (64, 256, 1024, 4096)}, "pass": 8192}


def _line(axes: Axes, x: Sequence[float], rows: list[dict[str, Any]], key: str, **look: Any) -> None:
    """Draw a line of values with their 95% intervals as error bars."""
    worths = [row[key] for row in rows]
    errors = [[row[key] - row["low"] for row in rows], [row["high"] - row[key] for row in rows]]
    axes.errorbar(x, worths, errors, markersize=4, linewidth=1.1, capsize=2, **look)


def draw_distance(results: Path, path: Path) -> None:
    """Plot the value of a repeat against the distance between uses of an example, with one line per task."""
    with figure(3.6, path, "value of a repeat, by the distance between repeats (e = 4)") as drawing:
        axes = drawing.subplots()
        for task, look in (("cifar10", "o-"), ("text", "s--")):
            rows = [row for row in read_json(results / task / "outcome.json") if "worth" in row]
            color, x = VARIANTS["example_before_augmentation"][1], [DISTANCES[row["arm"]] for row in rows]
            _line(axes, x, rows, "worth", label=task, color=color, fmt=look)
            axes.axhline(ENOUGH * rows[-1]["worth"], color=MUTED, linewidth=0.8, zorder=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks([*DISTANCES.values()], ["batch", "64", "256", "1,024", "4,096", "epoch"])
        axes.minorticks_off()
        axes.set_xlabel("shuffle buffer, examples (log scale); gray: 0.9 times the value after an epoch")
        axes.grid()
        drawing.legend(loc="outside lower left", ncols=2)


def draw_equal_steps(results: Path, path: Path) -> None:
    """Plot the value of a repeat at several points during training, with one panel per task."""
    with figure(3.9, path, "value of a repeat at equal steps (e = 2; dashed: e = 4)") as drawing:
        panels = drawing.subplots(1, 2)
        for axes, task in zip(panels, ("digits", "text"), strict=True):
            outcome = read_json(results / task / "outcome.json")
            rows = [row for row in outcome if "ratio" in row and "low" in row]
            for variant, factor in sorted({(row["echo_variant"], row["echo_factor"]) for row in rows}):
                ours = [row for row in rows if (row["echo_variant"], row["echo_factor"]) == (variant, factor)]
                name, color = VARIANTS[variant]
                look = {"fmt": "o-", "label": name} if factor == 2 else {"fmt": "s--"}
                _line(axes, [row["fresh_examples"] for row in ours], ours, "ratio", color=color, **look)
            axes.axhline(ENOUGH, color=MUTED, linewidth=0.8, zorder=0)
            axes.set_xscale("log", base=2)
            at = sorted({row["fresh_examples"] for row in rows})
            axes.set_xticks(at, [f"{one:,}" for one in at], rotation=60)
            axes.minorticks_off()
            axes.set_ylim(-1, 1.5)  # the line of batch echoing extends below this
            axes.set_xlabel(f"fresh examples read before: {task}")
            axes.grid()
        drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3)
