"""Ends of ResNet-32 on seeds: ``python -m experiments.resnet32.seeds [FOLDER]``. Rules: two pages here."""

import argparse
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from adaecho.records.files import write_json
from adaecho.records.statistics import mean_interval

MARGIN = 0.003
SEEDS = 3  # that the rule asks for
TARGET = 0.91
CHANCE = 0.1
PAIRS = {  # the first minus the second
    "example_before_e2": ("baseline", "baseline_half"),
    "example_after_e2": ("baseline", "baseline_half"),
    "batch_e2": ("baseline", "baseline_half"),
}

Row = Mapping[str, Any]


def read_ends(sweep: Path) -> list[dict[str, Any]]:
    """A row for each run that has ended, from the folders ARM/REPEAT/0 of a sweep."""
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
    """Add a sweep's runs to those that are recorded: it may go on, arm by arm, on several machines."""
    experiment = json.loads((sweep / "design.json").read_text())["experiment"]
    ends = results / experiment / "cifar10" / "ends.json"
    known = json.loads(ends.read_text()) if ends.exists() else []
    ends.parent.mkdir(parents=True, exist_ok=True)
    write_json(ends, list({(row["arm"], row["repeat"]): row for row in [*known, *read_ends(sweep)]}.values()))
    return ends


def crossing(curve: Sequence[tuple[float, float]]) -> float | None:
    """Fresh examples where the straight line between two evaluations first comes to the target."""
    for (before, low), (after, high) in itertools.pairwise(curve):
        if low < TARGET <= high:
            return before + (after - before) * (TARGET - low) / (high - low)
    return None


def verdict(differences: Sequence[float], margin: float) -> tuple[str, str]:
    """The mean difference with its interval, in points, and what the rule says of it."""
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


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: the test accuracies seed by seed, then the paired differences."""
    test: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        test[row["arm"]][row["repeat"]] = row["test"]
    seeds = sorted({row["repeat"] for row in rows})
    lines = [f"| arm |{''.join(f' seed {seed + 1} |' for seed in seeds)}", "|---|" + "---:|" * len(seeds)]
    for arm, of_seeds in test.items():
        cells = [f"{of_seeds[seed]:.4f}" if seed in of_seeds else "-" for seed in seeds]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    lines += ["", "| minus | points of test accuracy | by the rule |", "|---|---:|---|"]
    for ours, others in PAIRS.items():
        for theirs, margin in zip(others, (MARGIN, 0.0), strict=True) if ours in test else ():
            shared = sorted(test[ours].keys() & test[theirs].keys())
            words, said = verdict([test[ours][seed] - test[theirs][seed] for seed in shared], margin)
            lines.append(f"| {ours} - {theirs} | {words} | {said} |")
    return lines


def cost_table(rows: Sequence[Row]) -> list[str]:
    """Markdown: fresh examples to 91 %, seed by seed, and the ratio to the baseline's, paired by seed."""
    costs: dict[str, dict[int, float | None]] = defaultdict(dict)
    for row in rows:
        costs[row["arm"]][row["repeat"]] = row["to_91"]
    seeds = sorted({row["repeat"] for row in rows})
    heads = "".join(f" seed {seed + 1} |" for seed in seeds)
    lines = [
        f"| to 91 % |{heads} of the baseline's | by the rule |",
        "|---|" + "---:|" * (len(seeds) + 1) + "---|",
    ]
    for arm, of_seeds in costs.items():
        cells = [f"{cost:,.0f}" if (cost := of_seeds.get(seed)) else "missed" for seed in seeds]
        pairs = [(of_seeds.get(seed), costs["baseline"].get(seed)) for seed in seeds]
        lines.append(f"| {arm} | {' | '.join([*cells, *cost_verdict(pairs)])} |")
    return lines


def cost_verdict(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[str, str]:
    """The ratio of geometric means with its interval, of pairs by seed, and what the rule says of it."""
    logs = [math.log(ours / theirs) for ours, theirs in pairs if ours and theirs]
    if len(logs) < len(pairs) or len(logs) < SEEDS or not any(logs):
        return "-", "not decided"
    low, high = map(math.exp, mean_interval(logs, 0.95))
    said = "fewer" if high < 1 else "more" if low > 1 else "not decided"
    return f"{math.exp(fmean(logs)):.2f} ({low:.2f} to {high:.2f})", said


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", nargs="?", type=Path, help="record the ends of this folder's runs first")
    sweep = parser.parse_args().sweep
    known = [Path(f"results/resnet32_{name}/cifar10/ends.json") for name in ("seeds", "target")]
    for ends in known if sweep is None else [add_ends(sweep)]:
        rows = json.loads(ends.read_text())
        is_of_rates = ends.parts[-3] == "resnet32_rates"
        lines = [f"{row['arm']}: {row['held_out']}" for row in rows] if is_of_rates else table(rows)
        print("\n".join([*lines, "", *cost_table(rows)] if ends.parts[-3] == "resnet32_target" else lines))


if __name__ == "__main__":
    main()
