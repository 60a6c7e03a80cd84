"""Killed anywhere and run again, a run leaves the metrics that an undisturbed one leaves."""

import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho.config.schema import Config, from_plain, to_plain
from adaecho.tasks import build_task
from adaecho.training import trial
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.forks import FORKS
from tests.helpers import dying, metrics, signal_at, summary
from tests.needs import first_form

RUN = ("max_steps=30", "target.value=null", "evaluate.every_fresh_examples=64", "checkpoint_every_s=0")


def _run_until_killed(plain: dict[str, Any], folder: str, die_at: int) -> None:
    """One piece of a run, in a process of its own; every write to disk and every step is a place to die."""
    from adaecho.training import trainer

    calls = [0]
    for name in ("replace", "fsync", "rename", "truncate", "ftruncate", "pwrite"):
        setattr(os, name, dying(getattr(os, name), die_at, calls))
    trainer.Trainer._step = dying(trainer.Trainer._step, die_at, calls)  # type: ignore[method-assign]
    run_trial(from_plain(plain), Path(folder))


def _piece(config: Config, folder: Path, die_at: int) -> int | None:
    process = FORKS.Process(target=_run_until_killed, args=(to_plain(config), str(folder), die_at))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize(
    "echo",
    first_form(
        ("echo=batch", "echo.factor=1.5"),
        ("echo=example_before_augmentation", "echo.factor=2"),
        also=[("echo=none",), ("echo=example_after_augmentation", "echo.factor=2.5")],
    ),
    ids=lambda overrides: overrides[0],
)
def test_killed_anywhere_it_continues_to_the_same_metrics(
    compose_config: Compose, echo: tuple[str, ...]
) -> None:
    config, undisturbed, folder = compose_config(*RUN, *echo), Path("undisturbed"), Path("killed")
    run_trial(config, undisturbed)
    # Ever later deaths, so that each piece gets past the last one's end and each kind of place has its turn.
    ends = [_piece(config, folder, die_at) for die_at in (1, 2, 4, 9, 20, 41, 83, 10**9)]
    assert ends.count(-signal.SIGKILL) >= 5
    assert summary(folder)["status"] == "budget_spent"
    assert metrics(folder) == metrics(undisturbed)
    assert len(metrics(folder)) > 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_ends_the_step_and_leaves_a_checkpoint(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    signal_at(monkeypatch, 20, number)
    ended = run_trial(compose_config(*RUN[:-1]), Path("signalled"))
    assert (ended["status"], ended["steps"], ended["signal"]) == ("preempted", 20, number.name)
    assert Path("signalled/checkpoint/last.pt").exists()


_SOON_HARM = ("task=digits_mlp", "evaluate.every_fresh_examples=160", "optimizer.learning_rate=1")
# Overrides, the steps of the first piece and of the whole, and what of the summary must be the same too.
IN_PIECES: dict[str, tuple[tuple[str, ...], int, int, tuple[str, ...]]] = {
    "a larger budget": ((), 30, 60, ("steps", "fresh_examples")),
    "adam": (("optimizer.name=adam", "optimizer.learning_rate=0.001"), 13, 30, ("steps",)),
    "an average": (("echo.shuffle_buffer=64", "optimizer.ema_decay=0.9"), 13, 30, ("steps",)),
    "adascale": (
        ("adascale=on", "echo=example_before_augmentation", "echo.factor=2"), 11, 24,
        ("gain", "scale_invariant_steps", "fresh_scale_invariant_steps"),
    ),
    "adascale of one gradient": (
        ("adascale=on", "echo=batch", "echo.factor=2", "adascale.num_gradients_to_accumulate=1",
         "adascale.scale=4"), 11, 24,
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
    """Evaluations, and weights at the end and at the best of them."""
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


def test_a_loss_may_draw_from_any_global_generator(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary mixup, say: a run's seed is theirs, and they go on where the run does."""

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
