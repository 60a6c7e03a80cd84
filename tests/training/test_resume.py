"""Killed anywhere and run again, a run leaves the metrics that an undisturbed one leaves."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from adaecho.config.schema import Config, from_plain, to_plain
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.forks import FORKS
from tests.helpers import dying, metrics

RUN = ("max_steps=30", "target.value=null", "evaluate.every_fresh_examples=64", "checkpoint_every_s=0")


def _run_until_killed(plain: dict[str, Any], folder: str, die_at: int) -> None:
    """One piece of a run, in a process of its own; every write to disk and every step is a place to die."""
    from adaecho.training import trainer

    calls = [0]
    for name in ("replace", "fsync", "rename", "write"):
        setattr(os, name, dying(getattr(os, name), die_at, calls))
    trainer.Trainer._step = dying(trainer.Trainer._step, die_at, calls)  # type: ignore[method-assign]
    run_trial(from_plain(plain), Path(folder))


def _piece(config: Config, folder: Path, die_at: int) -> int:
    process = FORKS.Process(target=_run_until_killed, args=(to_plain(config), str(folder), die_at))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize(
    "echo",
    [
        ("echo=none",),
        ("echo=batch", "echo.factor=1.5"),
        ("echo=example_before_augmentation", "echo.factor=2"),
        ("echo=example_after_augmentation", "echo.factor=2.5"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_killed_anywhere_it_continues_to_the_samemetrics(
    compose_config: Compose, echo: tuple[str, ...]
) -> None:
    config = compose_config(*RUN, *echo)
    undisturbed = Path("undisturbed")
    run_trial(config, undisturbed)

    folder, kills = Path("killed"), 0
    # Ever later deaths, so that each piece gets past the last one's end and each kind of place has its turn.
    for die_at in (1, 2, 4, 9, 20, 41, 83, 10**9):
        kills += _piece(config, folder, die_at) == -signal.SIGKILL
    assert kills >= 5
    assert json.loads((folder / "summary.json").read_text())["status"] == "budget_spent"
    assert metrics(folder) == metrics(undisturbed)
    assert len(metrics(folder)) > 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_ends_the_step_and_leaves_a_checkpoint(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    from adaecho.training import trainer

    config = compose_config(*RUN[:-1])
    undisturbed, folder = Path("undisturbed"), Path("signalled")
    run_trial(config, undisturbed)
    step = trainer.Trainer._step

    def signalled(self: trainer.Trainer, batch: Any) -> None:
        step(self, batch)
        if self.progress.steps == 20:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "_step", signalled)
        summary = run_trial(config, folder)
    assert (summary["status"], summary["steps"]) == ("preempted", 20)
    assert run_trial(config, folder)["status"] == "budget_spent"
    assert metrics(folder) == metrics(undisturbed)
