"""A signal ends a wait for data that may never come, and nothing is lost."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho.echo import pipeline
from adaecho.tasks import build_task
from adaecho.training import signals, trial
from adaecho.training.trainer import Trainer
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.helpers import metrics, summary

RUN = ("task=digits_mlp", "max_steps=20", "target.value=null", "echo.shuffle_buffer=8")


class Dripping:
    """Rows of arrays; one read sends a signal and blocks until it is released."""

    thread_safe = True

    def __init__(self, arrays: dict[str, Any], stuck_at: int) -> None:
        self.arrays, self.stuck_at = arrays, stuck_at
        self.reads, self.released = 0, threading.Event()

    def __len__(self) -> int:
        return len(self.arrays["label"])

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.reads += 1
        if self.reads == self.stuck_at:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self.released.wait(0.01):
                pass
        return {key: np.asarray(value[row]) for key, value in self.arrays.items()}


@pytest.fixture
def dripping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Dripping]]]:
    """``dripping()`` gives the next run such a source."""
    sources: list[Dripping] = []

    def release() -> None:
        late.append(True)
        sources[0].released.set()

    def install() -> list[Dripping]:
        def build(config: Any) -> Any:
            task = build_task(config)
            sources.append(Dripping(task.source, 10**9 if sources else 300))
            object.__setattr__(task, "source", sources[-1])
            return task

        monkeypatch.setattr(trial, "build_task", build)
        monkeypatch.setattr(pipeline, "CLOSE_WAIT_S", 0.2)
        timer.start()
        return sources

    late: list[bool] = []
    timer = threading.Timer(100, release)
    yield install
    timer.cancel()
    assert not late, "it waited for data that never came"


@pytest.mark.filterwarnings("ignore:a call to the source has not returned:RuntimeWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_wait_for_data_ends_with_a_checkpoint(
    compose_config: Compose, dripping: Callable[..., list[Dripping]], workers: int
) -> None:
    config, sources = compose_config(*RUN, f"data.num_workers={workers}"), dripping()
    run_trial(config, Path("run"))
    sources[0].released.set()
    assert (summary("run")["status"], summary("run")["signal"]) == ("preempted", "SIGTERM")
    assert 0 < summary("run")["steps"] < 20
    assert run_trial(config, Path("run"))["status"] == "budget_spent"
    run_trial(config, Path("undisturbed"))
    assert metrics("run") == metrics("undisturbed") != []


def test_a_second_ctrl_c_ends_at_once(compose_config: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer._step

    def twice(self: Trainer, batch: Any) -> None:
        if self.progress.steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("it went on")
        step(self, batch)

    config = compose_config(*RUN)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_step", twice)
        with pytest.raises(KeyboardInterrupt):
            run_trial(config, Path("run"))
    assert summary("run")["status"] == "preempted"
    assert run_trial(config, Path("run"))["status"] == "budget_spent"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_ends_the_run_at_once(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    config = compose_config(*RUN)

    def build(_config: Any) -> None:
        os.kill(os.getpid(), number)
        pytest.fail("it went on with what may take minutes, such as the headers of many shards")

    with monkeypatch.context() as patched:
        patched.setattr(trial, "build_task", build)
        with pytest.raises(signals.WaitEndedError, match="ended the run") as ended:
            run_trial(config, Path("run"))
    assert ended.value.signal == signal.Signals(number).name
    assert summary("run")["status"] == "preempted"
    assert run_trial(config, Path("run"))["status"] == "budget_spent"
