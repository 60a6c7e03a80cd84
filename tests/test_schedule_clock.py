"""The tables of experiments/schedule_clock are what its records say by its rule."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev

import pytest
from scipy import stats

from adaecho.records.trials import read_rows

ROOT = Path(__file__).resolve().parent.parent
SEEDS = 5
Cell = Mapping[int, tuple[float, bool]]  # by seed: fresh examples, and whether the target was reached


def cells(*, ends: bool = False) -> dict[str, Cell]:
    """Every arm by its name; two of another record by what they would have here.

    Args:
        ends: whether a run that met the target at its end alone has reached it there.
    """
    found: dict[str, dict[int, tuple[float, bool]]] = {}
    for record in ("schedule_clock", "schedule_clock_e4", "cifar10_depth8_80"):
        table = ROOT / "results" / record / "cifar10" / "trials.json"
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


@pytest.mark.parametrize("ends", [False, True])
def test_the_page_shows_what_the_rules_say(ends: bool) -> None:
    page = (ROOT / "experiments" / "schedule_clock" / "README.md").read_text()
    for line in lines(cells(ends=ends)):
        print(line)
        assert line in page


def test_the_ends_that_meet_the_target_are_told() -> None:
    page = (ROOT / "experiments" / "schedule_clock" / "README.md").read_text()
    met = {
        (row["arm"], row["repeat"]): row["final_accuracy"]
        for row in read_rows(ROOT / "results" / "schedule_clock" / "cifar10" / "trials.json")
        if (row["final_accuracy"] or 0) >= row["target_value"]
    }
    assert set(met) == {("e2_steps_7000", 1), ("e4_steps_10000", 3)}
    assert all(f"{end:.4f}" in page for end in met.values())


def test_the_texts_tell_the_reading_that_counts() -> None:
    page = (ROOT / "experiments" / "schedule_clock" / "README.md").read_text()
    readme = (ROOT / "README.md").read_text()
    found = cells()
    ratio_of_decays = ratio(found["baseline_7000"], found["baseline_10000"])[0][:4]
    tuned_at = {e: ratio(tuned(found, f"e{e}_")[0], tuned(found, "baseline")[0]) for e in (2, 4)}
    alone = [ratio(found[f"e2_fresh_{n}"], found[f"baseline_{n}"])[0][:4] for n in (7000, 10_000)]
    assert f"takes [{tuned_at[2][0]}](experiments/schedule_clock/README.md)" in readme
    assert tuned_at[4][1] == "not decided"
    with_ends = cells(ends=True)
    at_4 = ratio(tuned(with_ends, "e4_")[0], tuned(with_ends, "baseline")[0])[0]
    assert f"(at e = 4 not decided by the rule, {at_4} with the ends of runs counted)" in readme
    assert f"{alone[0]} to {alone[1]} by the repeats alone" in readme
    assert f"the baseline needs {ratio_of_decays} as much with 7,000 steps as with 10,000" in page


def lines(found: Mapping[str, Cell]) -> list[str]:
    """The rows of the page's tables."""
    rows = []
    for e in (2, 4):
        for decay in (7000, 10_000):
            names = [f"e{e}_fresh_{decay}", f"e{e}_steps_{decay}", f"baseline_{decay}"]
            if all(name in found for name in names):
                fresh, steps, base = (found[name] for name in names)
                pairs = (fresh, base), (steps, fresh), (steps, base)
                parts = [" | ".join(ratio(*pair)) for pair in pairs]
                rows.append(f"| {e} | {decay:,} | {' | '.join(parts)} |")
            elif names[1] in found:
                parts = " | ".join(ratio(found[names[1]], found[names[2]]))
                rows.append(f"| {e} | {decay:,} | - | - | - | - | {parts} |")
    without, _ = tuned(found, "baseline")
    for e in (2, 4):
        costs, chosen = tuned(found, f"e{e}_")
        cells_chosen = ", ".join(f"`{name}`" for name in dict.fromkeys(chosen))
        rows.append(f"| {e} | {cells_chosen} | {' | '.join(ratio(costs, without))} |")
    return rows
