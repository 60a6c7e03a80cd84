"""evaluate.loss_by_echo_index: the training loss of first uses, of second ones, ...; nothing else changes."""

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaecho.config.identity import run_id
from adaecho.config.schema import Config, to_plain
from adaecho.errors import ConfigError
from adaecho.tasks import build_task
from adaecho.training.trainer import Trainer
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.helpers import metrics
from tests.training.several_ranks import metrics as metrics_of_ranks
from tests.training.several_ranks import run_on

RUN = (
    "task=digits", "target.value=null", "max_steps=24", "echo.shuffle_buffer=40", "batch_size=16",
    "evaluate.every_fresh_examples=32",
)  # fmt: skip
ON = "evaluate.loss_by_echo_index=true"
ECHOES = {
    "none": ("echo=none",),
    "batch": ("echo=batch", "echo.factor=2.5"),
    "before": ("echo=example_before_augmentation", "echo.factor=3"),
    "adascale": ("adascale=on", "echo=example_after_augmentation", "echo.factor=2"),
}
NAME = "train_loss_echo_index_"


def parted(lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What is recorded without, and what is added."""
    return (
        [{key: value for key, value in line.items() if not key.startswith(NAME)} for line in lines],
        [{key: value for key, value in line.items() if key.startswith(NAME)} for line in lines],
    )


def slowly(config: Config) -> list[dict[str, float | None]]:
    """The same from a second look at each batch, one example at a time, before the step."""
    task = build_task(config)
    lines: list[dict[str, float | None]] = []
    of: dict[int, list[float]] = defaultdict(list)

    def record(_: Any) -> None:
        lines.append({f"{NAME}{index}": sum(found) / len(found) for index, found in sorted(of.items())})
        of.clear()

    trainer = Trainer(config, task, record=record, interrupted=lambda: 0)
    step = trainer._step

    def looked_at(pair: Any) -> None:
        batch, ages = pair
        before = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
        logits = trainer.model(batch["image"]).detach()
        for name, buffer in trainer.model.named_buffers():
            buffer.copy_(before[name])
        for index, own, label in zip(ages["echo_index"].tolist(), logits, batch["label"], strict=True):
            of[index].append((own.double().logsumexp(0) - own[label].double()).item())
        step(pair)

    trainer._step = looked_at  # type: ignore[method-assign]
    trainer.train()
    trainer.loader.close()
    return lines


@pytest.mark.parametrize("echo", ECHOES)
def test_it_is_recorded_and_nothing_else_changes(compose_config: Compose, tmp_path: Path, echo: str) -> None:
    config = compose_config(*RUN, *ECHOES[echo], ON)
    run_trial(compose_config(*RUN, *ECHOES[echo]), tmp_path / "without")
    run_trial(config, tmp_path / "with")
    same, added = parted(metrics(tmp_path / "with"))
    assert same == metrics(tmp_path / "without")
    assert all(list(line) == [f"{NAME}{n}" for n in range(math.ceil(config.echo.factor))] for line in added)
    if echo == "adascale":  # its micro-batches see other statistics than the whole batch
        assert all(value is not None for line in added[1:] for value in line.values())
        return
    expected = slowly(config)
    assert len(added) == len(expected) > 2
    for line, other in zip(added, expected, strict=True):
        known = {key: value for key, value in line.items() if value is not None}
        assert known == pytest.approx(other, rel=1e-5)


def test_it_is_the_same_after_a_resume(compose_config: Compose, tmp_path: Path) -> None:
    """Also in the middle between two evaluations."""
    echo = ("echo=example_before_augmentation", "echo.factor=3", ON)
    run_trial(compose_config(*RUN, *echo), tmp_path / "whole")
    for max_steps in (5, 12, 24):
        run_trial(compose_config(*RUN, *echo, f"max_steps={max_steps}"), tmp_path / "pieces")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "pieces")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without gloo")
def test_on_ranks_it_is_the_mean_over_all(compose_config: Compose, tmp_path: Path) -> None:
    """Which also pass over a batch before the first step: that counts for nothing."""
    config = compose_config(*RUN, "echo=batch", "echo.factor=2", ON)
    run_on(2, config, tmp_path / "two")
    run_on(2, replace(config, max_steps=9), tmp_path / "pieces")
    run_on(2, config, tmp_path / "pieces")
    assert metrics_of_ranks(tmp_path / "two") == metrics_of_ranks(tmp_path / "pieces")
    begin = 0
    for line in metrics_of_ranks(tmp_path / "two"):  # every second step is a first use, of all its examples
        means = [line[f"{NAME}{step % 2}"] for step in range(begin, line["steps"])]
        assert sum(means) / len(means) == pytest.approx(line["train_loss"], rel=1e-5)
        begin = line["steps"]


def test_a_task_that_cannot_tell_is_refused(compose_config: Compose) -> None:
    config = compose_config(*RUN, ON)
    task = replace(build_task(config), losses=None)
    with pytest.raises(ConfigError, match="loss_by_echo_index=true: task digits doesn't tell the loss of"):
        Trainer(config, task, record=lambda _: None, interrupted=lambda: 0)


def test_runs_without_it_keep_their_names(compose_config: Compose) -> None:
    plain = to_plain(compose_config(*RUN))
    assert plain["evaluate"].pop("loss_by_echo_index") is False
    assert run_id(plain) == run_id(to_plain(compose_config(*RUN)))
    assert run_id(plain) != run_id(to_plain(compose_config(*RUN, ON)))


def test_indices_beyond_the_last_that_is_told_count_there(compose_config: Compose, tmp_path: Path) -> None:
    run_trial(compose_config(*RUN, "echo=batch", "echo.factor=20", ON, "max_steps=41"), tmp_path / "run")
    assert [key for key in metrics(tmp_path / "run")[-1] if key.startswith(NAME)][-1] == f"{NAME}15"
