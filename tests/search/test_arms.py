import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaecho.config import size_defaults
from adaecho.config.tasks import Size
from adaecho.errors import ConfigError
from adaecho.run import CONF
from adaecho.search.arms import parse_overrides
from tests.needs import first_form
from tests.search.conftest import BuildArms

BEFORE = "example_before_augmentation"
NAMED = ("+search.arms.a=['echo.shuffle_buffer=9']", "+search.arms.b=['echo=batch']")
NAMES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "comma lists in all combinations": (
        (f"echo=batch,{BEFORE}", "echo.factor=2,4"),
        [f"echo-{variant}_factor-{factor}" for variant in ("batch", BEFORE) for factor in (2, 4)]),
    "a choice": (("echo=batch", "echo.factor=choice(1,2)"), ["factor-1", "factor-2"]),
    "a range": (("batch_size=range(8,24,8)",), ["batch_size-8", "batch_size-16"]),
    "named arms times a comma list": (
        (*NAMED, "batch_size=16,32"), [f"{name}_batch_size-{size}" for size in (16, 32) for name in "ab"]),
    "duplicates are one": (("echo=batch", "echo.factor=2,4,2,2.0"), ["factor-2", "factor-4"]),
    "but for what is no part of a run": (("search.workers=1", "data.prefetch=1,2"), ["prefetch-1"]),
    "lists of callbacks": (("callbacks=[json],[csv]",), ["callbacks--json", "callbacks--csv"]),
    "an echo alone is a name": (("echo=batch", "echo.factor=3"), ["batch_e3"]),
    "no echo": ((), ["none"]),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "names"), NAMES.values(), ids=NAMES)
def test_overrides_make_named_arms(arms_of: BuildArms, overrides: tuple[str, ...], names: list[str]) -> None:
    arms = arms_of(*overrides)
    assert [arm.name for arm in arms] == names
    for arm in arms:
        for key, value in re.findall(r"(factor|batch_size)-(\d+)", arm.name):
            assert (arm.config if key == "batch_size" else arm.config["echo"])[key] == int(value)


def test_the_arms_of_an_experiment_keep_its_names(arms_of: BuildArms) -> None:
    arms = arms_of("experiment=fig5")
    assert [arm.name for arm in arms][:3] == ["e1", "e2", "e4"]
    assert arms[2].config["echo"]["factor"] == 4
    assert [axis.key for axis in arms[0].axes] == ["optimizer.learning_rate", "optimizer.momentum"]


EXPERIMENTS = sorted((CONF / "experiment").glob("*.yaml"))


def one_of_a_kind(arms: dict[str, Any]) -> dict[str, Any]:
    """The last arm of each group of arms that differ only in numbers."""
    kinds = {re.sub(r"\d[\d.e+-]*", "0", str(overrides)): name for name, overrides in arms.items()}
    return {name: arms[name] for name in kinds.values()}


@pytest.mark.parametrize("only", first_form(one_of_a_kind, also=[dict]), ids=["kinds", "all"])
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_arm_of_every_experiment_is_valid(
    arms_of: BuildArms, path: Path, only: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = []
    if path.stem.startswith("my_"):  # whose values follow from the data
        monkeypatch.setattr(size_defaults, "_size_at", lambda *_: Size(714, 714, has_validation=False))
        scaled, only = ["data.path=mine"], dict
    arms = arms_of(f"experiment={path.stem}", *scaled, only=only)
    assert arms, "composed, and valid at both ends of each axis"
    if scaled:
        assert [len(arm.axes) for arm in arms] == [0] * 4, "one run each, at the task's rate"


@pytest.mark.parametrize(
    "experiment", ["schedule_ends", "resnet32_rates", "resnet32_seeds", "resnet32_target"]
)
def test_runs_end_with_their_decay(arms_of: BuildArms, experiment: str) -> None:
    """``max_steps`` is multiplied by the echoing factor, unless the arm sets it."""
    for arm in arms_of(f"experiment={experiment}"):
        assert arm.config["max_steps"] == arm.config["schedule"]["decay_steps"], arm.name


@pytest.mark.parametrize("experiment", ["my_photographs", "my_boxes"])
def test_scaled_experiments_search_around_the_scaled_rate(
    arms_of: BuildArms, monkeypatch: pytest.MonkeyPatch, experiment: str
) -> None:
    """The task's axes are for a million images."""
    monkeypatch.setattr(size_defaults, "_size_at", lambda *_: Size(714, 714, has_validation=False))
    arms = arms_of(f"experiment={experiment}", "data.path=mine", "search.trials=2", only=dict)
    assert len(arms) == 4
    for arm in arms:
        rate = arm.config["optimizer"]["learning_rate"]
        found = {axis.key: (axis.low, axis.high) for axis in arm.axes}
        assert found == {"optimizer.learning_rate": (rate / 10, rate * 10), "optimizer.momentum": (0.8, 0.99)}
        assert arm.config["schedule"]["decay_steps"] == arm.config["max_fresh_examples"] // 32


def test_max_steps_of_arms_is_not_multiplied(arms_of: BuildArms) -> None:
    arms = arms_of("echo=batch", "echo.factor=2", "max_steps=20,40")
    assert [(arm.name, arm.config["max_steps"]) for arm in arms] == [
        ("max_steps-20", 20),
        ("max_steps-40", 40),
    ]


def test_names_are_folders_and_differ(arms_of: BuildArms) -> None:
    assert [arm.name for arm in arms_of("data.path=/a/b,'c,d'")] == ["path--a-b", "path--c-d"]
    with pytest.raises(ConfigError, match="path--a-b: 2 arms have this name"):
        arms_of("data.path=/a/b,/a-b")


def test_typed_axes_replace_the_tasks_and_typed_values_fix_theirs(arms_of: BuildArms) -> None:
    (arm,) = arms_of("optimizer.learning_rate=tag(log,interval(0.1,0.2))", "optimizer.momentum=0.8")
    (axis,) = arm.axes
    assert (axis.key, axis.low, axis.high, axis.scale) == ("optimizer.learning_rate", 0.1, 0.2, "log")
    assert arm.config["optimizer"]["momentum"] == 0.8
    arms = arms_of("search.trials=2", "optimizer.learning_rate=0.1,0.2")
    assert [[axis.key for axis in arm.axes] for arm in arms] == [["optimizer.momentum"]] * 2


@pytest.mark.parametrize("spelled", ["schedule.decay_steps=9", "schedule={decay_steps: 9}",
                                     "+search.arms.a=['schedule={decay_steps: 9}']"])  # fmt: skip
def test_a_typed_value_replaces_an_axis(arms_of: BuildArms, spelled: str) -> None:
    (arm,) = arms_of("search.trials=2", "task=cifar10", spelled)
    assert [axis.key for axis in arm.axes] == ["optimizer.learning_rate", "optimizer.momentum"]
    assert arm.config["schedule"]["decay_steps"] == 9


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
        (["echo=batch,loud"], "cannot be composed: .*Could not find 'echo/loud'"),
        (["+search.arms.broken=['echo=loud']"], "arm broken: cannot be composed: .*'echo/loud'"),
        (["batch_size=8,many"], "cannot be composed: Value 'many'"),
        (["echo.factor=1,2"], "echo.factor=2: echo=none repeats nothing"),
        (["echo=none", "echo.factor=2,4"], "echo=none repeats nothing"),
        (["echo=batch", "echo.factor=2,0.5"], r"echo\.factor=0\.5"),
        (["echo=batch", "echo.factor=auto", "schedule.decay_steps=tag(times_factor,interval(1,9))"],
         "times_factor needs"),
        (["max_fresh_examples=1000,2000"], "need the same value"),
        (["search.trials=1,2"], "search.\\* once for all arms"),
        (["max_loss=10,20"], "need the same value"),
        (["evaluate.every_fresh_examples=100,200"], "need the same value"),
        (["search.trials=0"], "search.trials=0"),
        (["seed=1,2"], "hydra/sweeper=basic"),
        (["experiment=quickstart", "echo=batch"], "keep only one"),
        (["optimizer.momentum=interval(0.5,1.5)"], "optimizer.momentum=1.5"),
        (["+search.arms.a=['optimizer.learning_rate=0.1']", "optimizer.learning_rate=interval(0.1,0.2)"],
         "arm a: optimizer.learning_rate: set on the command line and by the arm"),
        (["+search.arms.a=['search.trials=9']", "+search.arms.b=[]"], "arm a: seed: a sweep derives"),
        (["adascale=on", "adascale.num_gradients_to_accumulate=2", "batch_size=interval(15,64)"],
         "batch_size="),
        (["search.max_diverged=-5"], "search.max_diverged=-5"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_arms_are_refused(arms_of: BuildArms, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        arms_of(*overrides)


def test_fixed_overrides_keep_their_spelling() -> None:
    typed = parse_overrides(["echo=batch", "data.path='a b'", "~tracking.entity"])
    assert typed.fixed == ("echo=batch", "data.path='a b'", "~tracking.entity")
    assert typed.choices == ()


def test_invalid_combinations_are_left_out_and_reported(
    arms_of: BuildArms, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["echo-none_factor-1", *(f"echo-batch_factor-{factor}" for factor in (1, 2, 4))]
    assert [arm.name for arm in arms_of("echo=none,batch", "echo.factor=1,2,4")] == names
    printed = [line.partition(" (echo.factor=")[::2] for line in capsys.readouterr().out.splitlines()]
    assert [line for line, _ in printed] == [f"left out: echo=none echo.factor={factor}" for factor in (2, 4)]
    assert all(": echo=none repeats nothing" in why for _, why in printed)
    with pytest.raises(ConfigError, match="echo=none repeats nothing"):
        arms_of("echo=none,batch", "echo.factor=2")  # no baseline could be left out unseen


def test_with_one_trial_arms_run_at_the_values_of_the_task(arms_of: BuildArms) -> None:
    """Random points would make the comparison of single runs meaningless."""
    for arm in arms_of("echo=none,batch"):
        assert not arm.axes
        assert arm.config["optimizer"]["learning_rate"] == 0.02
    assert all(len(arm.axes) == 2 for arm in arms_of("echo=none,batch", "search.trials=2"))
    (typed,) = arms_of("optimizer.learning_rate=interval(0.1,0.2)")
    assert [axis.key for axis in typed.axes] == ["optimizer.learning_rate"], "it was asked for"
