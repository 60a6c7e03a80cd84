"""A trial that trains nothing. Its learning rate decides the outcome, and a file lists its faults.

This module is also its task, with the options of ``digits``, so that workers do not import torch.
"""

import errno
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaecho.config.schema import Config, to_plain
from adaecho.config.tasks import TaskConfig
from adaecho.errors import DataError
from adaecho.records.folder import RunFolder
from adaecho.records.trials import FINISHED
from adaecho.training.signals import WaitEndedError

TASK = "tests.search.stub"
DIVERGES_ABOVE = 0.3


@dataclass
class Options(TaskConfig):
    """The keys of ``conf/task/digits.yaml``."""

    model: str = ""
    training_examples: int | None = None
    label_smoothing: float = 0.0


def build(config: Config, options: Options) -> None:  # noqa: ARG001
    """A task module must define it."""
    raise AssertionError("a trial that trains nothing builds nothing")


def run_trial(
    config: Config, folder: Path, overrides: Sequence[str] = (), *, begun: Any, prune: Any = None  # noqa: ARG001
) -> dict[str, Any]:  # fmt: skip
    """Write the summary of a trial: 100 / learning_rate fresh examples; rates above 0.3 diverge."""
    run = RunFolder(folder)
    with run.lock():
        run.start(to_plain(config), list(overrides), {})
        summary = run.read_summary()
        if summary is not None and summary["status"] in FINISHED:
            return summary
        begun()
        control = _control(folder)  # before a test can see that the trial has begun, and change it
        with (folder / "begun.log").open("a") as log:
            log.write(f"{os.getpid()}\n")
        disk_is_full = _misbehave(folder, control)
        summary = _summary(config)
        run.append_metrics({"fresh_examples": summary["fresh_examples"], config.target.metric: 0.98})
        with _full_disk() if disk_is_full else nullcontext():
            run.write_summary(summary)
        signalled = control.get("signalled", {}).get("/".join(folder.parts[-3:]))
        return summary if signalled is None else {**summary, "signal": signalled}


@contextmanager
def _full_disk() -> Iterator[None]:
    """Every fsync fails inside the block."""

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real, os.fsync = os.fsync, fsync
    try:
        yield
    finally:
        os.fsync = real


def _control(folder: Path) -> dict[str, Any]:
    """The faults of the sweep's trials."""
    path = folder.parents[2] / "control.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _misbehave(folder: Path, control: dict[str, Any]) -> bool:
    """Commit the faults of this trial in ``control.json``; returns whether its disk is full."""
    name = "/".join(folder.parts[-3:])
    time.sleep(control.get("sleep_s", 0))
    if name in control.get("users_error", ()):
        raise DataError(f"{name}: no such data")
    attempts = len((folder / "begun.log").read_text().splitlines())
    if attempts <= control.get("fails", {}).get(name, 0):
        raise RuntimeError(f"{name} failed on purpose")
    if attempts <= control.get("dies", {}).get(name, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if attempts == 1 and name in control.get("waits_in_vain", {}):
        raise WaitEndedError(signal.Signals[control["waits_in_vain"][name]])
    if name in control.get("loses_its_lock", ()):
        path = folder / "lock"
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere", "token": "another"}))
    time.sleep(control.get("hangs_s", {}).get(name, 0))
    return name in control.get("disk_full", ())


def _summary(config: Config) -> dict[str, Any]:
    rate, echo, target = config.optimizer.learning_rate, config.echo, config.target
    diverged = rate > DIVERGES_ABOVE
    cost = {"fresh_examples": round(100 / rate), "steps": round(10 / rate), "train_time_s": 0.1}
    return {
        "status": "diverged" if diverged else "reached", "task": config.task.name, "seed": config.seed,
        "echo": {"variant": echo.variant, "factor": echo.factor, "shuffle_buffer": echo.shuffle_buffer},
        "adascale": config.adascale.enabled,
        "hyperparameters": {"optimizer.learning_rate": rate, "optimizer.momentum": config.optimizer.momentum},
        "target": {"metric": target.metric, "value": target.value}, "to_target": None if diverged else cost,
        "best": None if diverged else {"metric": target.metric, "value": 0.98, **cost}, **cost,
    }  # fmt: skip
