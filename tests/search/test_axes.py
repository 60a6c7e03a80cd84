import math
from dataclasses import dataclass

import pytest

from adaecho.config.tasks import TaskConfig
from adaecho.errors import ConfigError
from adaecho.search import axes
from adaecho.search.axes import Axis

RATE, MOMENTUM, STEPS = "optimizer.learning_rate", "optimizer.momentum", "schedule.decay_steps"


def test_linear_log_and_reverse_log_map_the_unit_interval() -> None:
    linear = axes.parse(RATE, "interval(2, 4)")
    log = axes.parse(RATE, "tag(log, interval(0.01, 1))")
    reverse = axes.parse(MOMENTUM, "tag(reverse_log, interval(0.9, 0.999))")
    assert [linear.value(u) for u in (0, 0.25, 1)] == [2, 2.5, 4]
    assert log.value(0.5) == pytest.approx(0.1)
    assert reverse.value(0.5) == pytest.approx(0.99)
    assert (reverse.value(0), reverse.value(1)) == (0.9, 0.999)


@pytest.mark.parametrize("scale", axes.SCALES)
def test_position_is_the_inverse_of_value(scale: str) -> None:
    axis = Axis(RATE, 0.2, 0.9, scale)
    for u in (0.0, 0.1, 0.5, 0.95, 1.0):
        assert axis.position(axis.value(u)) == pytest.approx(u, abs=1e-12)


def test_values_are_plain_numbers_of_the_keys_type() -> None:
    steps = axes.parse(STEPS, "interval(10, 13)")
    assert {steps.value(u / 100) for u in range(100)} == {10, 11, 12, 13}
    assert type(steps.value(0.5)) is int
    assert type(axes.parse(RATE, "interval(1, 10)").value(0.5)) is float
    assert type(axes.parse("max_loss", "interval(1, 4)").value(0)) is float


def test_whole_numbers_stay_inside_fractional_bounds_and_times_factor_scales_both() -> None:
    axis = axes.parse("echo.shuffle_buffer", "tag(log, interval(0.4, 10.9))")
    assert (axis.low, axis.high) == (1, 10)
    axis = axes.parse(STEPS, "tag(times_factor, log, interval(1000, 15000))", factor=1.5)
    assert (axis.low, axis.high, axis.scale) == (1500, 22500, "log")


@pytest.mark.parametrize(
    ("key", "text", "factor", "expected"),
    [
        (RATE, "interval(1, 1)", 1, "lower bound must be below"),
        (RATE, "interval(2, 1)", 1, "lower bound must be below"),
        (RATE, "tag(log, interval(0, 1))", 1, "log axis needs positive bounds"),
        (RATE, "tag(log, interval(-1, 1))", 1, "log axis needs positive bounds"),
        (MOMENTUM, "tag(reverse_log, interval(0.5, 1))", 1, "bounds below 1"),
        (RATE, "tag(logarithmic, interval(0.1, 1))", 1, "unknown tag logarithmic"),
        (RATE, "tag(log, reverse_log, interval(0.1, 0.9))", 1, "exclude each other"),
        (RATE, "0.1,0.2", 1, "not an interval"),
        (RATE, "interval(0.1", 1, "can't be read"),
        (STEPS, "tag(times_factor, interval(1, 2))", "auto", "scale with echo.factor"),
        ("optimizer.rate", "interval(0.1, 1)", 1, "no such key"),
        ("task.name", "interval(0.1, 1)", 1, "only a number"),
        ("echo", "interval(0.1, 1)", 1, "only a number"),
        *(
            (key, "interval(1, 3)", 1, "the same for all trials")
            for key in ("max_fresh_examples", "seed", "echo.factor", "search.trials", "target.value")
        ),
        (RATE, f"interval(0, {math.inf})", 1, "finite"),
    ],
)
def test_axes_that_cannot_be_are_refused_by_name(key: str, text: str, factor: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as refusal:
        axes.parse(key, text, factor)
    assert key in str(refusal.value)


def test_a_tasks_own_options_are_axes_with_their_types() -> None:
    @dataclass
    class Options(TaskConfig):
        layers: int = 2
        dropout: float = 0.0
        model: str = "conv"

    layers = axes.parse("task.layers", "interval(1, 4)", options=Options)
    assert {layers.value(u / 10) for u in range(10)} == {1, 2, 3, 4}
    assert type(axes.parse("task.dropout", "interval(0, 1)", options=Options).value(0.5)) is float
    with pytest.raises(ConfigError, match=r"task\.model: only a number"):
        axes.parse("task.model", "interval(0, 1)", options=Options)
    with pytest.raises(ConfigError, match=r"task\.depth: the config has no such key"):
        axes.parse("task.depth", "interval(0, 1)", options=Options)
