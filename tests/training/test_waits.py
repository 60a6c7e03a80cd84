"""A signal while the run waits for data that may never come: the wait has an end, and nothing is lost."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho.tasks import build_task
from adaecho.training import interrupt, trial
from adaecho.training.trial import run_trial
from tests.conftest import Compose

RUN = ("task=digits_mlp", "max_steps=20", "target.value=null", "echo.shuffle_buffer=8")


class Dripping:
    """Rows of arrays; one of them does not come until it is released, and says so by a signal."""

    def __init__(self, arrays: dict[str, Any], stuck_at: int) -> None:
        self.arrays, self.stuck_at = arrays, stuck_at
        self.reads = 0
        self.released = threading.Event()

    def __len__(self) -> int:
        return len(self.arrays["label"])

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.reads += 1
        if self.reads == self.stuck_at:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self.released.wait(0.01):
                pass
        return {key: np.asarray(value[row]) for key, value in self.arrays.items()}


def test_a_wait_for_data_ends_with_a_checkpoint(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_config(*RUN)
    sources: list[Dripping] = []

    def build(config: Any) -> Any:
        task = build_task(config)
        sources.append(Dripping(task.source, stuck_at=10**9 if sources else 300))
        object.__setattr__(task, "source", sources[-1])
        return task

    monkeypatch.setattr(trial, "build_task", build)
    monkeypatch.setattr(interrupt, "WAIT_S", 0.2)
    late = threading.Timer(100, lambda: sources[0].released.set())
    late.start()
    summary = run_trial(config, Path("run"))
    assert not late.finished.is_set(), "it waited for data that never came"
    late.cancel()
    sources[0].released.set()
    assert (summary["status"], summary["signal"]) == ("preempted", "SIGTERM")
    assert 0 < summary["steps"] < 20
    assert run_trial(config, Path("run"))["status"] == "budget_spent"
    run_trial(config, Path("undisturbed"))
    kept = []
    for folder in ("run", "undisturbed"):
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        kept.append([{key: line[key] for key in line if not key.endswith("_s")} for line in lines])
    assert kept[0] == kept[1]
    assert kept[0]
