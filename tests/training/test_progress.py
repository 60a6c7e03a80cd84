"""When a run ends: targets, what is better, budgets, and the clock that counts training alone."""

from typing import Any

import pytest
import torch

from adaecho.config.schema import Config
from adaecho.training.device import Clocks
from adaecho.training.progress import budget_spent, is_better, meets
from tests.conftest import HandClock

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("direction", "value", "target", "expected"),
    [
        ("max", 0.97, 0.97, True),
        ("max", 0.9699, 0.97, False),
        ("min", 3.9, 3.9, True),
        ("min", 3.91, 3.9, False),
        ("max", 1.0, None, False),
        ("max", float("nan"), 0.5, False),
        ("min", float("nan"), 0.5, False),
    ],
)
def test_a_target_is_met_at_its_value(direction: Any, value: float, target: float, expected: bool) -> None:
    assert meets(direction, value, target) is expected


def test_better_is_strict_and_has_a_direction() -> None:
    better = [is_better("max", 0.5, 0.4), is_better("max", 0.4, 0.4), is_better("min", 0.4, 0.5)]
    assert better == [True, False, True]


@pytest.mark.parametrize(
    ("budget", "steps", "ahead", "seconds", "expected"),
    [
        ({}, 10**9, 10**9, 1e9, False),
        ({"max_steps": 10}, 9, 0, 0.0, False),
        ({"max_steps": 10}, 10, 0, 0.0, True),
        ({"max_fresh_examples": 128}, 1, 128, 0.0, False),  # the batch still fits: repeats of it too
        ({"max_fresh_examples": 128}, 1, 129, 0.0, True),
        ({"max_train_time_s": 2.0}, 1, 1, 1.9, False),
        ({"max_train_time_s": 2.0}, 1, 1, 2.0, True),
    ],
)
def test_a_budget_is_spent_when_one_more_batch_would_exceed_it(
    budget: dict[str, Any], steps: int, ahead: int, seconds: float, expected: bool
) -> None:
    config = Config(**budget)
    assert budget_spent(config, steps=steps, fresh_examples_ahead=ahead, train_time_s=seconds) is expected


def test_evaluation_and_checkpoints_are_not_training_and_a_new_piece_goes_on(clock: HandClock) -> None:
    clocks = Clocks(train_time_s=5.0, eval_time_s=3.0)
    clock.now += 50  # before the start
    clocks.start()
    clock.now += 1
    assert clocks.peek() == 6.0
    with clocks.evaluating(CPU):
        clock.now += 10
    clock.now += 2
    with clocks.uncounted(CPU):
        clock.now += 100
    clock.now += 4
    clocks.stop(CPU)
    clock.now += 1000
    assert (clocks.train_time_s, clocks.eval_time_s) == (5 + 7, 3 + 10)
