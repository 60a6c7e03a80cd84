"""Claims are decided by the stated rule: on costs made up so that the answer is known."""

from typing import Any

import pytest

from adaecho.figures.claims import ABSENT, CLAIMS, FAILS, HOLDS, OPEN, Decision, decide


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
    return {one.claim.key: one for one in decide({experiment: table}, "digits")}


BASELINE = rows("baseline", [1000.0, 1100.0, 950.0, 1050.0, 1020.0])


def test_a_claim_without_records_is_not_yet_measured() -> None:
    found = decide({}, "digits")
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
