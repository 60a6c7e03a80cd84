"""Claims follow the stated rule, on synthetic costs with a known answer."""

import math
from typing import Any

import numpy as np
import pytest

from experiments.evidence.decisions import ABSENT, FAILS, FRAGILE, HOLDS, OPEN, Decision, Records, decide
from experiments.evidence.readings import easier
from experiments.evidence.significance import cheaper_p

BUDGET = 3000.0


def rows(arm: str, costs: list[Any], best: list[float] | None = None) -> list[dict[str, Any]]:
    """One counted trial per search; a search that missed the target spent its budget."""
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


def the_decided_claim(records: Records) -> Decision:
    (found,) = [one for one in decide(records, "digits") if one.verdict != ABSENT]
    return found


BASELINE_COSTS = [1000.0, 1100.0, 950.0, 1050.0, 1020.0]
HALF_COSTS = [cost / 2 for cost in BASELINE_COSTS]
BASELINE = rows("baseline", BASELINE_COSTS)


# Costs, verdict, ratio, and the number of the 252 splits of the runs with a rank sum as small.
SAVINGS: dict[str, tuple[list[float | None], str, float | None, int]] = {
    "clearly saves": ([*HALF_COSTS], HOLDS, 0.5, 1),
    "costs more": ([2 * cost for cost in BASELINE_COSTS], FAILS, 2.0, 252),
    "is hidden by noise": ([700.0, 1500.0, 900.0, 1300.0, 1000.0], OPEN, 1.0188, 111),
    "mostly missed, which ranks last": ([None, None, 500.0, None, None], OPEN, None, 239),
    "missed, else dearer": ([2000.0, 2200.0, 1900.0, None, None], FAILS, None, 252),
}


@pytest.mark.parametrize(("costs", "verdict", "ratio", "splits"), SAVINGS.values(), ids=SAVINGS)
def test_a_saving_depends_on_costs_ranks_and_misses(
    costs: list[float | None], verdict: str, ratio: float | None, splits: int
) -> None:
    found = decided("fig3", BASELINE, rows("before", [1.0]), rows("batch_e2", costs))["batch_saves"]
    assert (found.verdict, found.reached) == (verdict, (5 - costs.count(None), 5, 5, 5))
    assert (found.effect and found.effect.value) == (ratio and pytest.approx(ratio, rel=1e-4))
    assert found.permutation_p == pytest.approx(splits / 252)


def test_the_rank_test_samples_splits_of_many_runs_and_ranks_a_miss_last() -> None:
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
    """Searches of trials at positions of one axis; None for a pruned trial."""
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
def test_a_verdict_is_fragile_if_a_reading_changes_it(
    ours: list[dict[float, float | None]], verdict: str, turns_in: tuple[str, ...]
) -> None:
    found = decided("fig3", searched("baseline", *MIDDLE), searched("batch_e2", *ours))["batch_saves"]
    assert (found.verdict, found.turns_in, len(found.readings)) == (verdict, turns_in, 2)


@pytest.mark.parametrize(("stopped_at", "verdict"), [(450, FRAGILE), (2000, HOLDS)])
def test_a_baseline_with_a_possibly_equal_cost_makes_a_claim_fragile(stopped_at: int, verdict: str) -> None:
    base: list[dict[float, float | None]] = [{0.5: cost, 0.6: None} for cost in BASELINE_COSTS]
    table = searched("baseline", *base, stopped_at=stopped_at)
    assert decided("fig3", table, searched("batch_e2", *HALF))["batch_saves"].verdict == verdict


def test_a_saving_without_an_easier_target_is_fragile() -> None:
    table = searched("baseline", *MIDDLE) + searched("batch_e2", *HALF)
    curves = [
        {"arm": row["arm"], "repeat": row["repeat"], "values": [0.945, 0.97],
         "fresh_examples": [160, row["to_target_fresh_examples"]]}
        for row in table
    ]  # fmt: skip
    found = the_decided_claim(Records({"fig3": table}, {"fig3": curves}))
    assert (found.verdict, found.turns_in, len(found.readings)) == (FRAGILE, ("twice the error",), 4)


@pytest.mark.parametrize(
    ("metric", "target", "step", "chance", "easier_target"),
    [
        ("accuracy", 0.97, 1, 0.1, 0.955),
        ("cross_entropy", 3.9, 1, None, 4.0),
        ("accuracy", 0.4, 1, 0.1, None),
        ("accuracy", 0.4, 2, None, None),
        ("cross_entropy", 6.8, 2, math.log(1024), None),
    ],
)
def test_an_easier_target_lies_above_chance(
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
        ([0.3000, 0.3001, 0.3002], FAILS, FAILS),
    ],
    ids=["as before", "a tenth more", "three times"],
)
def test_wall_time_has_its_own_claim_and_one_against_fresh_examples(
    s_per_fresh_example: list[float], saves: str, follows: str
) -> None:
    fresh = [400.0, 440.0, 420.0]
    seconds = [one * each for one, each in zip(fresh, s_per_fresh_example, strict=True)]
    base = timed("e1", [1000.0, 1100.0, 900.0], [100.0, 110.0, 90.0])
    found = decided("fig4", base, timed("e5", fresh, seconds))
    assert (found["time_saves"].verdict, found["time_follows_fresh"].verdict) == (saves, follows)
    ratio = found["time_follows_fresh"].effect
    assert ratio.value == pytest.approx(np.prod(s_per_fresh_example) ** (1 / 3) / 0.1)


@pytest.mark.parametrize(
    "base", [[None, 2700.0, 2800.0, 2900.0, 2950.0], [None, 2999.0, None, None, None]], ids=["once", "often"]
)
def test_a_missed_baseline_costs_at_least_its_budget(base: list[float | None]) -> None:
    found = decided("fig3", rows("baseline", base), rows("batch_e2", HALF_COSTS))["batch_saves"]
    assert (found.verdict, found.reached) == (HOLDS, (5, 5, 5 - base.count(None), 5))
    at_least = np.prod([cost or BUDGET for cost in base])
    assert found.effect.value == pytest.approx((np.prod(HALF_COSTS) / at_least) ** 0.2)


def test_equal_costs_have_the_noise_of_their_evaluations() -> None:
    table = searched("baseline", *[{0.5: 960.0}] * 3) + searched("batch_e2", *[{0.5: 480.0}] * 3)
    curves = [
        {"arm": row["arm"], "repeat": row["repeat"], "values": [0.3, 0.97],
         "fresh_examples": [row["fresh_examples"] - 160, row["fresh_examples"]]}
        for row in table
    ]  # fmt: skip
    found = the_decided_claim(Records({"fig3": table}, {"fig3": curves}))
    # By hand: a uniform error within 160, of three costs per arm.
    error = math.sqrt((160**2 / 12 / 480**2 + 160**2 / 12 / 960**2) / 3)
    assert math.log(found.effect.value / found.effect.low) > 2 * error
    assert 1e-4 < found.p < 0.05


def test_equal_costs_without_evaluations_have_the_p_of_their_ranks() -> None:
    found = decided("fig3", rows("baseline", [1000.0] * 3), rows("batch_e2", [500.0] * 3))["batch_saves"]
    assert (found.verdict, found.p) == (OPEN, pytest.approx(0.05))
