import pytest

from adaecho.config.schema import ScheduleConfig
from adaecho.training.schedule import learning_rate


def test_constant_never_changes() -> None:
    schedule = ScheduleConfig(shape="constant")
    assert {learning_rate(schedule, 0.3, step) for step in (0, 1, 10**9)} == {0.3}


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 1.0), (25, 0.7525), (50, 0.505), (100, 0.01), (101, 0.01), (10**6, 0.01)]
)
def test_linear_decay_by_100_over_100_steps_then_flat(step: int, expected: float) -> None:
    schedule = ScheduleConfig(shape="linear_decay", decay_steps=100, decay_factor=100)
    assert learning_rate(schedule, 1.0, step) == pytest.approx(expected, rel=1e-12)


def test_warmup_rises_linearly_to_the_shape() -> None:
    schedule = ScheduleConfig(shape="linear_decay", decay_steps=100, decay_factor=100, warmup_steps=4)
    plain = ScheduleConfig(shape="linear_decay", decay_steps=100, decay_factor=100)
    ratios = [learning_rate(schedule, 1.0, step) / learning_rate(plain, 1.0, step) for step in range(6)]
    assert ratios == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
