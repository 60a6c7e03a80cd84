"""Estimate how many fresh examples training must read to reach 80% accuracy at the end of its schedule.

The learning rate of each run decays over all N steps of the run. A line fitted to the final accuracies of
runs with different N shows which N gives 80%. With echoing factor e, training uses each example e times, so
N steps read N / e batches. README.md has the decision rule.

Run: ``python -m experiments.schedule_clock.ends``
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from adaecho.figures.report import markdown_table
from adaecho.records.statistics import mean_interval
from adaecho.records.trials import read_rows

TARGET = 0.8
BATCH_SIZE = 64
SEEDS = 5  # number of seeds that the decision rule requires
MARGIN = 1.1  # a crossing may lie outside the range of N by up to this factor

Row = Mapping[str, Any]


class Cost(NamedTuple):
    """An estimate of the number of steps that training needs to reach the target accuracy."""

    steps: float | None  # None if the accuracy does not increase with the number of steps
    in_range: bool  # whether the estimate avoids a long extrapolation beyond the runs (see MARGIN)


class Ratio(NamedTuple):
    """How many examples training reads with echoing, relative to training without echoing."""

    ratio: float | None
    low: float | None  # 95% confidence interval
    high: float | None
    verdict: str  # saves, costs more, or not decided


def cost(rows: Sequence[Row], factor: int) -> Cost:
    """Estimate the number of steps to the target with one echoing factor, by a least-squares fit."""
    ours = [row for row in rows if row["echo_factor"] == factor]
    steps = [row["steps"] for row in ours]
    slope, level = np.polyfit(np.log(steps), [row["final_accuracy"] for row in ours], 1)
    if slope <= 0:
        return Cost(None, False)
    found = math.exp((TARGET - level) / slope)
    return Cost(found, min(steps) / MARGIN <= found <= max(steps) * MARGIN)


def log_ratio(rows: Sequence[Row], factor: int) -> tuple[float, bool]:
    """Return the log ratio of fresh examples with and without echoing, and whether it is reliable."""
    # It is reliable if both estimates are, see ``Cost``. An unknown ratio is NaN.
    ours, theirs = cost(rows, factor), cost(rows, 1)
    if ours.steps is None or theirs.steps is None:
        return math.nan, False
    return math.log(ours.steps / factor / theirs.steps), ours.in_range and theirs.in_range


def ratio(rows: Sequence[Row], factor: int) -> Ratio:
    """Return the ratio of fresh examples with and without echoing, with a jackknife interval over seeds."""
    seeds = sorted({row["seed"] for row in rows})
    if len(seeds) < 2:
        return Ratio(None, None, None, "not decided")
    whole, in_range = log_ratio(rows, factor)
    without = [log_ratio([row for row in rows if row["seed"] != seed], factor) for seed in seeds]
    if not all(math.isfinite(one) for one, _ in (*without, (whole, in_range))):
        return Ratio(None, None, None, "not decided")
    pseudo = [len(seeds) * whole - (len(seeds) - 1) * one for one, _ in without]
    low, high = mean_interval(pseudo, 0.95)
    verdict = "saves" if high < 0 else "costs more" if low > 0 else "not decided"
    if len(seeds) < SEEDS or not all((in_range, *(one for _, one in without))):
        verdict = "not decided"
    return Ratio(math.exp(whole), math.exp(low), math.exp(high), verdict)


def table(rows: Sequence[Row]) -> str:
    """Return two Markdown tables: the final accuracies by seed, and the costs and their ratios."""
    seeds = sorted({row["repeat"] for row in rows})
    ends = defaultdict(dict)
    for row in rows:
        ends[row["echo_factor"], row["steps"]][row["repeat"]] = row["final_accuracy"]
    of_ends = [
        (f"{factor}", f"{steps:,}", *(f"{of[seed]:.4f}" for seed in seeds), f"{fmean(of.values()):.4f}")
        for (factor, steps), of in sorted(ends.items())
    ]
    of_costs = []
    for factor in (1, 2, 4):
        steps, found = cost(rows, factor).steps, ratio(rows, factor)
        cells = ("-", "-") if steps is None else (f"{steps:,.0f}", f"{BATCH_SIZE * steps / factor:,.0f}")
        words = f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})" if found.ratio else "-"
        of_costs.append((f"{factor}", *cells, words, found.verdict))
    of_costs[0] = (*of_costs[0][:3], "-", "-")
    headings = ("e", "N", *(f"seed {seed + 1}" for seed in seeds), "mean")
    costs = ("e", "N at 80%", "fresh examples", "ratio", "by the rule")
    return f"{markdown_table(headings, of_ends)}\n\n{markdown_table(costs, of_costs)}"


if __name__ == "__main__":
    print(table(read_rows(Path("results/schedule_ends/cifar10/trials.json"))))
