"""Costs by the ends of decays, of runs whose cost is known."""

import math

import pytest

from experiments.schedule_clock.ends import cost, ratio

STEPS = {1: (5500, 6000, 6500), 2: (7500, 8000, 9000), 4: (8000, 9000, 12000)}


def rows(costs: dict[int, float], seeds: int = 5, spread: float = 0.0) -> list[dict[str, float]]:
    """Ends on a line that is at 80 % at the cost, moved by the seed alike in all arms and more at e > 1."""
    return [
        {
            "echo_factor": factor,
            "steps": steps,
            "seed": seed,
            "repeat": seed,
            "final_accuracy": 0.8 + 0.05 * math.log(steps / at) + spread * (seed - 2) * (factor > 1),
        }
        for factor, at in costs.items()
        for steps in STEPS[factor]
        for seed in range(seeds)
    ]


def test_a_cost_is_where_the_line_is_at_the_target() -> None:
    found = rows({1: 6100.0, 2: 8100.0, 4: 10_000.0}, spread=0.001)
    assert cost(found, 1).steps == pytest.approx(6100)
    assert ratio(found, 2).ratio == pytest.approx(8100 / 2 / 6100)
    assert [ratio(found, factor).verdict for factor in (2, 4)] == ["saves", "saves"]


def test_a_part_of_the_seeds_and_a_crossing_far_outside_decide_nothing() -> None:
    assert ratio(rows({1: 6100.0, 2: 8100.0, 4: 10_000.0}, seeds=4, spread=0.001), 2).verdict == "not decided"
    assert ratio(rows({1: 6100.0, 2: 11_000.0, 4: 10_000.0}, spread=0.001), 2).verdict == "not decided"
    assert ratio(rows({1: 6100.0, 2: 12_400.0, 4: 10_000.0}, spread=0.02), 2).verdict == "not decided"


def test_costs_above_the_baselines_are_said_to_be_more() -> None:
    dear = [
        {**row, "echo_factor": 2 if row["echo_factor"] == 4 else 1}
        for row in rows({1: 6000.0, 4: 13_000.0}, spread=0.0005)
    ]
    assert ratio(dear, 2).verdict == "costs more"
