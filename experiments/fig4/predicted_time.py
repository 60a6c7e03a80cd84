"""Test whether the numbers of fresh examples and steps predict the wall time of training.

The predicted time of a run is max(fresh * t_upstream, steps * t_step):

* fresh: the number of fresh examples that the run reads to reach its target.
* t_upstream: the time to read one example.
* steps: the number of training steps that the run takes to reach its target.
* t_step: the time of one training step.

The committed records contain fresh and steps. The test repeats the recorded runs, and compares their wall
times with the predictions. It slows down every training step and every read, so that t_upstream and t_step
are fixed. For digits, the dataset sleeps at each read. CIFAR-10 comes from a local server with a limited rate
(``scripts/slow_store.py``). To run the test:

    python scripts/cifar10_shards.py DATA SHARDS
    python -m experiments.fig4.predicted_time SHARDS
"""

import argparse
import multiprocessing
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hydra import compose, initialize_config_dir
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from adaecho.records.outcome import best_trials
from adaecho.records.trials import read_rows
from adaecho.run import CONF
from adaecho.tasks import build_task
from adaecho.tasks.base import Batch, LossAndWeight, Task
from adaecho.training import trial
from benchmarks import record
from experiments.runs import config_of
from scripts.slow_store import make_server

RATIOS, FACTORS = (1.3, 2.0, 4.0), (1, 2, 4)  # values of R and of e
STEP_S, BATCH_SIZE = 0.15, 32
EXPERIMENTS = {"digits": "fig5", "cifar10": "fig4"}
RESULTS = Path(__file__).parents[2] / "results"
PORT = 8765  # the port in conf/experiment/fig4.yaml


class Paced:
    """A dataset that returns at most one example per ``example_s`` seconds."""

    def __init__(self, columns: dict[str, Any], example_s: float) -> None:
        self._columns, self._example_s, self._due = columns, example_s, 0.0

    def __len__(self) -> int:
        return len(self._columns["label"])

    def __getitem__(self, row: int) -> dict[str, Any]:
        # Each deadline is computed from the last one, so that a sleep that was too long shortens the next.
        self._due = max(self._due, time.monotonic() - 0.05) + self._example_s
        time.sleep(max(self._due - time.monotonic(), 0))
        return {name: column[row] for name, column in self._columns.items()}


@contextmanager
def paced(example_s: float | None) -> Iterator[None]:
    """Run training steps of at least ``STEP_S`` seconds and, if given, reads of at least ``example_s``."""
    began = 0.0

    def build(config: Any) -> Task:
        task = build_task(config)

        def loss(model: nn.Module, batch: Batch) -> LossAndWeight:
            nonlocal began
            began = time.monotonic()
            return task.loss(model, batch)

        return replace(task, loss=loss, source=Paced(task.source, example_s) if example_s else task.source)

    hook = register_optimizer_step_post_hook(lambda *_: time.sleep(max(began + STEP_S - time.monotonic(), 0)))
    with patch.object(trial, "build_task", build):
        yield
    hook.remove()


@contextmanager
def store(shards: Path, example_s: float) -> Iterator[None]:
    """Serve tar shards over http, at one example per ``example_s`` seconds."""
    with tarfile.open(shards / "train-00.tar") as archive:
        examples = sum(name.endswith(".png") for name in archive.getnames())
    kilobytes = (shards / "train-00.tar").stat().st_size / examples / 1024
    server = make_server(shards, PORT, round(kilobytes / example_s))
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    with server:
        yield
    process.terminate()
    process.join()


def train(task: str, factor: int, row: dict[str, Any]) -> dict[str, Any]:
    """Repeat a recorded run, and return its cost to the target: fresh examples, steps and seconds."""
    base = [f"experiment={EXPERIMENTS[task]}", f"task={task}"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        arms = compose("config", overrides=base).search.arms
    point = [f"{key}={value}" for key, value in row["hyperparameters"].items()]
    cpu = ["device=cpu", "threads=1", "data.num_workers=1"]  # a worker reads while the steps run
    config = config_of([*base, *arms[f"e{factor}"], f"seed={row['seed']}", *point, *cpu])
    with tempfile.TemporaryDirectory() as folder:
        return dict(trial.run_trial(config, Path(folder) / "run")["to_target"])


def measure(task: str, ratio: float, factor: int, shards: Path) -> dict[str, Any]:
    """Train to the target, and compare the duration with the prediction.

    Args:
        ratio: the time to read a batch, divided by the time of a training step.
    """
    # Use the first search or seed of the factor.
    row = best_trials(read_rows(RESULTS / EXPERIMENTS[task] / task / "trials.json"))[f"e{factor}", 0]
    example_s = ratio * STEP_S / BATCH_SIZE
    fresh, steps = row["to_target_fresh_examples"], row["to_target_steps"]
    predicted = max(fresh * example_s, steps * STEP_S)
    with store(shards, example_s), paced(example_s if task == "digits" else None):
        found = train(task, factor, row)
    return {
        "task": task,
        "R": ratio,
        "e": factor,
        "recorded_fresh_examples": fresh,
        "recorded_steps": steps,
        "predicted_s": predicted,
        **{key: found[key] for key in ("fresh_examples", "steps")},
        "measured_s": found["train_time_s"],
        "measured_over_predicted": found["train_time_s"] / predicted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shards", type=Path, help="folder written by scripts/cifar10_shards.py")
    shards = parser.parse_args().shards
    torch.set_num_threads(1)
    rows = [
        measure(task, ratio, factor, shards) for task in EXPERIMENTS for ratio in RATIOS for factor in FACTORS
    ]
    path = RESULTS / "predicted_time" / "paced" / "cells.json"
    record.write("predicted_time", rows, path=path, step_s=STEP_S)


if __name__ == "__main__":
    main()
