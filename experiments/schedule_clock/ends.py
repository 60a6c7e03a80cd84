"""Cost of 80 % at the ends of decays: ``python -m experiments.schedule_clock.ends``. The rule: README.md."""

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from adaecho.records.statistics import mean_interval
from adaecho.records.trials import read_rows

TARGET = 0.8
BATCH_SIZE = 64
SEEDS = 5  # that the rule asks for
MARGIN = 1.1  # how far outside the N that were run a crossing may lie

Row = Mapping[str, Any]


class Cost(NamedTuple):
    """Where a line of accuracy against log N is at the target.

    Attributes:
        steps: N there; None if the line doesn't rise.
        among: whether it lies within the N that were run, or a tenth outside.
    """

    steps: float | None
    among: bool


class Ratio(NamedTuple):
    """The cost of an echoed arm over that without echoing; None where a line gives none."""

    ratio: float | None
    low: float | None
    high: float | None
    verdict: str


def cost(rows: Sequence[Row], factor: int) -> Cost:
    """Of one echoing factor, by the line of least squares."""
    ours = [row for row in rows if row["echo_factor"] == factor]
    steps = [row["steps"] for row in ours]
    slope, level = np.polyfit(np.log(steps), [row["final_accuracy"] for row in ours], 1)
    if slope <= 0:
        return Cost(None, False)
    found = math.exp((TARGET - level) / slope)
    return Cost(found, min(steps) / MARGIN <= found <= max(steps) * MARGIN)


def log_ratio(rows: Sequence[Row], factor: int) -> tuple[float, bool]:
    """Of the fresh examples at e = ``factor`` to those at e = 1; and whether both lie among their N."""
    ours, theirs = cost(rows, factor), cost(rows, 1)
    if ours.steps is None or theirs.steps is None:
        return math.nan, False
    return math.log(ours.steps / factor / theirs.steps), ours.among and theirs.among


def ratio(rows: Sequence[Row], factor: int) -> Ratio:
    """With the jackknife's interval over seeds."""
    seeds = sorted({row["seed"] for row in rows})
    if len(seeds) < 2:
        return Ratio(None, None, None, "not decided")
    whole, among = log_ratio(rows, factor)
    without = [log_ratio([row for row in rows if row["seed"] != seed], factor) for seed in seeds]
    if not all(math.isfinite(one) for one, _ in (*without, (whole, among))):
        return Ratio(None, None, None, "not decided")
    pseudo = [len(seeds) * whole - (len(seeds) - 1) * one for one, _ in without]
    low, high = mean_interval(pseudo, 0.95)
    verdict = "saves" if high < 0 else "costs more" if low > 0 else "not decided"
    if len(seeds) < SEEDS or not all((among, *(one for _, one in without))):
        verdict = "not decided"
    return Ratio(math.exp(whole), math.exp(low), math.exp(high), verdict)


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: the ends seed by seed, then costs and ratios."""
    seeds = sorted({row["repeat"] for row in rows})
    ends = defaultdict(dict)
    for row in rows:
        ends[row["echo_factor"], row["steps"]][row["repeat"]] = row["final_accuracy"]
    lines = [
        f"| e | N |{''.join(f' seed {seed + 1} |' for seed in seeds)} mean |",
        "|---:" * (len(seeds) + 3) + "|",
    ]
    for (factor, steps), of_seeds in sorted(ends.items()):
        cells = [f"{of_seeds[seed]:.4f}" for seed in seeds]
        lines.append(f"| {factor} | {steps:,} | {' | '.join(cells)} | {fmean(of_seeds.values()):.4f} |")
    lines += ["", "| e | N at 80 % | fresh examples | ratio | by the rule |", "|---:|---:|---:|---:|---|"]
    for factor in (1, 2, 4):
        steps = cost(rows, factor).steps
        cells = ["-", "-"] if steps is None else [f"{steps:,.0f}", f"{BATCH_SIZE * steps / factor:,.0f}"]
        found = ratio(rows, factor) if factor > 1 else None
        if found is None or found.ratio is None:
            words = "-"
        else:
            words = f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"
        lines.append(f"| {factor} | {' | '.join(cells)} | {words} | {found.verdict if found else '-'} |")
    return lines


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "trials", nargs="?", type=Path, default=Path("results/schedule_ends/cifar10/trials.json")
    )
    print("\n".join(table(read_rows(parser.parse_args().trials))))


if __name__ == "__main__":
    main()
