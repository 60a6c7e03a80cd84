"""optimizer.ema_decay: an average of the weights is evaluated, kept and resumed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from adaecho import evaluate
from adaecho.config.identity import run_id
from adaecho.config.schema import to_plain
from adaecho.errors import ConfigError
from adaecho.tasks import build_task
from adaecho.training.trainer import Trainer
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.helpers import metrics

RUN = ("task=digits", "target.value=null", "echo.shuffle_buffer=64", "optimizer.ema_decay=0.9")


def test_the_average_is_that_of_torch(compose_config: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_config(*RUN, "max_steps=7")
    trainer = Trainer(config, build_task(config), record=lambda _: None, interrupted=lambda: 0)
    theirs = AveragedModel(trainer.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    update = trainer._update

    def both() -> None:
        update()
        theirs.update_parameters(trainer.model)

    monkeypatch.setattr(trainer, "_update", both)
    with trainer.loader:
        trainer.train()
    assert trainer.progress.steps == 7
    average, expected = trainer.evaluated.state_dict(), theirs.module.state_dict()
    assert all(torch.equal(average[name], value) for name, value in expected.items())
    assert any(not torch.equal(average[name], value) for name, value in trainer.model.state_dict().items())
    assert all(torch.equal(average[name], value) for name, value in trainer.weights().items())


def test_the_average_is_what_is_saved_and_training_goes_on_without_it(compose_config: Compose) -> None:
    run_trial(compose_config(*RUN, "max_steps=30"), Path("whole"))
    (found,) = evaluate.evaluate(Path("whole"))
    assert found.metrics == found.recorded
    run_trial(compose_config(*RUN[:-1], "max_steps=30"), Path("plain"))
    losses = [[line["train_loss"] for line in metrics(name)] for name in ("plain", "whole")]
    assert losses[0] == losses[1], "training itself is the same"
    assert metrics("plain") != metrics("whole")


def test_without_an_average_a_run_is_what_it_was(compose_config: Compose) -> None:
    config = compose_config(*RUN[:-1])
    plain = to_plain(config)
    del plain["optimizer"]["ema_decay"]
    assert run_id(plain) == run_id(to_plain(config))
    with_average = replace(config, optimizer=replace(config.optimizer, ema_decay=0.9))
    assert run_id(to_plain(with_average)) != run_id(plain)
    with pytest.raises(ConfigError, match=r"optimizer\.ema_decay=1\.0: must lie in \[0, 1\)"):
        compose_config(*RUN[:-1], "optimizer.ema_decay=1.0")
