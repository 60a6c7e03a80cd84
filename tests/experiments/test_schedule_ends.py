"""Costs by the ends of decays, of synthetic and of recorded runs."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
from scipy import stats

from adaecho.records.trials import read_rows
from experiments.schedule_clock.ends import ratio, table

ROOT = Path(__file__).parents[2]
STEPS = {1: (5500, 6000, 6500), 2: (7500, 8000, 9000), 4: (8000, 9000, 12000)}


def rows(costs: dict[int, float], seeds: int = 5, spread: float = 0.0) -> list[dict[str, float]]:
    """Ends on a line with 80% at the cost; the seed moves the line at e > 1."""
    return [
        {
            "echo_factor": factor, "steps": steps, "seed": seed, "repeat": seed,
            "final_accuracy": 0.8 + 0.05 * math.log(steps / at) + spread * (seed - 2) * (factor > 1),
        }
        for factor, at in costs.items()
        for steps in STEPS[factor]
        for seed in range(seeds)
    ]  # fmt: skip


def test_missing_seeds_and_a_distant_crossing_leave_the_ratio_undecided() -> None:
    for at_2, settings in (
        (8100.0, {"seeds": 4, "spread": 0.001}),
        (11_000.0, {"spread": 0.001}),
        (12_400.0, {"spread": 0.02}),
    ):
        assert ratio(rows({1: 6100.0, 2: at_2, 4: 10_000.0}, **settings), 2).verdict == "not decided"


def test_page_and_program_equal_an_independent_recomputation() -> None:
    runs = read_rows(ROOT / "results/schedule_ends/cifar10/trials.json")
    assert Counter(run["seed"] for run in runs) == dict.fromkeys({run["seed"] for run in runs}, 9)
    page, printed = (ROOT / "experiments/schedule_clock/README.md").read_text(), table(runs)

    def at_target(factor: int, without: int | None = None) -> float:
        ours = [run for run in runs if run["echo_factor"] == factor and run["seed"] != without]
        logs, accuracies = [math.log(run["steps"]) for run in ours], [run["final_accuracy"] for run in ours]
        line = stats.linregress(logs, accuracies)
        return math.exp((0.8 - line.intercept) / line.slope)

    seeds = sorted({run["seed"] for run in runs})
    for factor in (1, 2, 4):
        left_out = sorted(at_target(factor, seed) for seed in seeds)
        steps, reads = at_target(factor), 64 * at_target(factor) / factor
        assert f"| {factor} | {steps:,.0f} | {reads:,.0f} |" in page
        assert f"| {factor} | {steps:,.0f} | {reads:,.0f} |" in printed
        assert f"| {left_out[0]:,.0f} to {left_out[-1]:,.0f} |" in page
        logs = np.log([at_target(factor, seed) / at_target(1, seed) / factor for seed in seeds])
        log = math.log(steps / at_target(1) / factor)
        # Student's interval with the variance of the jackknife.
        middle = 5 * log - 4 * logs.mean()
        half = stats.t.ppf(0.975, 4) * math.sqrt(4 / 5 * ((logs - logs.mean()) ** 2).sum())
        if factor > 1:
            interval = f"({math.exp(middle - half):.2f} to {math.exp(middle + half):.2f})"
            assert f"| {math.exp(log):.2f} {interval} |" in page
            assert f"| {math.exp(log):.2f} {interval} |" in printed
