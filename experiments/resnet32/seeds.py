"""Compare the accuracies of ResNet-32 with and without echoing: ``python -m experiments.resnet32.seeds``.

Runs with the same seed are compared in pairs. The decision rules are in README.md.
"""

import argparse
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from adaecho.figures.report import markdown_table
from adaecho.records.files import write_json
from adaecho.records.statistics import mean_interval

MARGIN = 0.003
SEEDS = 3  # number of seeds that the rules require
TARGET = 0.91
CHANCE = 0.1
ECHOED = ("example_before_e2", "example_after_e2", "batch_e2")

Row = Mapping[str, Any]


def read_ends(sweep: Path) -> list[dict[str, Any]]:
    """Return one row for each finished run of a sweep, read from the folders ``<arm>/<repeat>/0``."""
    rows = []
    for path in sorted(sweep.glob("*/*/*/summary.json")):
        summary = json.loads(path.read_text())
        if summary["status"] not in ("budget_spent", "diverged"):
            continue
        diverged = summary["status"] == "diverged"
        origin = json.loads((path.parent / "environment.json").read_text())
        lines = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        rows.append({
            "arm": path.parts[-4],
            "repeat": int(path.parts[-3]),
            "seed": summary["seed"],
            "status": summary["status"],
            "steps": summary["steps"],
            "fresh_examples": summary["fresh_examples"],
            "held_out": None if diverged else summary["final"]["accuracy"],
            "test": CHANCE if diverged else summary["test"]["accuracy"],
            "to_91": crossing([(line["fresh_examples"], line["accuracy"]) for line in lines]),
            "commit": origin["git"]["sha"][:7],
            "processor": origin["processor"],
        })  # fmt: skip
    return rows


def add_ends(sweep: Path, results: Path = Path("results")) -> Path:
    """Add the final results of a sweep to the recorded file ``ends.json``, and return its path."""
    experiment = json.loads((sweep / "design.json").read_text())["experiment"]
    ends = results / experiment / "cifar10" / "ends.json"
    known = json.loads(ends.read_text()) if ends.exists() else []
    ends.parent.mkdir(parents=True, exist_ok=True)
    write_json(ends, list({(row["arm"], row["repeat"]): row for row in [*known, *read_ends(sweep)]}.values()))
    return ends


def crossing(curve: Sequence[tuple[float, float]]) -> float | None:
    """Return the number of fresh examples at which the accuracy first crosses the target; None if never.

    Args:
        curve: pairs of fresh examples and accuracy. Between the pairs, the accuracy is interpolated linearly.
    """
    for (before, low), (after, high) in itertools.pairwise(curve):
        if low < TARGET <= high:
            return before + (after - before) * (TARGET - low) / (high - low)
    return None


def verdict(differences: Sequence[float], margin: float) -> tuple[str, str]:
    """Return the mean difference between two accuracies, and a verdict such as "better" or "no worse"."""
    # There is one difference per seed. The margin is the largest loss of accuracy that counts as "no worse".
    # A margin of 0 disables this verdict.
    if len(differences) < 2:
        return "-", "not decided"
    low, high = mean_interval(differences, 0.95)
    words = f"{100 * fmean(differences):+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
    if len(differences) < SEEDS:
        return words, "not decided"
    if low > 0:
        return words, "better"
    if low > -margin:
        return words, "no worse" if margin else "not decided"
    return words, "worse" if high < -margin else "not decided"


def by_arm(rows: Sequence[Row], key: str) -> tuple[dict[str, dict[int, Any]], list[int]]:
    """Return the value ``key`` of each run, by configuration and seed, and the list of all seeds."""
    found: dict[str, dict[int, Any]] = defaultdict(dict)
    for row in rows:
        found[row["arm"]][row["repeat"]] = row[key]
    return found, sorted({row["repeat"] for row in rows})


def table(rows: Sequence[Row]) -> str:
    """Return two Markdown tables: test accuracies by seed, and the differences between configurations."""
    test, seeds = by_arm(rows, "test")
    accuracies = [
        (arm, *(f"{of[seed]:.4f}" if seed in of else "-" for seed in seeds)) for arm, of in test.items()
    ]
    differences = []
    for ours in filter(test.__contains__, ECHOED):
        for theirs, margin in (("baseline", MARGIN), ("baseline_half", 0.0)):
            shared = sorted(test[ours].keys() & test[theirs].keys())
            words = verdict([test[ours][seed] - test[theirs][seed] for seed in shared], margin)
            differences.append((f"{ours} - {theirs}", *words))
    first = markdown_table(("arm", *(f"seed {seed + 1}" for seed in seeds)), accuracies)
    minus = ("minus", "points of test accuracy", "by the rule")
    return f"{first}\n\n{markdown_table(minus, differences)}"


def cost_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of the fresh examples to 91% accuracy, and the ratio to the baseline."""
    costs, seeds = by_arm(rows, "to_91")
    lines = []
    for arm, of_seeds in costs.items():
        cells = (f"{cost:,.0f}" if (cost := of_seeds.get(seed)) else "missed" for seed in seeds)
        pairs = [(of_seeds.get(seed), costs["baseline"].get(seed)) for seed in seeds]
        lines.append((arm, *cells, *cost_verdict(pairs)))
    headings = ("to 91%", *(f"seed {seed + 1}" for seed in seeds), "of the baseline's", "by the rule")
    return markdown_table(headings, lines)


def cost_verdict(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[str, str]:
    """Return the ratio of a configuration's costs to the baseline's, and the verdict, both as text.

    The ratio is a geometric mean with a 95% interval. The verdict is "fewer" or "more" if the whole interval
    lies below or above 1. If a run missed the target, there is no ratio.

    Args:
        pairs: for each seed, the configuration's cost and the baseline's cost. None if the run missed.
    """
    logs = [math.log(ours / theirs) for ours, theirs in pairs if ours and theirs]
    if len(logs) < len(pairs) or len(logs) < SEEDS or not any(logs):
        return "-", "not decided"
    low, high = map(math.exp, mean_interval(logs, 0.95))
    said = "fewer" if high < 1 else "more" if low > 1 else "not decided"
    return f"{math.exp(fmean(logs)):.2f} ({low:.2f} to {high:.2f})", said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", nargs="?", type=Path, help="folder of a sweep to compare and to record")
    sweep = parser.parse_args().sweep
    if sweep and not read_ends(sweep):
        parser.error(f"{sweep}: contains no finished runs")
    known = [Path(f"results/resnet32_{name}/cifar10/ends.json") for name in ("seeds", "target")]
    for ends in known if sweep is None else [add_ends(sweep)]:
        rows = read_ends(sweep) if sweep else json.loads(ends.read_text())
        if ends.parts[-3] == "resnet32_rates":
            print("\n".join(f"{row['arm']}: {row['held_out']}" for row in rows))
        else:
            print(table(rows))
        if ends.parts[-3] == "resnet32_target":
            print(cost_table(rows))


if __name__ == "__main__":
    main()
