"""What winners cost on new seeds, and costs without the filling of a buffer, worked out by hand."""

from typing import Any

import pytest

from experiments.evidence.claims_page import cross_fit, filling, ratio_of_cheapest
from experiments.evidence.decisions import costs_of_winners, ratio_of_winners


def seeds(arm: str, search: int, *costs: float | None) -> list[dict[str, Any]]:
    row = {"arm": f"{arm}_search{search}", "fresh_examples": 1600.0}
    return [row | {"repeat": seed, "to_target_fresh_examples": costs[seed]} for seed in (1, 0)]


def searched(arm: str, *costs: float) -> list[dict[str, Any]]:
    row = {"arm": arm, "index": 0, "counted": True, "target_value": 0.97}
    return [row | {"repeat": number, "to_target_fresh_examples": cost} for number, cost in enumerate(costs)]


ROWS = [
    *seeds("baseline", 0, 400.0, 900.0),
    *seeds("baseline", 1, 500.0, 500.0),
    *seeds("batch_e2", 0, 200.0, 800.0),
    *seeds("batch_e2", 1, 400.0, None),
]


def test_costs_are_in_the_order_of_seeds_and_a_missed_one_counts_with_what_it_read() -> None:
    found = {number: costs.tolist() for number, costs in costs_of_winners(ROWS, "batch_e2").items()}
    assert found == {0: [200.0, 800.0], 1: [400.0, 1600.0]}
    assert ratio_of_winners(ROWS, "batch_e4", "baseline") is None


def test_the_cheapest_trial_of_all_searches_chooses_one_winner_of_equals_the_first() -> None:
    table = searched("baseline", 700.0, 300.0) + searched("batch_e2", 250.0, 250.0)
    found = ratio_of_cheapest(ROWS, table, "batch_e2", "baseline")
    assert found is not None
    assert found.value == pytest.approx(400 / 500)


def test_in_a_cross_fit_the_seeds_that_choose_are_not_those_that_count() -> None:
    # Each of two points is cheap on one seed alone: whichever one seed chooses is dear on the other.
    rows = seeds("a", 0, 100.0, 900.0) + seeds("a", 1, 900.0, 100.0) + seeds("b", 0, 300.0, 300.0)
    assert cross_fit(rows, "a", "b") == pytest.approx(3)


@pytest.mark.parametrize(
    ("variant", "factor", "batches", "expected"),
    [
        ("none", 1, 0, 256),
        ("batch", 2, 0, 256),
        ("batch", 2, 16, 256 + 16 * 32 / 2),
        ("example_after_augmentation", 2, 0, 128),
        ("example_before_augmentation", 4, 0, 64),
    ],
)
def test_what_fills_a_buffer(variant: str, factor: int, batches: int, expected: float) -> None:
    row = {"echo_variant": variant, "echo_factor": factor, "shuffle_buffer": 256, "batch_size": 32}
    assert filling(row | {"batch_shuffle_buffer": batches}) == expected
