"""Claims are decided by the stated rule: on costs made up so that the answer is known."""

from typing import Any

import numpy as np
import pytest

from adaecho.figures.claims import ABSENT, CLAIMS, FAILS, FRAGILE, HOLDS, OPEN, Decision, Records, decide
from adaecho.figures.readings import easier


def rows(arm: str, costs: list[float | None], best: list[float] | None = None) -> list[dict[str, Any]]:
    """One counted trial a search."""
    values = best or [0.97] * len(costs)
    return [
        {
            "arm": arm, "repeat": repeat, "index": 0, "counted": True,
            "to_target_fresh_examples": cost, "best_value": value,
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
            "target_metric": "accuracy", "target_value": 0.97,
        }
        for repeat, search in enumerate(costs)
        for index, (position, cost) in enumerate(search.items())
    ]  # fmt: skip


MIDDLE = [{0.5: float(cost)} for cost in (1000, 1100, 950, 1050, 1020)]
HALF = [{0.5: float(cost)} for cost in (500, 550, 475, 525, 510)]


def test_a_verdict_that_every_reading_repeats_stands() -> None:
    found = decided("fig3", searched("baseline", *MIDDLE), searched("batch_e2", *HALF))["batch_saves"]
    assert (found.verdict, found.turns_in, found.readings) == (HOLDS, (), 2)


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
    assert (found.verdict, found.turns_in, found.readings) == (FRAGILE, ("twice the error",), 4)


def test_easier_targets() -> None:
    assert [easier("accuracy", 0.97, step) for step in (1, 2)] == pytest.approx([0.955, 0.94])
    assert [easier("cross_entropy", 3.9, step) for step in (1, 2)] == pytest.approx([4.0, 4.1])


def test_what_is_open_has_nothing_to_turn() -> None:
    found = decided("fig3", searched("baseline", *MIDDLE), searched("batch_e2", *MIDDLE))["batch_saves"]
    assert (found.verdict, found.turns_in) == (OPEN, ())


def test_winners_on_new_seeds_count_once_a_search_and_a_missed_seed_with_what_it_read() -> None:
    def winners(arm: str, *costs: list[float | None]) -> list[dict[str, Any]]:
        found = [rows(f"{arm}_search{number}", one) for number, one in enumerate(costs)]
        return [row | {"fresh_examples": 1600.0} for table in found for row in table]

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
