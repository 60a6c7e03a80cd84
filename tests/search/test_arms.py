import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaecho.config import scale
from adaecho.config.scale import Size
from adaecho.errors import ConfigError
from adaecho.run import CONF
from adaecho.search.arms import parse_typed
from tests.needs import first_form
from tests.search.conftest import BuildArms


def test_comma_lists_are_arms_in_all_combinations(arms_of: BuildArms) -> None:
    arms = arms_of("echo=batch,example_before_augmentation", "echo.factor=2,4")
    factors = [(arm.config["echo"]["variant"], arm.config["echo"]["factor"]) for arm in arms]
    assert factors == [
        ("batch", 2),
        ("batch", 4),
        ("example_before_augmentation", 2),
        ("example_before_augmentation", 4),
    ]
    assert arms[1].name == "echo-batch_factor-4"


def test_choice_and_range_are_comma_lists(arms_of: BuildArms) -> None:
    assert len(arms_of("echo=batch", "echo.factor=choice(1,2)")) == 2
    assert [arm.config["batch_size"] for arm in arms_of("batch_size=range(8,24,8)")] == [8, 16]


def test_the_arms_of_an_experiment_keep_its_names(arms_of: BuildArms) -> None:
    arms = arms_of("experiment=fig5")
    assert [arm.name for arm in arms][:3] == ["e1", "e2", "e4"]
    assert arms[2].config["echo"]["factor"] == 4
    assert [axis.key for axis in arms[0].axes] == ["optimizer.learning_rate", "optimizer.momentum"]


EXPERIMENTS = sorted((CONF / "experiment").glob("*.yaml"))


def one_of_a_kind(arms: dict[str, Any]) -> dict[str, Any]:
    """Of arms that differ in numbers alone the last."""
    kinds = {re.sub(r"\d[\d.e+-]*", "0", str(overrides)): name for name, overrides in arms.items()}
    return {name: arms[name] for name in kinds.values()}


@pytest.mark.parametrize("only", first_form(one_of_a_kind, also=[dict]), ids=["kinds", "all"])
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_arm_of_every_experiment_can_be(
    arms_of: BuildArms, path: Path, only: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = []
    if path.stem.startswith("my_"):  # whose values follow from the data
        monkeypatch.setattr(scale, "_size_at", lambda *_: Size(714, 714, has_validation=False))
        scaled, only = ["data.path=mine"], dict
    arms = arms_of(f"experiment={path.stem}", *scaled, only=only)
    assert arms, "composed, and valid at both ends of each axis"
    if scaled:
        assert [len(arm.axes) for arm in arms] == [0] * 4, "one run each, at the task's rate"


def test_named_arms_and_comma_lists_multiply(arms_of: BuildArms) -> None:
    arms = arms_of(
        "+search.arms.a=['echo.shuffle_buffer=9']", "+search.arms.b=['echo=batch']", "batch_size=16,32"
    )
    assert [arm.name for arm in arms] == [
        "a_batch_size-16",
        "b_batch_size-16",
        "a_batch_size-32",
        "b_batch_size-32",
    ]


def test_duplicate_arms_are_one(arms_of: BuildArms) -> None:
    assert len(arms_of("echo=batch", "echo.factor=2,4,2,2.0")) == 2
    assert len(arms_of("search.workers=1", "data.prefetch=1,2")) == 1


def test_an_arm_without_a_name_is_called_after_its_echo(arms_of: BuildArms) -> None:
    assert [arm.name for arm in arms_of("echo=batch", "echo.factor=3")] == ["batch_e3"]
    assert [arm.name for arm in arms_of()] == ["none"]


def test_names_are_folders_and_differ(arms_of: BuildArms) -> None:
    arms = arms_of("data.path=/a/b,/a-b,'c,d'")
    assert len({arm.name for arm in arms}) == 3
    assert all("/" not in arm.name and "," not in arm.name for arm in arms)


def test_typed_axes_replace_the_tasks_and_typed_values_fix_theirs(arms_of: BuildArms) -> None:
    (arm,) = arms_of("optimizer.learning_rate=tag(log,interval(0.1,0.2))", "optimizer.momentum=0.8")
    assert [(axis.key, axis.low, axis.high, axis.scale) for axis in arm.axes] == [
        ("optimizer.learning_rate", 0.1, 0.2, "log")
    ]
    assert arm.config["optimizer"]["momentum"] == 0.8


@pytest.mark.parametrize(
    "overrides",
    [
        ["task=cifar10", "schedule.decay_steps=9"],
        ["task=cifar10", "schedule={decay_steps: 9}"],
        ["task=cifar10", "+search.arms.a=['schedule={decay_steps: 9}']"],
    ],
)
def test_a_value_given_to_a_tasks_axis_wins_over_it_however_it_is_spelled(
    arms_of: BuildArms, overrides: list[str]
) -> None:
    (arm,) = arms_of("search.trials=2", *overrides)
    assert [axis.key for axis in arm.axes] == ["optimizer.learning_rate", "optimizer.momentum"]
    assert arm.config["schedule"]["decay_steps"] == 9


def test_a_comma_list_over_an_axis_makes_arms_of_it(arms_of: BuildArms) -> None:
    arms = arms_of("search.trials=2", "optimizer.learning_rate=0.1,0.2")
    assert [[axis.key for axis in arm.axes] for arm in arms] == [["optimizer.momentum"]] * 2


def test_caps_on_steps_and_decay_ranges_scale_with_the_factor(arms_of: BuildArms) -> None:
    searched = ("task=cifar10", "search.trials=2", "max_steps=1000")
    base, echoed = arms_of(*searched, "echo=batch", "echo.factor=1,4")
    assert (base.config["max_steps"], echoed.config["max_steps"]) == (1000, 4000)
    decay = [next(axis for axis in arm.axes if axis.key == "schedule.decay_steps") for arm in (base, echoed)]
    assert [(axis.low, axis.high) for axis in decay] == [(10_000, 150_000), (40_000, 600_000)]
    assert base.config["max_fresh_examples"] == echoed.config["max_fresh_examples"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["echo=batch,loud"], "echo=loud doesn't compose"),
        (["batch_size=8,many"], "batch_size=many doesn't compose"),
        (["echo.factor=1,2"], "echo.factor=2: echo=none repeats nothing"),
        (
            ["echo=batch", "echo.factor=auto", "schedule.decay_steps=tag(times_factor,interval(1,9))"],
            "scale with",
        ),
        (["max_fresh_examples=1000,2000"], "equal budgets"),
        (["search.trials=1,2"], "one search"),
        (["max_loss=10,20"], "what counts as diverged is the same for all arms: set it once"),
        (["search.trials=0"], "search.trials=0"),
        (["seed=1,2"], "hydra/sweeper=basic"),
        (["experiment=quickstart", "echo=batch"], "keep one of the two"),
        (["optimizer.momentum=interval(0.5,1.5)"], "optimizer.momentum=1.5"),
        (
            ["+search.arms.a=['optimizer.learning_rate=0.1']", "optimizer.learning_rate=interval(0.1,0.2)"],
            "optimizer.learning_rate: set on the command line and by arm a",
        ),
        (["+search.arms.a=['search.trials=9']", "+search.arms.b=[]"], "search.trials: 9 in arm a, 1 in"),
        (
            ["+search.arms.a=['search.needs_every_trial=true']", "search.prune=true"],
            "arm a is of an experiment that compares",
        ),
        (["search.max_diverged=-5"], "search.max_diverged=-5"),
    ],
)
def test_arms_that_cannot_be_are_refused(arms_of: BuildArms, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        arms_of(*overrides)


def test_an_arm_of_an_experiment_that_does_not_compose_is_named(arms_of: BuildArms) -> None:
    with pytest.raises(ConfigError, match="arm broken: echo=loud doesn't compose"):
        arms_of("+search.arms.broken=['echo=loud']")


def test_fixed_overrides_keep_their_spelling() -> None:
    typed = parse_typed(["echo=batch", "data.path='a b'", "~tracking.entity"])
    assert typed.fixed == ("echo=batch", "data.path='a b'", "~tracking.entity")
    assert typed.choices == ()


def test_pairs_that_cannot_be_are_left_out_and_named(
    arms_of: BuildArms, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = arms_of("echo=none,batch", "echo.factor=1,2,4")
    assert [arm.name for arm in arms] == [
        "echo-none_factor-1",
        "echo-batch_factor-1",
        "echo-batch_factor-2",
        "echo-batch_factor-4",
    ]
    shown = capsys.readouterr().out
    assert [line.partition(" (")[0] for line in shown.splitlines()] == [
        "left out: echo=none echo.factor=2",
        "left out: echo=none echo.factor=4",
    ]
    assert "echo=none repeats nothing" in shown


def test_a_value_that_only_what_was_typed_rules_out_is_left_out_and_named(
    arms_of: BuildArms, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [arm.name for arm in arms_of("echo=none,batch", "echo.factor=2")] == ["echo-batch"]
    assert capsys.readouterr().out.startswith("left out: echo=none (echo.factor=2: echo=none repeats nothing")
    with pytest.raises(ConfigError, match=r"echo\.factor=0\.5"):
        arms_of("echo=batch", "echo.factor=2,0.5")
    with pytest.raises(ConfigError, match=r"echo=none repeats nothing"):
        arms_of("echo=none", "echo.factor=2,4")


def test_more_trials_than_a_sweep_can_hold_are_refused(arms_of: BuildArms) -> None:
    with pytest.raises(ConfigError, match=r"search\.trials=1000000: .* at most 100,000"):
        arms_of("search.trials=1000000")


def test_without_a_search_of_several_trials_arms_run_at_the_tasks_own_values(arms_of: BuildArms) -> None:
    """A random point for each arm would say of one that it ruins training."""
    for arm in arms_of("echo=none,batch"):
        assert not arm.axes
        assert arm.config["optimizer"]["learning_rate"] == 0.02
    assert all(len(arm.axes) == 2 for arm in arms_of("echo=none,batch", "search.trials=2"))
    (typed,) = arms_of("optimizer.learning_rate=interval(0.1,0.2)")
    assert [axis.key for axis in typed.axes] == ["optimizer.learning_rate"], "it was asked for"
