"""Estimate the cost of 80 % accuracy from complete runs: ``python -m experiments.schedule_clock.ends``.

Each run decays its learning rate over N steps, and only its final accuracy is used. The cost follows from a
line that fits accuracy against log N. The decision rule is in README.md.
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
    """Where the line that fits accuracy against log N crosses the target.

    Attributes:
        steps: N at the crossing; None if the line does not rise.
        among: whether the crossing lies in the range of N of the runs, or at most a tenth outside.
    """

    steps: float | None
    among: bool


class Ratio(NamedTuple):
    """The cost of an echoed arm divided by the cost without echoing, with its interval and verdict.

    Each cost is the point where a line through the accuracies crosses the target. The numbers are None if one
    of the two lines does not cross the target.
    """

    ratio: float | None
    low: float | None
    high: float | None
    verdict: str


def cost(rows: Sequence[Row], factor: int) -> Cost:
    """Return the cost at one echoing factor, from a line that is fitted by least squares."""
    ours = [row for row in rows if row["echo_factor"] == factor]
    steps = [row["steps"] for row in ours]
    slope, level = np.polyfit(np.log(steps), [row["final_accuracy"] for row in ours], 1)
    if slope <= 0:
        return Cost(None, False)
    found = math.exp((TARGET - level) / slope)
    return Cost(found, min(steps) / MARGIN <= found <= max(steps) * MARGIN)


def log_ratio(rows: Sequence[Row], factor: int) -> tuple[float, bool]:
    """Return the log ratio of fresh examples at ``factor`` to those at 1, and whether both can be trusted.

    A cost is the number of steps N at which the fitted line crosses the target. Both costs can be trusted if
    each crossing lies in the range of N of its runs, or at most a tenth outside.
    """
    ours, theirs = cost(rows, factor), cost(rows, 1)
    if ours.steps is None or theirs.steps is None:
        return math.nan, False
    return math.log(ours.steps / factor / theirs.steps), ours.among and theirs.among


def ratio(rows: Sequence[Row], factor: int) -> Ratio:
    """Return the ratio with its jackknife interval over seeds."""
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


def table(rows: Sequence[Row]) -> str:
    """Return Markdown tables: one of the final accuracies by seed, and one of costs and ratios."""
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
    costs = ("e", "N at 80 %", "fresh examples", "ratio", "by the rule")
    return f"{markdown_table(headings, of_ends)}\n\n{markdown_table(costs, of_costs)}"


if __name__ == "__main__":
    print(table(read_rows(Path("results/schedule_ends/cifar10/trials.json"))))
