"""The figure of worth over the distance of repeats: ``python -m experiments.distance.draw``"""

import argparse
from pathlib import Path

from adaecho.figures.style import MUTED, VARIANTS, figure
from adaecho.records.files import read_json
from experiments.distance.distance import SHARE, SUBJECTS, distances

MARKERS, LINES = {"cifar10": "o", "text": "s"}, {"cifar10": "-", "text": "--"}


def draw(results: Path, path: Path) -> None:
    """Worth with its 95 % interval at each distance, a line for each task that has ended."""
    with figure(3.6, path, "worth of a repeat by the distance of the uses of an example (e = 4)") as drawing:
        axes = drawing.subplots()
        for task, subject in SUBJECTS.items():
            outcome = results / task / "outcome.json"
            if not outcome.exists():
                continue
            apart = {"batch": float(min(distances(subject.unique).values()) / 4), **distances(subject.unique)}
            rows = [row for row in read_json(outcome) if row.get("arm") in apart]
            worths = [row["worth"] for row in rows]
            errors = [
                [row["worth"] - row["low"] for row in rows],
                [row["high"] - row["worth"] for row in rows],
            ]
            color = VARIANTS["example_before_augmentation"][1]
            axes.errorbar(
                [apart[row["arm"]] for row in rows], worths, errors, label=task, color=color, capsize=2,
                marker=MARKERS[task], markersize=4, linewidth=1.1, linestyle=LINES[task],
            )  # fmt: skip
            axes.axhline(SHARE * worths[-1], color=MUTED, linewidth=0.8, zorder=0)
        axes.set_xscale("log", base=2)
        names = {
            "batch": "batch",
            **{f"buffer_{n}": f"{n:,}" for n in (64, 256, 1024, 4096)},
            "pass": "a pass",
        }
        axes.set_xticks([apart[arm] for arm in names], list(names.values()))
        axes.minorticks_off()
        axes.set_xlabel("shuffle buffer, examples (log scale); grey: 0.9 of a whole pass's worth")
        axes.grid(color="#dddddd", linewidth=0.6)
        drawing.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8.5)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results/distance"))
    parser.add_argument("--figure", type=Path, default=Path("results/figures/distance.png"))
    options = parser.parse_args()
    draw(options.results, options.figure)


if __name__ == "__main__":
    main()
