"""What is read off runs whose worth is known."""

import math

import pytest

from experiments.distance.distance import ARMS, SEEDS, effective, readings

UNIQUE = 1000


def rows(uses: dict[str, float]) -> list[dict[str, object]]:
    """Runs whose loss is 2 - ln(D / U) / 3, with D of each arm in U."""
    times = {**uses, **{f"new_{k}": float(k) for k in range(1, 5)}}
    return [
        {"arm": arm, "seed": seed, "learning_rate": 0.1, "loss": 2 - math.log(times[arm]) / 3}
        for seed in SEEDS
        for arm in ARMS
    ]


def test_a_loss_is_that_of_so_many_new_examples() -> None:
    curve = [2 - math.log(k) / 3 for k in range(1, 5)]
    for times in (0.5, 1.0, 1.7, 3.9, 5.0):
        assert effective(2 - math.log(times) / 3, curve, UNIQUE) == pytest.approx(times * UNIQUE)


def test_worth_slope_and_the_least_buffer_are_what_the_runs_were_made_with() -> None:
    uses = {
        "batch": 1.0,
        "buffer_64": 1.3,
        "buffer_256": 2.2,
        "buffer_1024": 3.7,
        "buffer_4096": 3.8,
        "pass": 4.0,
    }
    found = readings(rows(uses), UNIQUE)
    worths = {row["arm"]: row["worth"] for row in found if "arm" in row}
    assert worths == pytest.approx({arm: (times - 1) / 3 for arm, times in uses.items()})
    assert [row["verdict"] for row in found if "verdict" in row] == ["holds"]
    assert [row["buffer"] for row in found if "buffer" in row] == [1024]
    falling = dict(zip(uses, (1.0, 3.9, 3.0, 2.0, 1.5, 1.2), strict=True))
    assert [row["verdict"] for row in readings(rows(falling), UNIQUE) if "verdict" in row] == [
        "does not hold"
    ]


def test_nothing_is_decided_where_a_run_diverged() -> None:
    broken = rows(
        dict.fromkeys(("batch", "buffer_64", "buffer_256", "buffer_1024", "buffer_4096", "pass"), 2.0)
    )
    broken[0]["loss"] = math.inf
    assert readings(broken, UNIQUE) == [{"rule": "slope", "verdict": "not decided"}]
