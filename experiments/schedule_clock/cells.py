"""What the records of schedule_clock say by its rule: the tables of its page."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev

from scipy import stats

from adaecho.records.trials import read_rows

SEEDS = 5
Cell = Mapping[int, tuple[float, bool]]  # by seed: fresh examples, and whether the target was reached


def cells(results: Path, *, ends: bool = False) -> dict[str, Cell]:
    """Every arm by its name; two of another record by what they would have here.

    Args:
        results: where the records are.
        ends: whether a run that met the target at its end alone has reached it there.
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
    assert all(list(cell) == list(found["baseline_7000"]) for cell in found.values())  # the seeds are shared
    return found


def ratio(ours: Cell, theirs: Cell) -> tuple[str, str]:
    """The ratio with its interval or as a bound, and whether it lies on one side of 1."""
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
    half = stats.t.ppf(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    words = f"{math.exp(mean):.2f} ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})"
    return words, "below 1" if mean + half < 0 else "above 1" if mean - half > 0 else "not decided"


def tuned(found: Mapping[str, Cell], prefix: str) -> tuple[dict[int, tuple[float, bool]], list[str]]:
    """Of each seed the cost in the cell that is cheapest on the others, and that cell."""
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


def tables(results: Path) -> list[list[list[str]]]:
    """The rows of the page's two tables: by the rule, and those that ends which count turn into others."""
    by_rule, with_ends = (_tables(cells(results, ends=ends)) for ends in (False, True))
    return [
        [*rows, *(row for row in others if row not in rows)]
        for rows, others in zip(by_rule, with_ends, strict=True)
    ]


def _tables(found: Mapping[str, Cell]) -> list[list[list[str]]]:
    repeats: list[list[str]] = []
    for e in (2, 4):
        for decay in (7000, 10_000):
            names = [f"e{e}_fresh_{decay}", f"e{e}_steps_{decay}", f"baseline_{decay}"]
            if all(name in found for name in names):
                fresh, steps, base = (found[name] for name in names)
                pairs = (fresh, base), (steps, fresh), (steps, base)
                repeats.append([str(e), f"{decay:,}", *(cell for pair in pairs for cell in ratio(*pair))])
            elif names[1] in found:
                both = ratio(found[names[1]], found[names[2]])
                repeats.append([str(e), f"{decay:,}", *4 * ["-"], *both])
    without, _ = tuned(found, "baseline")
    chosen: list[list[str]] = []
    for e in (2, 4):
        costs, names = tuned(found, f"e{e}_")
        chosen.append(
            [str(e), ", ".join(f"`{name}`" for name in dict.fromkeys(names)), *ratio(costs, without)]
        )
    return [repeats, chosen]
