"""Is wall time what fresh examples and steps predict? T(e) = max(fresh(e) t_upstream, steps(e) t_step).

Run: python -m benchmarks.predicted_time SHARDS    (of scripts/cifar10_shards.py; experiments/predicted_time)
fresh(e) and steps(e) to the target come from committed records, of the first search or seed of each factor;
the same runs are trained again with paced reading and paced steps, one after another. A step sleeps until
``STEP_S`` have passed, as a processor does beside a GPU. The digits are read by a source that sleeps,
CIFAR-10 from ``scripts/slow_store.py`` at a limited rate.
"""

import argparse
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from adaecho.config.schema import from_plain, to_plain
from adaecho.records.outcome import best_trials
from adaecho.records.trials import read_rows
from adaecho.run import CONF
from adaecho.tasks import build_task
from adaecho.tasks.base import Batch, LossAndWeight, Task
from adaecho.training import trial
from benchmarks import record

RATIOS = (1.3, 2.0, 4.0)  # R
FACTORS = (1, 2, 4)  # e
STEP_S = 0.15
BATCH_SIZE = 32  # of both records
RESULTS = record.FOLDER.parent / "results"
PORT = 8765  # as conf/experiment/fig4.yaml has it


class Paced:
    """A source whose examples come no faster than one each ``example_s``."""

    def __init__(self, columns: dict[str, Any], example_s: float) -> None:
        self._columns, self._example_s, self._due = columns, example_s, 0.0

    def __len__(self) -> int:
        return len(self._columns["label"])

    def __getitem__(self, row: int) -> dict[str, Any]:
        # Falling due one after another: what a sleep takes too long the next one takes less.
        self._due = max(self._due, time.monotonic() - 0.05) + self._example_s
        time.sleep(max(self._due - time.monotonic(), 0))
        return {name: column[row] for name, column in self._columns.items()}


class Step:
    """Lasts ``STEP_S`` from its loss's beginning to its update's end."""

    def __init__(self) -> None:
        self._began = 0.0

    def loss_of(self, task: Task) -> Any:
        """The task's loss, which begins a step."""

        def loss(model: nn.Module, batch: Batch) -> LossAndWeight:
            self._began = time.monotonic()
            return task.loss(model, batch)

        return loss

    def end(self, *_: Any) -> None:
        """After an update: sleep for the rest of the step."""
        time.sleep(max(self._began + STEP_S - time.monotonic(), 0))


@contextmanager
def paced(example_s: float | None) -> Iterator[None]:
    """Tasks that are built meanwhile have paced steps, and a paced source where seconds are given."""
    step = Step()

    def build(config: Any) -> Task:
        task = build_task(config)
        source = task.source if example_s is None else Paced(task.source, example_s)
        return replace(task, loss=step.loss_of(task), source=source)

    hook = register_optimizer_step_post_hook(step.end)
    trial.build_task = build  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trial.build_task = build_task  # type: ignore[attr-defined]
        hook.remove()


@contextmanager
def store(shards: Path, kilobytes_per_s: int) -> Iterator[None]:
    """``scripts/slow_store.py`` in a process of its own."""
    script = RESULTS.parent / "scripts" / "slow_store.py"
    command = [
        sys.executable,
        str(script),
        str(shards),
        "--kilobytes-per-s",
        str(kilobytes_per_s),
        "--port",
        str(PORT),
    ]
    with Popen(command) as server:
        time.sleep(2)
        try:
            yield
        finally:
            server.terminate()


def recorded(task: str, factor: int) -> dict[str, Any]:
    """The row of the committed table that a cell repeats."""
    if task == "digits":
        return best_trials(read_rows(RESULTS / "fig5" / task / "trials.json"))[f"e{factor}", 0]
    rows = read_rows(RESULTS / "fig4" / task / "trials.json")
    return next(row for row in rows if row["arm"] == f"e{factor}" and row["repeat"] == 0)


def train(task: str, factor: int, row: dict[str, Any]) -> dict[str, Any]:
    """The row's run once more; returns what reaching the target cost."""
    # The arm's overrides are those of the experiment's file, and the point and seed the row's.
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        experiment = "fig5" if task == "digits" else "fig4"
        arms = compose("config", overrides=[f"experiment={experiment}", f"task={task}"]).search.arms
        overrides = [
            f"experiment={experiment}", f"task={task}", *arms[f"e{factor}"], f"seed={row['seed']}",
            *(f"{key}={value}" for key, value in row["hyperparameters"].items()), "device=cpu",
            "threads=1", "data.num_workers=1",  # reads beside the steps
        ]  # fmt: skip
        config = from_plain(to_plain(compose("config", overrides=overrides)))
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = trial.run_trial(config, Path(folder) / "run")["to_target"]
    return found


def measure(task: str, ratio: float, factor: int, shards: Path) -> dict[str, Any]:
    """One cell."""
    row = recorded(task, factor)
    example_s = ratio * STEP_S / BATCH_SIZE
    fresh, steps = row["to_target_fresh_examples"], row["to_target_steps"]
    predicted = max(fresh * example_s, steps * STEP_S)
    if task == "digits":
        with paced(example_s):
            found = train(task, factor, row)
    else:
        kilobytes = _bytes_an_example(shards / "train-00.tar") / 1024
        with store(shards, round(kilobytes / example_s)), paced(None):
            found = train(task, factor, row)
    return {
        "task": task,
        "R": ratio,
        "e": factor,
        "recorded_fresh_examples": fresh,
        "recorded_steps": steps,
        "predicted_s": predicted,
        "fresh_examples": found["fresh_examples"],
        "steps": found["steps"],
        "measured_s": found["train_time_s"],
        "measured_over_predicted": found["train_time_s"] / predicted,
    }


def _bytes_an_example(shard: Path) -> float:
    with tarfile.open(shard) as archive:
        return shard.stat().st_size / sum(name.endswith(".png") for name in archive.getnames())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", type=Path, help="folder of scripts/cifar10_shards.py")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(task, ratio, factor, options.shards)
        for task in ("digits", "cifar10")
        for ratio in RATIOS
        for factor in FACTORS
    ]
    record.show(rows)
    print(
        record.write(
            "predicted_time", rows, path=RESULTS / "predicted_time" / "paced" / "cells.json", step_s=STEP_S
        )
    )


if __name__ == "__main__":
    main()
