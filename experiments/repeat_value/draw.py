"""The figure of worths at equal steps: ``python -m experiments.repeat_value.draw``"""

import argparse
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from adaecho.figures.style import MUTED, VARIANTS, figure
from adaecho.records.files import read_json

TASKS = ("digits", "text")


def draw(results: Path, path: Path) -> None:
    """Worth of a repeat along the runs with its 95 % interval, a panel for each task that has ended."""
    found = [task for task in TASKS if (results / task / "outcome.json").exists()]
    with figure(3.9, path, "worth of a repeat at equal steps (e = 2; dashed: e = 4)") as drawing:
        panels = drawing.subplots(1, len(found), squeeze=False)[0]
        for axes, task in zip(panels, found, strict=True):
            _draw_task(
                axes, task, [row for row in read_json(results / task / "outcome.json") if "low" in row]
            )
        handles = panels[0].get_legend_handles_labels()
        drawing.legend(*handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)


def _draw_task(axes: Axes, task: str, rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if "ratio" in row]
    for variant, factor in sorted({(row["echo_variant"], row["echo_factor"]) for row in rows}):
        ours = [row for row in rows if (row["echo_variant"], row["echo_factor"]) == (variant, factor)]
        worths = [row["ratio"] for row in ours]
        errors = [
            [worth - row["low"] for worth, row in zip(worths, ours, strict=True)],
            [row["high"] - worth for worth, row in zip(worths, ours, strict=True)],
        ]
        axes.errorbar(
            [row["fresh_examples"] for row in ours], worths, errors, color=VARIANTS[variant][1],
            marker="o" if factor == 2 else "s", linestyle="-" if factor == 2 else "--", markersize=4,
            linewidth=1.1, capsize=2, label=VARIANTS[variant][0] if factor == 2 else None,
        )  # fmt: skip
    axes.axhline(0.9, color=MUTED, linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    at = sorted({row["fresh_examples"] for row in rows})
    axes.set_xticks(at, [f"{one:,}" for one in at], rotation=60)
    axes.minorticks_off()
    axes.set_ylim(-1, 1.5)  # batch echoing goes on below
    axes.set_xlabel(f"fresh examples read before: {task}")
    axes.grid(color="#dddddd", linewidth=0.6)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results/equal_steps"))
    parser.add_argument("--figure", type=Path, default=Path("results/figures/equal_steps.png"))
    options = parser.parse_args()
    draw(options.results, options.figure)


if __name__ == "__main__":
    main()
