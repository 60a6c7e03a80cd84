"""Runs with AdaScale: every echo variant, the schedule, the end, and refused configs."""

import math
from pathlib import Path

import pytest
import torch

from adaecho.errors import ConfigError
from adaecho.tasks import build_task
from adaecho.training.loader import make_loader
from adaecho.training.optimizer import split_batch
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.helpers import metrics
from tests.needs import first_form

RUN = ("task=digits", "adascale=on", "max_steps=24", "target.value=null", "evaluate.every_fresh_examples=64")
ECHOES = {
    "none": ("echo=none",),
    "batch": ("echo=batch", "echo.factor=2"),
    "before": ("echo=example_before_augmentation", "echo.factor=2"),
    "after": ("echo=example_after_augmentation", "echo.factor=1.5"),
}


@pytest.mark.parametrize("echo", first_form("before", also=["none", "batch", "after"]))
def test_a_run_with_every_echo(compose_config: Compose, tmp_path: Path, echo: str) -> None:
    config = compose_config(*RUN, *ECHOES[echo])
    summary = run_trial(config, tmp_path / "run")
    last = metrics(tmp_path / "run")[-1]
    scale = config.adascale.scale or config.adascale.num_gradients_to_accumulate
    assert summary["status"] == "budget_spent"
    assert 1 < summary["gain"] <= scale
    assert summary["steps"] == 24
    assert 24 < summary["scale_invariant_steps"] <= 24 * scale
    assert {"gain", "scale_invariant_steps", "fresh_scale_invariant_steps"} <= set(last)
    fresh = summary["fresh_scale_invariant_steps"] * config.echo.factor
    assert fresh == pytest.approx(summary["scale_invariant_steps"])


def test_the_schedule_is_read_at_the_scale_invariant_steps(compose_config: Compose, tmp_path: Path) -> None:
    decay = ("schedule.shape=linear_decay", "schedule.decay_steps=100", "schedule.decay_factor=10")
    config = compose_config(*RUN, *decay)
    run_trial(config, tmp_path / "run")
    for line in metrics(tmp_path / "run"):
        tau = math.floor(line["scale_invariant_steps"])
        assert line["learning_rate"] == pytest.approx(config.optimizer.learning_rate * (1 - 0.9 * tau / 100))
        assert tau > line["steps"]


@pytest.mark.parametrize("adascale", first_form("on", also=["off", "measure"]))
def test_an_epoch_of_the_schedule_counts_base_batches(
    compose_config: Compose, tmp_path: Path, adascale: str
) -> None:
    """An epoch has 2 base batches of 16 for each step."""
    decay = ("schedule.shape=linear_decay", "schedule.decay_epochs=2", "schedule.decay_factor=10")
    config = compose_config(*RUN, f"adascale={adascale}", *decay)
    run_trial(config, tmp_path / "run")
    batch = config.batch_size / (2 if adascale == "on" else 1)
    duration = 2 * (1797 - config.data.validation_examples) / batch
    for line in metrics(tmp_path / "run"):
        position = math.floor(line["scale_invariant_steps"]) if adascale == "on" else line["steps"]
        expected = config.optimizer.learning_rate * (1 - 0.9 * position / duration)
        assert line["learning_rate"] == pytest.approx(expected)


def test_it_stops_at_the_total_of_scale_invariant_steps(compose_config: Compose, tmp_path: Path) -> None:
    summary = run_trial(compose_config(*RUN, "adascale.total_steps=10"), tmp_path / "run")
    assert summary["status"] == "budget_spent"
    assert 5 <= summary["steps"] < 10
    assert 10 <= summary["scale_invariant_steps"] < 12


def test_each_micro_batch_has_every_fresh_example_once(compose_config: Compose) -> None:
    # Without a shuffle after the echo, every micro-batch has each fresh example of the step, augmented again.
    config = compose_config(
        *RUN, "adascale.num_gradients_to_accumulate=4", "echo=example_before_augmentation", "echo.factor=4",
        "echo.shuffle_buffer=1", "batch_size=128",
    )  # fmt: skip
    with make_loader(config, build_task(config), torch.device("cpu")) as loader:
        batches = iter(loader)
        for step in range(1, 3):
            micro_batches = split_batch(next(batches), 4, 128)
            assert loader.fresh_examples in (32 * step, 32 * step + 1)  # one sits in the buffer
            assert all(torch.equal(micro["label"], micro_batches[0]["label"]) for micro in micro_batches)
            assert not torch.equal(micro_batches[0]["image"], micro_batches[1]["image"])


ON, MEASURE = "adascale=on", "adascale=measure"
ONE_GRADIENT = "adascale.num_gradients_to_accumulate=1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((ON, "batch_size=33"), "batch_size=33: must be a multiple of"),
        ((ON, ONE_GRADIENT), "at least 2 micro-batches"),
        ((ON, "adascale.total_steps=0"), r"adascale\.total_steps=0"),
        ((ON, "adascale.rule=root"), r"adascale\.rule=root: .*gain, sqrt_gain, measure"),
        ((ON, "adascale.rule=sqrt_gain"), r"optimizer\.name=sgd: needs adascale\.rule=gain"),
        ((ON, "optimizer.name=adam"), r"optimizer\.name=adam: needs adascale\.rule=sqrt_gain"),
        ((ON, "optimizer.name=adamw"), r"optimizer\.name=adamw: needs adascale\.rule=sqrt_gain"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_configs(compose_config: Compose, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config("task=digits", *overrides)


def test_measuring_does_not_change_the_learning_rate(compose_config: Compose, tmp_path: Path) -> None:
    """The noise scale is in examples."""
    decay = ("schedule.shape=linear_decay", "schedule.decay_steps=10", "precision=float32", "max_steps=12")
    config = compose_config(*RUN, *decay, MEASURE)
    bare = run_trial(compose_config(*RUN, *decay, "adascale=off"), tmp_path / "bare")
    measured = run_trial(config, tmp_path / "measured")
    rates = [[line["learning_rate"] for line in metrics(tmp_path / name)] for name in ("bare", "measured")]
    assert rates[0] == rates[1]
    assert 1 < measured["gain"] <= 2
    assert "gain" not in bare
    for line in metrics(tmp_path / "measured"):
        scale = line["gradient_variance"] / line["gradient_square"] * config.batch_size / 2
        assert line["gradient_noise_scale_examples"] == pytest.approx(scale)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_uses_the_rule_sqrt_gain(compose_config: Compose, tmp_path: Path, name: str) -> None:
    chosen = (f"optimizer.name={name}", "optimizer.learning_rate=0.001", "adascale.rule=sqrt_gain")
    summary = run_trial(compose_config(*RUN, *chosen, "max_steps=3"), tmp_path / "run")
    assert 1 <= summary["gain"] <= 2
