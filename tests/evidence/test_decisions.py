"""Claims are decided by the stated rule: on costs made up so that the answer is known."""

import math
from typing import Any

import numpy as np
import pytest

from experiments.evidence.claims import CLAIMS
from experiments.evidence.decisions import ABSENT, FAILS, FRAGILE, HOLDS, OPEN, Decision, Records, decide
from experiments.evidence.readings import easier

BUDGET = 3000.0


def rows(arm: str, costs: list[float | None], best: list[float] | None = None) -> list[dict[str, Any]]:
    """One counted trial a search; one that missed its target spent its budget."""
    values = best or [0.97] * len(costs)
    return [
        {
            "arm": arm, "repeat": repeat, "index": 0, "counted": True,
            "to_target_fresh_examples": cost, "fresh_examples": cost or BUDGET, "best_value": value,
            "task": "digits", "target_metric": "accuracy", "target_value": 0.97,
        }
        for repeat, (cost, value) in enumerate(zip(costs, values, strict=True))
    ]  # fmt: skip


def decided(experiment: str, *arms: list[dict[str, Any]]) -> dict[str, Decision]:
    table = [row for arm in arms for row in arm]
    return {one.claim.key: one for one in decide(Records({experiment: table}), "digits")}


BASELINE = rows("baseline", [1000.0, 1100.0, 950.0, 1050.0, 1020.0])


def test_a_claim_without_records_is_not_yet_measured() -> None:
    found = decide(Records(), "digits")
    assert len(found) == len(CLAIMS)
    assert {one.verdict for one in found} == {ABSENT}


def test_what_clearly_saves_holds_and_its_ratio_is_that_of_the_geometric_means() -> None:
    found = decided(
        "fig3", BASELINE, rows("before", [1.0]), rows("batch_e2", [500.0, 550.0, 475.0, 525.0, 510.0])
    )
    batch = found["batch_saves"]
    assert batch.verdict == HOLDS
    assert batch.effect is not None
    assert batch.effect.value == pytest.approx(0.5)
    assert batch.permutation_p == pytest.approx(1 / 252)
    assert batch.reached == (5, 5, 5, 5)


def test_what_clearly_costs_more_does_not_hold() -> None:
    found = decided("fig3", BASELINE, rows("batch_e2", [2000.0, 2200.0, 1900.0, 2100.0, 2040.0]))
    assert found["batch_saves"].verdict == FAILS


def test_what_noise_hides_is_not_decided() -> None:
    found = decided("fig3", BASELINE, rows("batch_e2", [700.0, 1500.0, 900.0, 1300.0, 1000.0]))
    assert found["batch_saves"].verdict == OPEN


def test_searches_that_missed_the_target_rank_last_and_are_counted() -> None:
    found = decided("fig3", BASELINE, rows("batch_e2", [None, None, 500.0, None, None]))
    assert found["batch_saves"].verdict == OPEN
    assert found["batch_saves"].reached == (1, 5, 5, 5)
    assert found["batch_saves"].permutation_p is not None
    assert found["batch_saves"].permutation_p > 0.5


def test_p_values_grow_with_the_number_of_claims() -> None:
    cheap = [500.0, 850.0, 675.0, 925.0, 810.0]
    alone = decided("fig3", BASELINE, rows("batch_e2", cheap))["batch_saves"].p
    among = decided(
        "fig3",
        BASELINE,
        rows("batch_e2", cheap),
        rows("example_after_e2", cheap),
        rows("example_before_e2", cheap),
    )["batch_saves"].p
    assert alone is not None
    assert among is not None
    assert among > alone


@pytest.mark.parametrize(
    ("best", "verdict"),
    [
        ([0.975, 0.974, 0.976], HOLDS),
        ([0.95, 0.949, 0.951], FAILS),
        ([0.99, 0.94, 0.965], OPEN),
    ],
)
def test_no_harm_is_non_inferiority_within_the_margin(best: list[float], verdict: str) -> None:
    nothing: list[float | None] = [None] * 3
    found = decided("fig8", rows("baseline", nothing, [0.975, 0.974, 0.976]), rows("batch_e4", nothing, best))
    assert found["batch_no_harm"].verdict == verdict


def searched(arm: str, *costs: dict[float, float | None], stopped_at: int = 900) -> list[dict[str, Any]]:
    """Searches of trials at positions of one axis; None for one that was stopped early."""
    return [
        {
            "arm": arm, "repeat": repeat, "index": index, "counted": True, "best_value": 0.9,
            "status": "reached" if cost else "pruned", "fresh_examples": cost or stopped_at,
            "to_target_fresh_examples": cost, "positions": {"optimizer.learning_rate": position},
            "target_metric": "accuracy", "target_value": 0.97, "task": "digits",
        }
        for repeat, search in enumerate(costs)
        for index, (position, cost) in enumerate(search.items())
    ]  # fmt: skip


MIDDLE = [{0.5: float(cost)} for cost in (1000, 1100, 950, 1050, 1020)]
HALF = [{0.5: float(cost)} for cost in (500, 550, 475, 525, 510)]


def test_a_verdict_that_every_reading_repeats_stands() -> None:
    found = decided("fig3", searched("baseline", *MIDDLE), searched("batch_e2", *HALF))["batch_saves"]
    assert (found.verdict, found.turns_in, len(found.readings)) == (HOLDS, (), 2)


def test_a_saving_at_one_end_of_the_space_is_fragile() -> None:
    low = [{0.1: cost, 0.5: 1010.0} for search in HALF for cost in search.values()]
    found = decided("fig3", searched("baseline", *MIDDLE), searched("batch_e2", *low))["batch_saves"]
    assert (found.verdict, found.turns_in) == (FRAGILE, ("upper part of the space",))


@pytest.mark.parametrize(("stopped_at", "verdict"), [(450, FRAGILE), (2000, HOLDS)])
def test_a_baseline_that_may_have_been_as_cheap_makes_it_fragile(stopped_at: int, verdict: str) -> None:
    base = [{0.5: cost, 0.6: None} for search in MIDDLE for cost in search.values()]
    table = searched("baseline", *base, stopped_at=stopped_at)
    assert decided("fig3", table, searched("batch_e2", *HALF))["batch_saves"].verdict == verdict


def test_a_saving_that_an_easier_target_lacks_is_fragile() -> None:
    table = {"fig3": searched("baseline", *MIDDLE) + searched("batch_e2", *HALF)}
    curves = [
        {"arm": row["arm"], "repeat": row["repeat"], "fresh_examples": [160, cost], "values": [early, 0.97]}
        for row in table["fig3"]
        for cost in [row["to_target_fresh_examples"]]
        for early in [0.945]
    ]
    (found,) = [one for one in decide(Records(table, {"fig3": curves}), "digits") if one.verdict != ABSENT]
    assert (found.verdict, found.turns_in, len(found.readings)) == (FRAGILE, ("twice the error",), 4)


def test_easier_targets() -> None:
    assert [easier("accuracy", 0.97, step) for step in (1, 2)] == pytest.approx([0.955, 0.94])
    assert [easier("cross_entropy", 3.9, step) for step in (1, 2)] == pytest.approx([4.0, 4.1])


def test_what_is_open_has_nothing_to_turn() -> None:
    found = decided("fig3", searched("baseline", *MIDDLE), searched("batch_e2", *MIDDLE))["batch_saves"]
    assert (found.verdict, found.turns_in) == (OPEN, ())


def test_winners_on_new_seeds_count_once_a_search_and_a_missed_seed_with_what_it_read() -> None:
    def winners(arm: str, *costs: list[float | None]) -> list[dict[str, Any]]:
        found = [rows(f"{arm}_search{number}", one) for number, one in enumerate(costs)]
        return [row | {"fresh_examples": 1600.0} for table in found for row in table]  # missed at 1,600

    records = Records(
        {
            "fig3": BASELINE + rows("batch_e2", [500.0, 550.0, 475.0, 525.0, 510.0]),
            "fig3_winners": winners("baseline", [400.0, 900.0], [500.0, 500.0, 500.0])
            + winners("batch_e2", [200.0, 800.0], [400.0, None]),
        }
    )
    (found,) = [one for one in decide(records, "digits") if one.verdict != ABSENT]
    assert found.rerun is not None
    # Geometric means of the seeds: 600 and 500 against 400 and 800.
    assert found.rerun.value == pytest.approx((400 * 800 / 600 / 500) ** 0.5)
    assert found.rerun.low is not None
    assert found.rerun.low < 1 < (found.rerun.high or 0)


def timed(arm: str, fresh: list[float], seconds: list[float]) -> list[dict[str, Any]]:
    costs = zip(rows(arm, [*fresh]), seconds, strict=True)
    return [row | {"to_target_train_time_s": one} for row, one in costs]


BASELINE_FRESH, BASELINE_S = [1000.0, 1100.0, 900.0], [100.0, 110.0, 90.0]


@pytest.mark.parametrize(
    ("s_per_fresh_example", "saves", "follows"),
    [
        ([0.1000, 0.1001, 0.1002], HOLDS, HOLDS),
        ([0.1100, 0.1101, 0.1102], HOLDS, FAILS),
        ([0.0900, 0.1030, 0.1180], HOLDS, OPEN),
        ([0.3000, 0.3001, 0.3002], FAILS, FAILS),
    ],
)
def test_wall_time_is_judged_by_itself_and_against_fresh_examples(
    s_per_fresh_example: list[float], saves: str, follows: str
) -> None:
    fresh = [400.0, 440.0, 420.0]
    seconds = [one * each for one, each in zip(fresh, s_per_fresh_example, strict=True)]
    found = decided("fig4", timed("e1", BASELINE_FRESH, BASELINE_S), timed("e5", fresh, seconds))
    assert (found["time_saves"].verdict, found["time_follows_fresh"].verdict) == (saves, follows)
    ratio = found["time_follows_fresh"].effect
    assert ratio is not None
    assert ratio.value == pytest.approx(np.prod(s_per_fresh_example) ** (1 / 3) / 0.1)


def test_one_run_decides_nothing_about_time() -> None:
    found = decided("fig4", timed("e1", [1000.0], [100.0]), timed("e5", [400.0], [40.0]))
    assert {found[key].verdict for key in ("time_saves", "time_follows_fresh")} == {OPEN}


@pytest.mark.parametrize(
    ("metric", "target", "step", "chance"),
    [("accuracy", 0.4, 1, 0.1), ("accuracy", 0.4, 2, None), ("cross_entropy", 6.8, 2, math.log(1024))],
)
def test_what_guessing_meets_is_no_easier_target(
    metric: str, target: float, step: int, chance: float | None
) -> None:
    assert easier(metric, target, step, chance) is None


def with_curves(table: list[dict[str, Any]], **columns: Any) -> Records:
    """Curves that are evaluated every 160 fresh examples, from 0.3 up to the target."""
    found = [row | columns for row in table]
    curves = [
        {"arm": row["arm"], "repeat": row["repeat"], "fresh_examples": list(range(160, int(cost) + 1, 160)),
         "values": np.linspace(0.3, row["target_value"], int(cost) // 160).tolist()}
        for row in found
        for cost in [row["to_target_fresh_examples"]]
        if cost is not None
    ]  # fmt: skip
    return Records({"fig3": found}, {"fig3": curves})


def decided_batch(records: Records) -> Decision:
    (found,) = [one for one in decide(records, "digits") if one.verdict != ABSENT]
    return found


def test_an_easier_target_at_chance_is_no_reading() -> None:
    records = with_curves(
        searched("baseline", *MIDDLE) + searched("batch_e2", *HALF), task="cifar10", target_value=0.4
    )
    assert set(decided_batch(records).readings) == {"lower part of the space", "upper part of the space"}


@pytest.mark.parametrize("ours", [[480.0] * 3, [480.0, 480.0, np.nextafter(480.0, 481.0)]])
def test_equal_costs_are_known_as_well_as_their_grid(ours: list[float]) -> None:
    table = searched("baseline", *({0.5: cost} for cost in (960.0, 960.0, 960.0)))
    found = decided_batch(with_curves(table + searched("batch_e2", *({0.5: cost} for cost in ours))))
    # Worked out by hand: a uniform error within 160, of three costs on either side.
    error = math.sqrt((160**2 / 12 / 480**2 + 160**2 / 12 / 960**2) / 3)
    assert found.effect is not None
    assert found.effect.low is not None
    assert math.log(found.effect.value / found.effect.low) > 2 * error
    assert found.p is not None
    assert 1e-4 < found.p < 0.05


def test_without_a_grid_equal_costs_have_their_ranks() -> None:
    found = decided("fig3", rows("baseline", [1000.0] * 3), rows("batch_e2", [500.0] * 3))["batch_saves"]
    assert (found.verdict, found.p, found.permutation_p) == (OPEN, pytest.approx(0.05), pytest.approx(0.05))


def test_a_baseline_that_missed_costs_at_least_its_budget() -> None:
    cheap = rows("batch_e2", [500.0, 550.0, 475.0, 525.0, 510.0])
    one, all_five = (
        decided("fig3", rows("baseline", base), cheap)["batch_saves"]
        for base in ([None, 2700.0, 2800.0, 2900.0, 2950.0], [None, 2999.0, None, None, None])
    )
    assert (one.verdict, one.reached) == (HOLDS, (5, 5, 4, 5))
    assert (all_five.verdict, all_five.reached) == (HOLDS, (5, 5, 1, 5))
    assert all_five.effect is not None
    assert all_five.effect.value == pytest.approx((500 * 550 * 475 * 525 * 510) ** 0.2 / BUDGET, rel=1e-3)


def test_an_arm_that_missed_is_not_found_cheaper_whatever_its_other_searches_cost() -> None:
    found = decided("fig3", BASELINE, rows("batch_e2", [100.0, 101.0, 100.0, 99.0, None]))["batch_saves"]
    assert (found.verdict, found.effect, found.reached) == (OPEN, None, (4, 5, 5, 5))


def test_what_missed_at_a_larger_cost_does_not_hold() -> None:
    found = decided("fig3", BASELINE, rows("batch_e2", [2000.0, 2200.0, 1900.0, None, None]))["batch_saves"]
    assert found.verdict == FAILS


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
