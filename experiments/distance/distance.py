"""How far apart must an example's uses be? ``python -m experiments.distance.distance cifar10 data.path=DATA``

Arms of U distinct examples, each used four times: one step apart, in shuffle buffers, and a whole pass apart;
beside them as many and up to four times as many new examples, used once. The rule is in README.md beside this
file. Each run is kept in a file of its own, so that the same command goes on after an interruption.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from numpy.typing import NDArray

from adaecho import EchoLoader
from adaecho.config.schema import Config, from_plain, to_plain
from adaecho.errors import report_errors
from adaecho.records.collect import one_line_each, write_tables
from adaecho.records.environment import environment
from adaecho.records.files import folder_errors, read_json, write_json, write_text
from adaecho.records.statistics import mean_interval
from adaecho.records.trials import table_text
from adaecho.run import CONF
from adaecho.tasks import build_task
from adaecho.tasks.base import Task
from adaecho.training.device import autocast, measure
from adaecho.training.optimizer import make_optimizer, set_rate

FACTOR = 4
BUFFERS = (64, 256, 1024, 4096)
TUNING, SEEDS = range(6000, 6002), range(6100, 6108)
LEVEL = 0.05 / 3  # of the slope's interval
SHARE = 0.9  # of a whole pass's worth that is enough
LEAST_RATE = 0.01  # of the first, at the end of the decay
CPU = torch.device("cpu")

Row = dict[str, Any]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Subject:
    """What is trained: overrides of the command beside ``data.path``, U, and the rates that are tried."""

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
    """How examples are used; ``passes`` over ``times`` U of them."""

    echo: str = "none"
    buffer: int = 0
    passes: int = 1
    times: int = 1


ARMS = {
    "batch": Arm("batch"),
    **{f"buffer_{size}": Arm("example_before_augmentation", size) for size in BUFFERS},
    "pass": Arm(passes=FACTOR),
    **{f"new_{times}": Arm(times=times) for times in range(1, FACTOR + 1)},
}


def distances(unique: int) -> dict[str, float]:
    """Mean number of examples between two uses of one, of the arms that the slope is of."""
    return {**{f"buffer_{size}": float(size) for size in BUFFERS}, "pass": float(unique)}


def train(config: Config, task: Task, arm: Arm, unique: int, rate: float, seed: int) -> float:
    """The validation's cross entropy after one run; infinite if it diverged."""
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
        epochs=arm.passes,  # one iteration; the buffer is drained at its end
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
    """The number of new examples whose run ends at this loss.

    Straight lines of the logarithm of the number over the loss; the first and last go on beyond.

    Args:
        loss: of an arm.
        curve: of 1, 2, ... times ``unique`` new examples, falling.
        unique: U.
    """
    logs = np.log(unique * np.arange(1, len(curve) + 1))
    part = int(np.clip(np.searchsorted(-np.asarray(curve), -loss), 1, len(curve) - 1))
    share = (loss - curve[part - 1]) / (curve[part] - curve[part - 1])
    return float(np.exp(logs[part - 1] + share * (logs[part] - logs[part - 1])))


def readings(rows: Sequence[Row], unique: int) -> list[Row]:
    """Worth of each arm of repeats, its slope over log distance, and the least buffer that is enough."""
    tested = [row for row in rows if row["seed"] in SEEDS]
    losses = {arm: [row["loss"] for row in tested if row["arm"] == arm] for arm in ARMS}
    curve = [float(np.mean(losses[f"new_{times}"])) for times in range(1, FACTOR + 1)]
    if not (np.isfinite([loss for of_arm in losses.values() for loss in of_arm]).all() and falling(curve)):
        return [{"rule": "slope", "verdict": "not decided"}]
    worths = {
        arm: np.array([(effective(loss, curve, unique) / unique - 1) / (FACTOR - 1) for loss in of_arm])
        for arm, of_arm in losses.items()
        if not arm.startswith("new_")
    }
    found: list[Row] = []
    for arm, of_seeds in worths.items():
        low, high = mean_interval(of_seeds.tolist(), 0.95)
        found.append({"arm": arm, "worth": float(of_seeds.mean()), "low": low, "high": high})
    apart = distances(unique)
    logs = np.log2(list(apart.values()))
    slopes = [float(np.polyfit(logs, [worths[arm][at] for arm in apart], 1)[0]) for at in range(len(SEEDS))]
    low, high = mean_interval(slopes, 1 - LEVEL)
    verdict = "holds" if low > 0 else "does not hold" if high < 0 else "not decided"
    found.append(
        {"rule": "slope", "slope": float(np.mean(slopes)), "low": low, "high": high, "verdict": verdict}
    )
    whole = float(worths["pass"].mean())
    enough = [size for size in BUFFERS if whole > 0 and worths[f"buffer_{size}"].mean() >= SHARE * whole]
    return [*found, {"rule": "enough", "buffer": enough[0] if enough else None}]


def falling(curve: Sequence[float]) -> bool:
    """Whether more new examples always end lower."""
    return all(before > after for before, after in pairwise(curve))


class Runs:
    """Runs of one task, each in a file of its own."""

    def __init__(self, folder: Path, subject: Subject, overrides: Sequence[str]) -> None:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            config = compose("config", overrides=[*subject.overrides, *overrides])
        self._config = from_plain(to_plain(config))
        self._task = build_task(self._config)
        self._folder, self._subject = folder, subject
        with folder_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def row(self, arm: str, rate: float, seed: int) -> tuple[Row, dict[str, Any]]:
        """The row of a run, trained unless it lies there already, and where it was made."""
        path = self._folder / f"{arm}_{rate:g}_{seed}.json"
        if not path.exists():
            made_by = {key: value for key, value in environment().items() if key != "slurm"}
            loss = train(self._config, self._task, ARMS[arm], self._subject.unique, rate, seed)
            row = {"arm": arm, "learning_rate": rate, "seed": seed, "loss": float(f"{loss:.7g}")}
            write_json(path, {"environment": made_by, "row": row})
            print(f"{path.stem}: {loss:.4f}", flush=True)
        record = read_json(path)
        return record["row"], record["environment"]

    def all(self) -> tuple[list[Row], list[dict[str, Any]]]:
        """Each arm's rates on the seeds of tuning, then its best rate on the others, seed after seed."""
        found = [self.row(arm, rate, seed) for seed in TUNING for arm in ARMS for rate in self._subject.rates]
        best = {
            arm: min(self._subject.rates, key=lambda rate, arm=arm: self._mean(found, arm, rate))  # type: ignore[misc]
            for arm in ARMS
        }
        found += [self.row(arm, best[arm], seed) for seed in SEEDS for arm in ARMS]
        made_by: list[dict[str, Any]] = []
        for _, one in found:
            made_by += [one] if one not in made_by else []
        return [row for row, _ in found], made_by

    @staticmethod
    def _mean(found: Sequence[tuple[Row, Any]], arm: str, rate: float) -> float:
        return float(
            np.mean([row["loss"] for row, _ in found if row["arm"] == arm and row["learning_rate"] == rate])
        )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=SUBJECTS)
    parser.add_argument("overrides", nargs="*", help="data.path=FOLDER")
    parser.add_argument("--runs", type=Path, default=Path("runs/distance"), help="a file for each run")
    parser.add_argument("--results", type=Path, default=Path("runs/results/distance"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with report_errors():
        subject = SUBJECTS[options.task]
        try:
            rows, made_by = Runs(options.runs / options.task, subject, options.overrides).all()
        except KeyboardInterrupt:
            print("interrupted; the same command continues", file=sys.stderr)
            sys.exit(130)
        results = options.results / options.task
        texts = {
            "worths.json": table_text(rows),
            "outcome.json": one_line_each(readings(rows, subject.unique)),
        }
        command = f"python -m experiments.distance.distance {options.task} data.path=DATA"
        write_tables(results, texts, {"commands": [command], "environments": made_by})
        write_text(results / "worths.json", texts["worths.json"])  # no table of a sweep
        print(results)


if __name__ == "__main__":
    main()
