"""A run that was ended and continued leaves the records of an undisturbed run; tests/faults kills runs."""

import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho.config.schema import Config
from adaecho.tasks import build_task
from adaecho.training import trial
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.helpers import metrics, signal_at, summary

RUN = ("max_steps=30", "target.value=null", "evaluate.every_fresh_examples=64")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_ends_the_step_and_leaves_a_checkpoint(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    signal_at(monkeypatch, 20, number)
    ended = run_trial(compose_config(*RUN), Path("signalled"))
    assert (ended["status"], ended["steps"], ended["signal"]) == ("preempted", 20, number.name)
    assert Path("signalled/checkpoint/last.pt").exists()


_SOON_HARM = ("task=digits_mlp", "evaluate.every_fresh_examples=160", "optimizer.learning_rate=1")
# Overrides, steps of the first piece and of the whole run, and fields of the summary that must be equal.
IN_PIECES: dict[str, tuple[tuple[str, ...], int, int, tuple[str, ...]]] = {
    "a larger budget": ((), 30, 60, ("steps", "fresh_examples")),
    "adam": (("optimizer.name=adam", "optimizer.learning_rate=0.001"), 13, 30, ("steps",)),
    "an average": (("echo.shuffle_buffer=64", "optimizer.ema_decay=0.9"), 13, 30, ("steps",)),
    "adascale": (
        ("adascale=on", "echo=example_before_augmentation", "echo.factor=2"), 11, 24,
        ("gain", "scale_invariant_steps", "fresh_scale_invariant_steps"),
    ),
    # At step 22, of the first piece.
    "best before the end": ((*_SOON_HARM, "checkpoint_every_s=0"), 25, 40, ("steps",)),
    "boxes": (
        ("task=scenes", "task.training_scenes=64", "data.validation_examples=16", "batch_size=16",
         "echo.shuffle_buffer=32"), 5, 8, ("steps",),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "first", "last", "same"), IN_PIECES.values(), ids=IN_PIECES)
def test_a_run_in_two_pieces_is_the_whole_run(
    compose_config: Compose,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    first: int,
    last: int,
    same: tuple[str, ...],
) -> None:
    """Compare evaluations, and the final and best weights."""
    common = ("target.value=null", "evaluate.every_fresh_examples=64", "precision=float32", *overrides)
    config = compose_config(*common, f"max_steps={last}")
    run_trial(config, Path("whole"))
    with monkeypatch.context() as patched:
        if overrides:
            signal_at(patched, first)
        piece = config if overrides else compose_config(*common, f"max_steps={first}")
        ended = run_trial(piece, Path("pieces"))
    assert ended["status"] == ("preempted" if overrides else "budget_spent")
    run_trial(config, Path("pieces"))
    assert metrics("pieces") == metrics("whole")
    assert len(metrics("whole")) > 1
    assert {key: summary("pieces")[key] for key in same} == {key: summary("whole")[key] for key in same}
    for name in ("final", "best"):
        pieces, whole = (Path(folder, f"model/{name}.safetensors") for folder in ("pieces", "whole"))
        assert pieces.read_bytes() == whole.read_bytes()


def test_a_loss_may_use_any_global_generator(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's seed seeds the generators, and a checkpoint holds their state: mixup needs both."""

    def build(config: Config) -> Any:
        task = build_task(config)

        def loss(model: Any, batch: Any) -> Any:
            value, weight = task.loss(model, batch)
            return value * (np.random.beta(0.4, 0.4) + random.random() + np.random.normal()), weight

        return replace(task, loss=loss)

    monkeypatch.setattr(trial, "build_task", build)
    run = ("echo.shuffle_buffer=8", "target.value=null", "evaluate.every_fresh_examples=64")
    for folder, budgets in {"whole": (320,), "again": (320,), "run": (128, 192, 320)}.items():
        random.seed()
        np.random.seed()
        for budget in budgets:
            run_trial(compose_config(*run, f"max_fresh_examples={budget}"), Path(folder))
    assert metrics("run") == metrics("whole") == metrics("again") != []
