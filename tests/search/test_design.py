import itertools
from dataclasses import replace

import numpy as np
import pytest

from adaecho.search.design import Arm, Design, sobol, trial_seed


def _points(design: Design, arm: Arm, repeat: int, count: int) -> list[dict[str, float | int]]:
    return [design.point(arm, repeat, index) for index in range(count)]


def test_points_do_not_depend_on_the_order_of_arms_or_of_questions(design: Design) -> None:
    first, second = design.arms
    reordered = replace(design, arms=(second, first), _cache={})
    backwards = [reordered.point(second, 1, index) for index in reversed(range(20))]
    assert backwards[::-1] == _points(design, second, 1, 20)


def test_points_do_not_depend_on_names_seeds_or_where_trials_run(design: Design) -> None:
    arm = design.arms[0]
    elsewhere = {**arm.config, "seed": 7, "device": "cpu", "threads": 4, "max_fresh_examples": 10}
    renamed = Arm("other", ("echo=none",), elsewhere, arm.axes)
    assert _points(design, renamed, 0, 5) == _points(design, arm, 0, 5)


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
    """Recorded 2026-11; a change here would move the points of every sweep that is under way."""
    points = [[0.590448884293437, 0.31457058154046535], [0.2533683720976114, 0.6800232576206326]]
    assert sobol(12345, 2, 2) == pytest.approx(np.array(points))
    seeds = [trial_seed(0, 0, 0), trial_seed(0, 0, 1), trial_seed(0, 1, 0)]
    assert seeds == [444108590, 1554243637, 2047321418]


def test_a_trial_is_the_arm_with_its_point_and_a_seed_that_is_the_same_for_all_arms(design: Design) -> None:
    trials = [(repeat, index) for repeat in range(2) for index in range(4)]
    seeds = []
    for arm in design.arms:
        configs = [design.trial_config(arm, *trial) for trial in trials]
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
