"""Measure how the value of a repeat depends on its distance: ``python -m experiments.distance.distance TASK``

The value of a repeat is the number of new examples that one repeat replaces. Its distance is the number of
examples between two uses of the same example.

The experiment trains several configurations (arms), and compares their final losses. Some arms use the same
8,192 examples four times:

* batch: the four uses of an example are in successive batches.
* buffer_<size>: a shuffle buffer of this size separates the four uses.
* pass: the four uses are one epoch apart.

The other arms never repeat an example:

* new_<n>: train once on each of n * 8,192 examples, for n = 1 to 4.

README.md has the decision rule. After an interruption, the same command resumes the experiment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from adaecho import EchoLoader
from adaecho.config.schema import Config
from adaecho.errors import report_errors
from adaecho.records.statistics import mean_interval
from adaecho.tasks import build_task
from adaecho.tasks.base import Task
from adaecho.training.device import autocast, measure
from adaecho.training.optimizer import make_optimizer, set_rate
from experiments.runs import Record, Row, config_of, options, recorded, write_results

FACTOR = 4
BUFFERS = (64, 256, 1024, 4096)
TUNING, SEEDS = range(6000, 6002), range(6100, 6108)
LEVEL = 0.05 / 3  # the confidence level of the slope's interval is one minus this
SHARE = 0.9  # a buffer is large enough if its repeats have this share of the value of repeats an epoch apart
LEAST_RATE = 0.01  # the learning rate decays to this share of its first value
CPU = torch.device("cpu")

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Subject:
    """Settings of the experiment for one task.

    Attributes:
        overrides: config overrides, without ``data.path``.
        unique: number of distinct examples that each configuration with repeats uses.
        rates: learning rates to try. Each configuration uses its best one.
    """

    overrides: tuple[str, ...]
    unique: int
    rates: tuple[float, ...]


SUBJECTS = {
    "cifar10": Subject(
        ("task=cifar10", "task.depth=8", "batch_size=64", "optimizer.momentum=0.9", "precision=bfloat16"),
        8192,
        (0.05, 0.1, 0.2),
    ),
    "text": Subject(("experiment=text_imdb", "optimizer.momentum=0.9"), 8192, (0.25, 0.5, 1.0)),
}


@dataclass(frozen=True)
class Arm:
    """One of the configurations that the experiment compares: which examples it uses, how often and when."""

    echo: str = "none"  # echo variant
    buffer: int = 0  # size of the shuffle buffer, in examples
    passes: int = 1  # number of epochs
    times: int = 1  # number of distinct examples, divided by Subject.unique


ARMS = {
    "batch": Arm("batch"),
    **{f"buffer_{size}": Arm("example_before_augmentation", size) for size in BUFFERS},
    "pass": Arm(passes=FACTOR),
    **{f"new_{times}": Arm(times=times) for times in range(1, FACTOR + 1)},
}


def train(config: Config, task: Task, arm: Arm, unique: int, rate: float, seed: int) -> float:
    """Train once, and return the cross entropy on the validation split, or infinity after divergence."""
    torch.manual_seed(seed)
    model = task.build_model()
    optimizer = make_optimizer(config, model)
    length = len(next(iter(task.source.values())))
    chosen: Rows = np.random.default_rng(seed).permutation(length)[: arm.times * unique]
    loader = EchoLoader(
        {name: column[chosen] for name, column in task.source.items()},
        config.batch_size,
        echo=arm.echo,
        factor=FACTOR if arm.echo != "none" else 1,
        shuffle_buffer=arm.buffer,
        augment=task.augment,
        epochs=arm.passes,  # all epochs form one iteration, so that the buffer is emptied only at the end
        seed=seed,
    )
    repeats = FACTOR if arm.echo != "none" else arm.passes
    steps = repeats * arm.times * unique // config.batch_size
    for step, batch in enumerate(loader):
        set_rate(optimizer, rate * (1 - (1 - LEAST_RATE) * min(step / steps, 1.0)))
        optimizer.zero_grad(set_to_none=True)
        with autocast(CPU, config.precision):
            total, weight = task.loss(model, batch)
        (total / weight).backward()
        optimizer.step()
    found = measure(task, model, "validation", CPU, config.precision)["cross_entropy"]
    return found if np.isfinite(found) else float("inf")


def effective(loss: float, curve: Sequence[float], unique: int) -> float:
    """Return how many new examples would give the same final loss as training with repeats."""
    # curve[n - 1] is the final loss after training once on n * unique new examples. These losses decrease.
    # Between them, the log of the number of examples is linear in the loss. Beyond them, it is extrapolated.
    logs = np.log(unique * np.arange(1, len(curve) + 1))
    part = int(np.clip(np.searchsorted(-np.asarray(curve), -loss), 1, len(curve) - 1))
    share = (loss - curve[part - 1]) / (curve[part] - curve[part - 1])
    return float(np.exp(logs[part - 1] + share * (logs[part] - logs[part - 1])))


def readings(rows: Sequence[Row], unique: int) -> list[Row]:
    """Return how many new examples a repeat replaces, and whether repeats farther apart replace more."""
    tested = [row for row in rows if row["seed"] in SEEDS]
    losses = {arm: [row["loss"] for row in tested if row["arm"] == arm] for arm in ARMS}
    curve = [float(np.mean(losses[f"new_{times}"])) for times in range(1, FACTOR + 1)]
    # The curve can be inverted only if more new examples always lower the loss. Diverged runs have infinite
    # loss.
    falling = all(before > after for before, after in pairwise(curve))
    if not (np.isfinite([loss for of_arm in losses.values() for loss in of_arm]).all() and falling):
        return [{"rule": "slope", "verdict": "not decided"}]
    worths = {  # the value of a repeat for each seed: the number of new examples that one repeat replaces
        arm: np.array([(effective(loss, curve, unique) / unique - 1) / (FACTOR - 1) for loss in of_arm])
        for arm, of_arm in losses.items()
        if not arm.startswith("new_")
    }
    found: list[Row] = []
    for arm, of_seeds in worths.items():
        low, high = mean_interval(of_seeds.tolist(), 0.95)
        found.append({"arm": arm, "worth": float(of_seeds.mean()), "low": low, "high": high})
    # The mean number of examples between two uses of an example, for each arm.
    apart = {**{f"buffer_{size}": float(size) for size in BUFFERS}, "pass": float(unique)}
    logs = np.log2(list(apart.values()))
    # For each seed, the increase in value when the distance between uses doubles.
    slopes = [float(np.polyfit(logs, [worths[arm][at] for arm in apart], 1)[0]) for at in range(len(SEEDS))]
    low, high = mean_interval(slopes, 1 - LEVEL)
    verdict = "holds" if low > 0 else "does not hold" if high < 0 else "not decided"
    found.append(
        {"rule": "slope", "slope": float(np.mean(slopes)), "low": low, "high": high, "verdict": verdict}
    )
    # The smallest buffer whose repeats have nearly the value of repeats an epoch apart.
    whole = float(worths["pass"].mean())
    enough = [size for size in BUFFERS if whole > 0 and worths[f"buffer_{size}"].mean() >= SHARE * whole]
    return [*found, {"rule": "enough", "buffer": enough[0] if enough else None}]


def run_all(folder: Path, subject: Subject, overrides: Sequence[str]) -> list[Record]:
    """Tune the learning rate of each configuration, then train with the best rate on the other seeds."""
    config = config_of([*subject.overrides, *overrides])
    task = build_task(config)

    def run(arm: str, rate: float, seed: int) -> Record:
        def rows() -> list[Row]:
            loss = train(config, task, ARMS[arm], subject.unique, rate, seed)
            return [{"arm": arm, "learning_rate": rate, "seed": seed, "loss": loss}]

        return recorded(folder / f"{arm}_{rate:g}_{seed}.json", rows)

    found = [run(arm, rate, seed) for seed in TUNING for arm in ARMS for rate in subject.rates]
    tuned = [row for record in found for row in record["rows"]]

    def mean(arm: str, rate: float) -> float:
        return float(
            np.mean([row["loss"] for row in tuned if (row["arm"], row["learning_rate"]) == (arm, rate)])
        )

    best = {arm: min(subject.rates, key=partial(mean, arm)) for arm in ARMS}
    return found + [run(arm, best[arm], seed) for seed in SEEDS for arm in ARMS]


def main() -> None:
    typed = options(__doc__, "distance", SUBJECTS, "data.path=FOLDER").parse_args()
    with report_errors():
        subject = SUBJECTS[typed.task]
        records = run_all(typed.runs / typed.task, subject, typed.overrides)
        command = f"python -m experiments.distance.distance {typed.task} data.path=DATA"
        write_results(
            typed.results / typed.task, records, lambda rows: readings(rows, subject.unique), command
        )


if __name__ == "__main__":
    main()
