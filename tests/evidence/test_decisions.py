"""Claims are decided by the stated rule: on costs made up so that the answer is known."""

import math
from typing import Any

import numpy as np
import pytest

from experiments.evidence.claims import CLAIMS
from experiments.evidence.decisions import (
    ABSENT,
    FAILS,
    FRAGILE,
    HOLDS,
    OPEN,
    Decision,
    Records,
    decide,
)
from experiments.evidence.readings import easier
from experiments.evidence.significance import cheaper_p

BUDGET = 3000.0


def rows(arm: str, costs: list[Any], best: list[float] | None = None) -> list[dict[str, Any]]:
    """One counted trial a search; one that missed its target spent its budget."""
    return [
        {
            "arm": arm, "repeat": repeat, "index": 0, "counted": True, "task": "digits",
            "target_metric": "accuracy", "target_value": 0.97, "best_value": best[repeat] if best else 0.97,
            "to_target_fresh_examples": cost, "fresh_examples": cost or BUDGET,
        }
        for repeat, cost in enumerate(costs)
    ]  # fmt: skip


def decided(experiment: str, *arms: list[dict[str, Any]]) -> dict[str, Decision]:
    table = [row for arm in arms for row in arm]
    return {one.claim.key: one for one in decide(Records({experiment: table}), "digits")}


def the_one_decided(records: Records) -> Decision:
    (found,) = [one for one in decide(records, "digits") if one.verdict != ABSENT]
    return found


BASELINE_COSTS = [1000.0, 1100.0, 950.0, 1050.0, 1020.0]
HALF_COSTS = [cost / 2 for cost in BASELINE_COSTS]
BASELINE = rows("baseline", BASELINE_COSTS)


def test_a_claim_without_records_is_not_yet_measured() -> None:
    found = decide(Records(), "digits")
    assert len(found) == len(CLAIMS)
    assert {one.verdict for one in found} == {ABSENT}


# Costs, the verdict, the ratio, and of how many of all 252 splits of the runs the rank sum is no larger.
SAVINGS: dict[str, tuple[list[float | None], str, float | None, int]] = {
    "clearly saves": ([*HALF_COSTS], HOLDS, 0.5, 1),
    "clearly costs more": ([2 * cost for cost in BASELINE_COSTS], FAILS, 2.0, 252),
    "is hidden by noise": ([700.0, 1500.0, 900.0, 1300.0, 1000.0], OPEN, 1.0188, 111),
    "mostly missed, which ranks last": ([None, None, 500.0, None, None], OPEN, None, 239),
    "missed once, else much cheaper": ([100.0, 101.0, 100.0, 99.0, None], OPEN, None, 17),
    "missed, else dearer": ([2000.0, 2200.0, 1900.0, None, None], FAILS, None, 252),
}


@pytest.mark.parametrize(("costs", "verdict", "ratio", "splits"), SAVINGS.values(), ids=SAVINGS)
def test_a_saving_is_judged_by_costs_ranks_and_misses(
    costs: list[float | None], verdict: str, ratio: float | None, splits: int
) -> None:
    found = decided("fig3", BASELINE, rows("before", [1.0]), rows("batch_e2", costs))["batch_saves"]
    assert (found.verdict, found.reached) == (verdict, (5 - costs.count(None), 5, 5, 5))
    assert (found.effect and found.effect.value) == (ratio and pytest.approx(ratio, rel=1e-4))
    assert found.permutation_p == pytest.approx(splits / 252)


def test_p_values_grow_with_the_number_of_claims() -> None:
    cheap = [500.0, 850.0, 675.0, 925.0, 810.0]
    echoed = [rows(arm, cheap) for arm in ("batch_e2", "example_after_e2", "example_before_e2")]
    alone, among = (decided("fig3", BASELINE, *some)["batch_saves"].p for some in (echoed[:1], echoed))
    assert 0 < (alone or 0) < (among or 0)


def test_splits_of_many_runs_are_sampled_and_repeat_and_a_miss_has_the_worst_rank() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = list(rng.normal(1.0, 0.3, 24)), list(rng.normal(1.4, 0.3, 24))
    assert cheaper_p(ours, theirs) == cheaper_p(ours, theirs) < 0.05
    assert cheaper_p([1.0, None], [2.0, 2.0, None]) == pytest.approx(5 / 10)


@pytest.mark.parametrize(
    ("best", "verdict"),
    [([0.975, 0.974, 0.976], HOLDS), ([0.95, 0.949, 0.951], FAILS), ([0.99, 0.94, 0.965], OPEN)],
    ids=["as good", "worse", "unclear"],
)
def test_no_harm_is_non_inferiority_within_the_margin(best: list[float], verdict: str) -> None:
    nothing: list[float | None] = [None] * 3
    found = decided("fig8", rows("baseline", nothing, [0.975, 0.974, 0.976]), rows("batch_e4", nothing, best))
    assert found["batch_no_harm"].verdict == verdict


def searched(arm: str, *costs: dict[float, float | None], stopped_at: int = 900) -> list[dict[str, Any]]:
    """Searches of trials at positions of one axis; None for one that was stopped early."""
    return [
        row | {
            "repeat": repeat, "positions": {"optimizer.learning_rate": position}, "best_value": 0.9,
            "status": "reached" if cost else "pruned", "fresh_examples": cost or stopped_at, "index": index,
        }
        for repeat, search in enumerate(costs)
        for index, (position, cost) in enumerate(search.items())
        for row in rows(arm, [cost])
    ]  # fmt: skip


MIDDLE: list[dict[float, float | None]] = [{0.5: cost} for cost in BASELINE_COSTS]
HALF: list[dict[float, float | None]] = [{0.5: cost} for cost in HALF_COSTS]


@pytest.mark.parametrize(
    ("ours", "verdict", "turns_in"),
    [
        pytest.param(HALF, HOLDS, (), id="every reading repeats it"),
        pytest.param([{0.1: cost, 0.5: 1010.0} for cost in HALF_COSTS], FRAGILE,
                     ("upper part of the space",), id="at one end of the space"),
        pytest.param(MIDDLE, OPEN, (), id="open: nothing to turn"),
    ],
)  # fmt: skip
def test_a_verdict_stands_that_no_reading_turns(
    ours: list[dict[float, float | None]], verdict: str, turns_in: tuple[str, ...]
) -> None:
    found = decided("fig3", searched("baseline", *MIDDLE), searched("batch_e2", *ours))["batch_saves"]
    assert (found.verdict, found.turns_in, len(found.readings)) == (verdict, turns_in, 2)


@pytest.mark.parametrize(("stopped_at", "verdict"), [(450, FRAGILE), (2000, HOLDS)])
def test_a_baseline_that_may_have_been_as_cheap_makes_it_fragile(stopped_at: int, verdict: str) -> None:
    base: list[dict[float, float | None]] = [{0.5: cost, 0.6: None} for cost in BASELINE_COSTS]
    table = searched("baseline", *base, stopped_at=stopped_at)
    assert decided("fig3", table, searched("batch_e2", *HALF))["batch_saves"].verdict == verdict


def test_a_saving_that_an_easier_target_lacks_is_fragile() -> None:
    table = searched("baseline", *MIDDLE) + searched("batch_e2", *HALF)
    curves = [
        {"arm": row["arm"], "repeat": row["repeat"], "values": [0.945, 0.97],
         "fresh_examples": [160, row["to_target_fresh_examples"]]}
        for row in table
    ]  # fmt: skip
    found = the_one_decided(Records({"fig3": table}, {"fig3": curves}))
    assert (found.verdict, found.turns_in, len(found.readings)) == (FRAGILE, ("twice the error",), 4)


@pytest.mark.parametrize(
    ("metric", "target", "step", "chance", "easier_target"),
    [
        ("accuracy", 0.97, 1, 0.1, 0.955),
        ("accuracy", 0.97, 2, None, 0.94),
        ("cross_entropy", 3.9, 1, None, 4.0),
        ("cross_entropy", 3.9, 2, None, 4.1),
        ("accuracy", 0.4, 1, 0.1, None),
        ("accuracy", 0.4, 2, None, None),
        ("cross_entropy", 6.8, 2, math.log(1024), None),
    ],
)
def test_targets_become_easier_but_not_what_guessing_meets(
    metric: str, target: float, step: int, chance: float | None, easier_target: float | None
) -> None:
    found = easier(metric, target, step, chance)
    assert found == (easier_target and pytest.approx(easier_target))


def timed(arm: str, fresh: list[float], seconds: list[float]) -> list[dict[str, Any]]:
    return [row | {"to_target_train_time_s": one} for row, one in zip(rows(arm, fresh), seconds, strict=True)]


@pytest.mark.parametrize(
    ("s_per_fresh_example", "saves", "follows"),
    [
        ([0.1000, 0.1001, 0.1002], HOLDS, HOLDS),
        ([0.1100, 0.1101, 0.1102], HOLDS, FAILS),
        ([0.0900, 0.1030, 0.1180], HOLDS, OPEN),
        ([0.3000, 0.3001, 0.3002], FAILS, FAILS),
    ],
    ids=["as before", "a tenth more", "unclear", "three times"],
)
def test_wall_time_is_judged_by_itself_and_against_fresh_examples(
    s_per_fresh_example: list[float], saves: str, follows: str
) -> None:
    fresh = [400.0, 440.0, 420.0]
    seconds = [one * each for one, each in zip(fresh, s_per_fresh_example, strict=True)]
    base = timed("e1", [1000.0, 1100.0, 900.0], [100.0, 110.0, 90.0])
    found = decided("fig4", base, timed("e5", fresh, seconds))
    assert (found["time_saves"].verdict, found["time_follows_fresh"].verdict) == (saves, follows)
    ratio = found["time_follows_fresh"].effect
    assert ratio.value == pytest.approx(np.prod(s_per_fresh_example) ** (1 / 3) / 0.1)


def test_one_run_decides_nothing_about_time() -> None:
    found = decided("fig4", timed("e1", [1000.0], [100.0]), timed("e5", [400.0], [40.0]))
    assert {found[key].verdict for key in ("time_saves", "time_follows_fresh")} == {OPEN}


def with_curves(table: list[dict[str, Any]], **columns: Any) -> Records:
    """Curves that are evaluated every 160 fresh examples, from 0.3 up to the target."""
    found = [row | columns for row in table]
    curves = [
        {"arm": row["arm"], "repeat": row["repeat"], "fresh_examples": list(range(160, int(cost) + 1, 160)),
         "values": np.linspace(0.3, row["target_value"], int(cost) // 160).tolist()}
        for row in found
        if (cost := row["to_target_fresh_examples"]) is not None
    ]  # fmt: skip
    return Records({"fig3": found}, {"fig3": curves})


def test_an_easier_target_at_chance_is_no_reading() -> None:
    table = searched("baseline", *MIDDLE) + searched("batch_e2", *HALF)
    found = the_one_decided(with_curves(table, task="cifar10", target_value=0.4))
    assert set(found.readings) == {"lower part of the space", "upper part of the space"}


@pytest.mark.parametrize("last", [480.0, np.nextafter(480.0, 481.0)], ids=["equal", "equal but for rounding"])
def test_equal_costs_are_known_as_well_as_their_grid(last: float) -> None:
    theirs = searched("baseline", *({0.5: 960.0} for _ in range(3)))
    ours = searched("batch_e2", {0.5: 480.0}, {0.5: 480.0}, {0.5: last})
    found = the_one_decided(with_curves(theirs + ours))
    # Worked out by hand: a uniform error within 160, of three costs on either side.
    error = math.sqrt((160**2 / 12 / 480**2 + 160**2 / 12 / 960**2) / 3)
    assert math.log(found.effect.value / (found.effect.low or 0)) > 2 * error
    assert 1e-4 < (found.p or 0) < 0.05


def test_without_a_grid_equal_costs_have_their_ranks() -> None:
    found = decided("fig3", rows("baseline", [1000.0] * 3), rows("batch_e2", [500.0] * 3))["batch_saves"]
    assert (found.verdict, found.p, found.permutation_p) == (OPEN, pytest.approx(0.05), pytest.approx(0.05))


@pytest.mark.parametrize(
    "base", [[None, 2700.0, 2800.0, 2900.0, 2950.0], [None, 2999.0, None, None, None]], ids=["once", "often"]
)
def test_a_baseline_that_missed_costs_at_least_its_budget(base: list[float | None]) -> None:
    found = decided("fig3", rows("baseline", base), rows("batch_e2", HALF_COSTS))["batch_saves"]
    assert (found.verdict, found.reached) == (HOLDS, (5, 5, 5 - base.count(None), 5))
    at_least = np.prod([cost or BUDGET for cost in base])
    assert found.effect.value == pytest.approx((np.prod(HALF_COSTS) / at_least) ** 0.2)


_STRENGTH = (FAILS, OPEN, HOLDS)


def test_a_reading_more_favourable_to_a_claim_never_has_a_weaker_verdict() -> None:
    """Trials at 0.1 are in the lower part of the space alone, those at 0.9 in the upper one alone."""
    rng = np.random.default_rng(0)
    lower, upper = "lower part of the space", "upper part of the space"
    counts = dict.fromkeys((HOLDS, FAILS, OPEN, FRAGILE), 0)
    for _ in range(300):
        ratio, spread, missing = rng.uniform(0.3, 2.5), rng.uniform(0, 0.15), rng.choice([0, 0.3])

        def draw(of: float, spread: float = spread, missing: float = missing) -> list[float | None]:
            costs = (of * np.exp(rng.normal(0, spread, 3))).round(3).tolist()
            return [None if rng.random() < missing else min(cost, 1e6) for cost in costs]

        def more(cost: float | None) -> float | None:
            return None if cost is None or rng.random() < 0.05 else cost * rng.choice([1.0, 1.0, 1.05, 3.0])

        ours, theirs = draw(1000 * ratio), draw(1000)
        base = [{0.1: cost, 0.9: more(cost)} for cost in theirs]
        arm = [{0.1: more(cost), 0.9: cost} for cost in ours]
        table = searched("baseline", *base, stopped_at=5000) + searched("batch_e2", *arm, stopped_at=5000)
        found = decided("fig3", table)["batch_saves"]
        strengths = [_STRENGTH.index(found.readings[name].verdict) for name in (lower, upper)]
        assert strengths[0] <= strengths[1]
        counts[found.verdict] += 1
        # As they were run, the arm costs what it does in the upper part and the baseline what in the lower.
        claimed = found.difference[1] < 0
        assert (upper if claimed else lower) not in found.turns_in
    assert min(counts.values()) > 5
