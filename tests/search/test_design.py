"""Axes, and the points of searches, which depend on the design alone."""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from adaecho.config.tasks import TaskConfig
from adaecho.errors import ConfigError
from adaecho.search.arms import parse_axis
from adaecho.search.design import Arm, Axis, Design, TrialId, sobol, trial_seed


def _points(design: Design, arm: Arm, repeat: int, count: int) -> list[dict[str, float | int]]:
    return [design.point(arm, repeat, index) for index in range(count)]


def test_points_do_not_depend_on_orders_names_seeds_or_where_trials_run(design: Design) -> None:
    first, second = design.arms
    reordered = replace(design, arms=(second, first), _cache={})
    backwards = [reordered.point(second, 1, index) for index in reversed(range(20))]
    assert backwards[::-1] == _points(design, second, 1, 20)
    elsewhere = {**first.config, "seed": 7, "device": "cpu", "threads": 4, "max_fresh_examples": 10}
    renamed = Arm("other", ("echo=none",), elsewhere, first.axes)
    assert _points(design, renamed, 0, 5) == _points(design, first, 0, 5)


def test_points_differ_between_arms_repeats_and_study_seeds(design: Design) -> None:
    first, second = design.arms
    other_seed = replace(design, seed=1, _cache={})
    points = [design.point(first, 0, 0), design.point(second, 0, 0), design.point(first, 1, 0)]
    points.append(other_seed.point(first, 0, 0))
    assert all(one != other for one, other in itertools.combinations(points, 2))


def test_the_sequence_extends_without_changing_and_has_no_duplicates(design: Design) -> None:
    arm = design.arms[0]
    few = _points(design, arm, 0, 3)
    many = _points(replace(design, trials=50, _cache={}), arm, 0, 200)
    assert many[:3] == few
    assert len({tuple(point.values()) for point in many}) == 200


def test_the_first_point_is_one_of_the_design_and_not_random() -> None:
    """Every prefix of 2^k scrambled Sobol points has one point in each of 2^k strips of each axis."""
    for seed, exponent in itertools.product(range(3), (2, 4, 6)):
        points = np.array(sobol(seed, 2, 2**exponent))
        strips = np.sort(np.floor(points * 2**exponent), axis=0)
        assert (strips == np.arange(2**exponent)[:, None]).all()


def test_golden_points_and_seeds() -> None:
    """Recorded 2026-11. A change would move the points of running sweeps."""
    points = [[0.590448884293437, 0.31457058154046535], [0.2533683720976114, 0.6800232576206326]]
    assert sobol(12345, 2, 2) == pytest.approx(np.array(points))
    seeds = [trial_seed(0, 0, 0), trial_seed(0, 0, 1), trial_seed(0, 1, 0)]
    assert seeds == [444108590, 1554243637, 2047321418]


def test_a_trial_is_the_arm_with_its_point_and_a_seed_that_is_the_same_for_all_arms(design: Design) -> None:
    trials = [(repeat, index) for repeat in range(2) for index in range(4)]
    seeds = []
    for arm in design.arms:
        configs = [design.trial(TrialId(arm.name, *trial))[0] for trial in trials]
        seeds.append([config["seed"] for config in configs])
        for config, trial in zip(configs, trials, strict=True):
            given = {f"optimizer.{key}": config["optimizer"][key] for key in ("learning_rate", "momentum")}
            assert given == design.point(arm, *trial)
            assert config["echo"] == arm.config["echo"]
        assert arm.config["seed"] == 0
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 8


def test_without_axes_a_point_is_empty(design: Design) -> None:
    fixed = replace(design.arms[0], axes=())
    assert design.point(fixed, 0, 0) == {}
    assert replace(design, arms=(fixed,)).to_dict()["arms"][fixed.name]["points"] == []


RATE, MOMENTUM, STEPS = "optimizer.learning_rate", "optimizer.momentum", "schedule.decay_steps"


def test_linear_log_and_reverse_log_map_the_unit_interval() -> None:
    linear = parse_axis(RATE, "interval(2, 4)")
    log = parse_axis(RATE, "tag(log, interval(0.01, 1))")
    reverse = parse_axis(MOMENTUM, "tag(reverse_log, interval(0.9, 0.999))")
    assert [linear.value(u) for u in (0, 0.25, 1)] == [2, 2.5, 4]
    assert log.value(0.5) == pytest.approx(0.1)
    assert reverse.value(0.5) == pytest.approx(0.99)
    assert (reverse.value(0), reverse.value(1)) == (0.9, 0.999)


@pytest.mark.parametrize("scale", ["linear", "log", "reverse_log"])
def test_position_is_the_inverse_of_value(scale: str) -> None:
    axis = Axis(RATE, 0.2, 0.9, scale)
    for u in (0.0, 0.1, 0.5, 0.95, 1.0):
        assert axis.position(axis.value(u)) == pytest.approx(u, abs=1e-12)


def test_values_are_plain_numbers_of_the_keys_type() -> None:
    steps = parse_axis(STEPS, "interval(10, 13)")
    assert {steps.value(u / 100) for u in range(100)} == {10, 11, 12, 13}
    assert type(steps.value(0.5)) is int
    assert type(parse_axis(RATE, "interval(1, 10)").value(0.5)) is float
    assert type(parse_axis("max_loss", "interval(1, 4)").value(0)) is float


def test_whole_numbers_stay_inside_fractional_bounds_and_times_factor_scales_both() -> None:
    axis = parse_axis("echo.shuffle_buffer", "tag(log, interval(0.4, 10.9))")
    assert (axis.low, axis.high) == (1, 10)
    axis = parse_axis(STEPS, "tag(times_factor, log, interval(1000, 15000))", factor=1.5)
    assert (axis.low, axis.high, axis.scale) == (1500, 22500, "log")


@pytest.mark.parametrize(
    ("key", "text", "factor", "expected"),
    [
        (RATE, "interval(1, 1)", 1, "finite bounds low < high"),
        (RATE, "interval(2, 1)", 1, "finite bounds low < high"),
        (RATE, "tag(log, interval(0, 1))", 1, "low > 0 for log"),
        (RATE, "tag(log, interval(-1, 1))", 1, "low > 0 for log"),
        (MOMENTUM, "tag(reverse_log, interval(0.5, 1))", 1, "high < 1 for reverse_log"),
        (RATE, "tag(logarithmic, interval(0.1, 1))", 1, "unknown tag"),
        (RATE, "tag(log, reverse_log, interval(0.1, 0.9))", 1, "log or reverse_log"),
        (RATE, "0.1,0.2", 1, "expected an interval"),
        (RATE, "interval(0.1", 1, "invalid"),
        (STEPS, "tag(times_factor, interval(1, 2))", "auto", "times_factor needs a number"),
        ("optimizer.rate", "interval(0.1, 1)", 1, "expected a key with a number"),
        ("task.name", "interval(0.1, 1)", 1, "expected a key with a number"),
        ("echo", "interval(0.1, 1)", 1, "expected a key with a number"),
        *(
            (key, "interval(1, 3)", 1, "must share it")
            for key in ("max_fresh_examples", "seed", "echo.factor", "search.trials", "target.value")
        ),
        (RATE, f"interval(0, {math.inf})", 1, "finite bounds"),
    ],
)
def test_invalid_axes_are_refused_by_name(key: str, text: str, factor: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as refusal:
        parse_axis(key, text, factor)
    assert key in str(refusal.value)


def test_a_tasks_own_options_are_axes_with_their_types() -> None:
    @dataclass
    class Options(TaskConfig):
        layers: int = 2
        dropout: float = 0.0
        model: str = "conv"

    layers = parse_axis("task.layers", "interval(1, 4)", options=Options)
    assert {layers.value(u / 10) for u in range(10)} == {1, 2, 3, 4}
    assert type(parse_axis("task.dropout", "interval(0, 1)", options=Options).value(0.5)) is float
    with pytest.raises(ConfigError, match=r"task\.model: expected a key"):
        parse_axis("task.model", "interval(0, 1)", options=Options)
    with pytest.raises(ConfigError, match=r"task\.depth: expected a key"):
        parse_axis("task.depth", "interval(0, 1)", options=Options)
