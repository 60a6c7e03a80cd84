"""Print how many fresh examples echoing saves with different learning-rate schedules.

Run: ``python -m experiments.schedule_clock.cells``
"""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from adaecho.records.statistics import mean_interval
from adaecho.records.trials import read_rows

SEEDS = 5
# For each seed, the number of fresh examples, and whether the target was reached.
CostsBySeed = Mapping[int, tuple[float, bool]]


def costs_by_arm(results: Path, *, final_counts: bool = False) -> dict[str, CostsBySeed]:
    """Return how many fresh examples each configuration needed to reach the target, for each seed."""
    found: dict[str, dict[int, tuple[float, bool]]] = {}
    for record in ("schedule_clock", "schedule_clock_e4", "cifar10_depth8_80"):
        table = results / record / "cifar10" / "trials.json"
        for row in read_rows(table) if table.exists() else ():
            name = row["arm"]
            if record == "cifar10_depth8_80":
                name = {"baseline": "baseline_10000", "example_before_e2": "e2_steps_10000"}[name]
            if row["repeat"] < SEEDS:
                reached = row["to_target_fresh_examples"] is not None
                # The cost of a run that missed the target is everything that it read.
                cost = row["to_target_fresh_examples"] if reached else row["fresh_examples"]
                # If final_counts is true, a run also reaches the target if only its final accuracy does.
                reached |= final_counts and (row.get("final_accuracy") or 0) >= row["target_value"]
                found.setdefault(name, {})[row["seed"]] = (float(cost), reached)
    found["baseline_7000"] = found.pop("baseline")
    # All arms must have the same seeds, because ratios are paired by seed.
    assert all(list(by_seed) == list(found["baseline_7000"]) for by_seed in found.values())
    return found


def ratio(ours: CostsBySeed, theirs: CostsBySeed) -> tuple[str, str]:
    """Return the ratio of two configurations' costs, and a verdict: above 1, below 1, or not decided."""
    # The ratio is a geometric mean over seeds.
    logs = [math.log(ours[seed][0] / theirs[seed][0]) for seed in theirs]
    mean = fmean(logs)
    missed = {
        side for side, by_seed in (("ours", ours), ("theirs", theirs)) for _, ok in by_seed.values() if not ok
    }
    if missed:  # these costs are too low, so the ratio is only a bound; it is unknown if both sides missed
        above = "theirs" not in missed and all(log > 0 for log in logs)
        below = "ours" not in missed and all(log < 0 for log in logs)
        sign = {("ours",): ">", ("theirs",): "<"}.get(tuple(sorted(missed)))
        words = f"{sign}{math.exp(mean):.2f}" if sign else "-"
        return words, "above 1" if above else "below 1" if below else "not decided"
    low, high = mean_interval(logs, 0.95)
    words = f"{math.exp(mean):.2f} ({math.exp(low):.2f} to {math.exp(high):.2f})"
    return words, "below 1" if high < 0 else "above 1" if low > 0 else "not decided"


def tuned(found: Mapping[str, CostsBySeed], prefix: str) -> tuple[dict[int, tuple[float, bool]], list[str]]:
    """Return each seed's cost with the configuration that is best on the other seeds, and its name."""
    # The best configuration reached the target on all other seeds, at the lowest geometric mean cost. The
    # candidates are the configurations whose names start with ``prefix``.
    costs, chosen = {}, []
    for left_out in found["baseline_7000"]:
        means = {
            name: fmean(math.log(cost) for seed, (cost, _) in by_seed.items() if seed != left_out)
            for name, by_seed in found.items()
            if name.startswith(prefix) and all(ok for seed, (_, ok) in by_seed.items() if seed != left_out)
        }
        chosen.append(min(means, key=lambda name: means[name]))
        costs[left_out] = found[chosen[-1]][left_out]
    return costs, chosen


def table(found: Mapping[str, CostsBySeed]) -> list[str]:
    """Return the rows of a Markdown table: how repeats and the learning-rate schedule change the cost."""
    lines: list[str] = []
    without, _ = tuned(found, "baseline")
    for e in (2, 4):
        for decay in (7000, 10_000):
            names = [f"e{e}_fresh_{decay}", f"e{e}_steps_{decay}", f"baseline_{decay}"]
            fresh, steps, base = map(found.get, names)
            # The effects of the repeats, the schedule, and both. With echoing, the learning rate decays
            # over a number of fresh examples or of steps. Without echoing, the two are the same.
            pairs = (fresh, base), (steps, fresh), (steps, base)
            if steps:
                ratios = (ratio(a, b) if a and b else ("-", "-") for a, b in pairs)
                lines.append(f"| {e} | {decay:,} | {' | '.join(itertools.chain(*ratios))} |")
        # The last row of each factor compares the best configurations with and without echoing.
        costs, chosen = tuned(found, f"e{e}_")
        lines.append(f"| {e} | {', '.join(dict.fromkeys(chosen))} | {' | '.join(ratio(costs, without))} |")
    return lines


if __name__ == "__main__":
    for final in (False, True):
        print(f"ends count: {final}", *table(costs_by_arm(Path("results"), final_counts=final)), sep="\n")
