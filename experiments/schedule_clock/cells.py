"""Print the ratios of schedule_clock: ``python -m experiments.schedule_clock.cells``."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from adaecho.records.statistics import mean_interval
from adaecho.records.trials import read_rows

SEEDS = 5
# For each seed, the number of fresh examples, and whether the target was reached.
Cell = Mapping[int, tuple[float, bool]]


def cells(results: Path, *, ends: bool = False) -> dict[str, Cell]:
    """Return the cell of every arm, by the arm's name.

    An arm is one configuration under comparison. Its cell contains, for each seed, the number of fresh
    examples and whether the run reached the target. Two arms come from another record and are renamed to fit
    this experiment.

    Args:
        results: folder of the records.
        ends: whether a run also counts as reaching the target if only its final accuracy meets it.
    """
    found: dict[str, dict[int, tuple[float, bool]]] = {}
    for record in ("schedule_clock", "schedule_clock_e4", "cifar10_depth8_80"):
        table = results / record / "cifar10" / "trials.json"
        for row in read_rows(table) if table.exists() else ():
            name = row["arm"]
            if record == "cifar10_depth8_80":
                name = {"baseline": "baseline_10000", "example_before_e2": "e2_steps_10000"}[name]
            if row["repeat"] < SEEDS:
                reached = row["to_target_fresh_examples"] is not None
                cost = row["to_target_fresh_examples"] if reached else row["fresh_examples"]
                reached |= ends and (row.get("final_accuracy") or 0) >= row["target_value"]
                found.setdefault(name, {})[row["seed"]] = (float(cost), reached)
    found["baseline_7000"] = found.pop("baseline")
    # All arms must have the same seeds, because ratios are paired by seed.
    assert all(list(cell) == list(found["baseline_7000"]) for cell in found.values())
    return found


def ratio(ours: Cell, theirs: Cell) -> tuple[str, str]:
    """Return the ratio of costs, and whether it lies above or below 1, both as text.

    If all runs reached the target, the ratio has an interval. Otherwise the ratio is a bound, or unknown.
    """
    logs = [math.log(ours[seed][0] / theirs[seed][0]) for seed in theirs]
    mean = fmean(logs)
    missed = {
        side for side, cell in (("ours", ours), ("theirs", theirs)) for _, ok in cell.values() if not ok
    }
    if missed:
        above = "theirs" not in missed and all(log > 0 for log in logs)
        below = "ours" not in missed and all(log < 0 for log in logs)
        sign = {("ours",): ">", ("theirs",): "<"}.get(tuple(sorted(missed)))
        words = f"{sign}{math.exp(mean):.2f}" if sign else "-"
        return words, "above 1" if above else "below 1" if below else "not decided"
    low, high = mean_interval(logs, 0.95)
    words = f"{math.exp(mean):.2f} ({math.exp(low):.2f} to {math.exp(high):.2f})"
    return words, "below 1" if high < 0 else "above 1" if low > 0 else "not decided"


def tuned(found: Mapping[str, Cell], prefix: str) -> tuple[dict[int, tuple[float, bool]], list[str]]:
    """Return, for each seed, the cost in the cell that is the cheapest on average over the other seeds.

    A cell contains the costs of one arm. The second result is the list of the names of the chosen cells. The
    choice for a seed ignores the cost of that seed, so the result is not biased by the choice.
    """
    costs, chosen = {}, []
    for left_out in found["baseline_7000"]:
        means = {
            name: fmean(math.log(cost) for seed, (cost, _) in cell.items() if seed != left_out)
            for name, cell in found.items()
            if name.startswith(prefix) and all(ok for seed, (_, ok) in cell.items() if seed != left_out)
        }
        chosen.append(min(means, key=lambda name: means[name]))
        costs[left_out] = found[chosen[-1]][left_out]
    return costs, chosen


def table(found: Mapping[str, Cell]) -> list[str]:
    """Return the lines of a table of cost ratios.

    A row has three ratios: for repeats alone, for a schedule that counts steps instead of fresh examples, and
    for repeats and schedule together. The last row of each echoing factor has the ratio for the best arm (see
    ``tuned``).
    """
    lines: list[str] = []
    without, _ = tuned(found, "baseline")
    for e in (2, 4):
        for decay in (7000, 10_000):
            names = [f"e{e}_fresh_{decay}", f"e{e}_steps_{decay}", f"baseline_{decay}"]
            fresh, steps, base = map(found.get, names)
            pairs = (fresh, base), (steps, fresh), (steps, base)
            if steps:
                ratios = (ratio(a, b) if a and b else ("-", "-") for a, b in pairs)
                lines.append(f"| {e} | {decay:,} | {' | '.join(itertools.chain(*ratios))} |")
        costs, chosen = tuned(found, f"e{e}_")
        lines.append(f"| {e} | {', '.join(dict.fromkeys(chosen))} | {' | '.join(ratio(costs, without))} |")
    return lines


if __name__ == "__main__":
    for counts_ends in (False, True):
        print(f"ends count: {counts_ends}", *table(cells(Path("results"), ends=counts_ends)), sep="\n")
