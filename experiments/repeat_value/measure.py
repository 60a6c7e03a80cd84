"""What is a repeat worth, and does gradient noise tell? ``python -m experiments.repeat_value.measure``

From checkpoints along a run without echoing, branches of the same fresh examples with each echo variant and
factor, and AdaScale's sigma^2 and mu^2 at the checkpoint, sigma^2 split into the noise between examples and
the noise between augmented copies of one. experiments/repeat_value says what is read off. Each run is kept in
a file of its own, so that the same command goes on after an interruption.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, grad, vmap

from adaecho import EchoLoader
from adaecho.config.schema import Config, from_plain, to_plain
from adaecho.errors import told
from adaecho.records.collect import one_line_each, write_tables
from adaecho.records.environment import environment
from adaecho.records.files import folder_errors, read_json, write_json
from adaecho.records.trials import table_text
from adaecho.run import CONF
from adaecho.tasks import build_task
from adaecho.tasks.base import Task
from adaecho.training.device import measure
from adaecho.training.optimizer import make_optimizer
from experiments.evidence.repeat_value import BASELINE, BRANCHES, readings

COMMAND = "python -m experiments.repeat_value.measure"
TASK = "digits_mlp"  # without batch norm: a batch's gradient is the mean of its examples' gradients
CHECKPOINTS = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144)  # in fresh examples, whole batches
FRESH = 512  # examples of a branch
CONTINUATIONS = 16  # from each checkpoint, which differ in what is read next
SEEDS = range(24)  # of the runs
EXAMPLES, COPIES = 8192, 2  # that the noise is estimated from
_BLOCK = 128  # examples whose gradients are in memory at once
_DIGITS = 6  # significant ones of a record

Rows = NDArray[np.int64]
"""Rows of the training images, [examples]."""


class Noise(NamedTuple):
    """What one example's gradient, through one augmentation, is made of.

    Attributes:
        between: the variance of examples' mean gradients over all their augmentations.
        within: the variance over the augmentations of one example, averaged over examples.
        square: mu^2, of the mean over all examples and augmentations.
    """

    between: float
    within: float
    square: float


def split_noise(blocks: Iterable[torch.Tensor]) -> Noise:
    """Estimate all three without bias (``within`` is never negative, the other two may be).

    With k copies of each of m examples, their gradients g_ij, an example's mean g_i and the mean g::

        within  = sum_ij |g_ij - g_i|^2 / (m (k - 1))
        v       = sum_i |g_i - g|^2 / (m - 1)     of an example's mean of k: between + within / k
        between = v - within / k
        mu^2    = |g|^2 - v / m

    a one-way analysis of variance with random effects, summed over parameters. between + within is sigma^2 of
    a batch of one example (``adascale/estimators.py``), and a batch of b has 1 / b of it.

    Args:
        blocks: gradients [examples, copies, parameters], of examples drawn independently; the same number of
            copies, two or more, in all.
    """
    examples, copies = 0, 0
    around_means, of_means = 0.0, 0.0
    total = torch.zeros((), dtype=torch.float64)
    for block in blocks:
        gradients = block.double()
        means = gradients.mean(1)  # [examples, parameters]
        around_means += (gradients - means[:, None]).square().sum().item()
        of_means += means.square().sum().item()
        total = total + means.sum(0)
        examples, copies = examples + len(block), block.shape[1]
    within = around_means / (examples * (copies - 1))
    square_of_mean = (total / examples).square().sum().item()
    of_an_example = (of_means - examples * square_of_mean) / (examples - 1)
    return Noise(of_an_example - within / copies, within, square_of_mean - of_an_example / examples)


def example_gradients(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The gradient of each example's loss alone, [examples, parameters].

    Args:
        model: one that mixes nothing between the examples of a batch.
        loss: as ``Task.loss``.
        batch: tensors whose first axis is the examples.
    """
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def of_one(weights: dict[str, torch.Tensor], example: dict[str, torch.Tensor]) -> torch.Tensor:
        alone = {name: part[None] for name, part in example.items()}
        total: torch.Tensor = loss(lambda inputs: functional_call(model, weights, (inputs,)), alone)[0]
        return total

    found = vmap(grad(of_one), in_dims=(None, 0))(weights, batch)
    return torch.cat([gradient.flatten(1) for gradient in found.values()], 1)


def upcoming(rest: Rows, number: int, length: int, rng: np.random.Generator) -> Rows:
    """What another order of reading would bring next: the rest of a pass, then passes of all rows."""
    rows = rng.permutation(rest)
    while len(rows) < number:
        rows = np.concatenate([rows, rng.permutation(length)])
    return rows[:number]


@dataclass
class Workload:
    """A task and how it is trained."""

    config: Config
    task: Task

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rows: Rows,
        *,
        echo: str = "none",
        factor: int = 1,
        shuffle_buffer: int = 0,
        seed: int,
    ) -> None:
        """One pass over these rows, in this order but for the buffer, which is drained at the end."""
        loader = EchoLoader(
            {name: column[rows] for name, column in self.task.source.items()},
            self.config.batch_size,
            echo=echo,
            factor=factor,
            shuffle_buffer=shuffle_buffer,
            augment=self.task.augment,
            order="stored",
            epochs=1,
            seed=seed,
        )
        for batch in loader:
            optimizer.zero_grad(set_to_none=True)
            total, weight = self.task.loss(model, batch)
            (total / weight).backward()
            optimizer.step()

    def loss(self, model: nn.Module) -> float:
        """The cross entropy on the validation split.

        Raises:
            ValueError: it is no number, of a run that diverged.
        """
        metrics = measure(self.task, model, "validation", torch.device("cpu"), self.config.precision)
        model.train()
        if not math.isfinite(metrics["cross_entropy"]):
            raise ValueError("a branch diverged; its loss has no worth")
        return metrics["cross_entropy"]

    def noise(self, model: nn.Module, rng: np.random.Generator) -> Noise:
        """Of this model's gradients, from examples drawn with replacement."""
        length = len(self.task.source["label"])
        return split_noise(self._gradients(model, rng.integers(length, size=EXAMPLES), rng))

    def _gradients(self, model: nn.Module, rows: Rows, rng: np.random.Generator) -> Iterator[torch.Tensor]:
        for begin in range(0, len(rows), _BLOCK):
            copies = np.repeat(rows[begin : begin + _BLOCK], COPIES)
            keys = rng.integers(2**64, size=len(copies), dtype=np.uint64)
            examples = {name: column[copies] for name, column in self.task.source.items()}
            augmented = self.task.augment.block(examples, keys)
            batch = {name: torch.from_numpy(column) for name, column in augmented.items()}
            yield example_gradients(model, self.task.loss, batch).unflatten(0, (-1, COPIES))

    def run(self, seed: int) -> list[dict[str, Any]]:
        """One run without echoing, with the branches from each of its checkpoints: a row for each branch."""
        torch.manual_seed(seed)
        model = self.task.build_model()
        optimizer = make_optimizer(self.config, model)
        rng, length = np.random.default_rng(seed), len(self.task.source["label"])
        passes = -(-CHECKPOINTS[-1] // length)
        order = np.concatenate([rng.permutation(length) for _ in range(passes)])
        found, before = [], 0
        for checkpoint in CHECKPOINTS:
            self.train(model, optimizer, order[before:checkpoint], seed=seed * CHECKPOINTS[-1] + checkpoint)
            rest = order[checkpoint : -(-checkpoint // length) * length]
            known = {
                "seed": seed,
                "fresh_examples": checkpoint,
                "loss_before": self.loss(model),
                **self.noise(model, np.random.default_rng((seed, checkpoint)))._asdict(),
            }
            for (echo, factor), losses in self.branches(model, optimizer, rest, (seed, checkpoint)).items():
                branch = {"echo_variant": echo, "echo_factor": factor, "loss_after": float(np.mean(losses))}
                found.append({**known, **branch})
            before = checkpoint
        return found

    def branches(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rest: Rows, at: tuple[int, int]
    ) -> dict[tuple[str, int], list[float]]:
        """The losses after each branch, one for each continuation; model and optimizer stay as they are.

        The branches of a continuation read the same examples, and first uses have the same augmentation.
        """
        losses: dict[tuple[str, int], list[float]] = {branch: [] for branch in (BASELINE, *BRANCHES)}
        for continuation in range(CONTINUATIONS):
            rng = np.random.default_rng((*at, continuation))
            rows = upcoming(rest, FRESH, len(self.task.source["label"]), rng)
            seed = int(rng.integers(2**62))
            for (echo, factor), found in losses.items():
                ours, own = deepcopy((model, optimizer))
                self.train(ours, own, rows, echo=echo, factor=factor, shuffle_buffer=FRESH, seed=seed)
                found.append(self.loss(ours))
        return losses


def workload() -> Workload:
    """The one that is measured."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = from_plain(to_plain(compose("config", overrides=[f"task={TASK}"])))
    return Workload(config, build_task(config))


def measured(seed: int, runs: Path, work: Workload) -> dict[str, Any]:
    """The record of one run, measured unless it lies there already."""
    path = runs / f"{seed}.json"
    if not path.exists():
        made_by = {key: value for key, value in environment().items() if key != "slurm"}
        rows = [
            {
                key: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
                for key, value in row.items()
            }
            for row in work.run(seed)
        ]
        write_json(path, {"environment": made_by, "rows": rows})
        print(f"run {seed}: loss {rows[0]['loss_before']:.3f} to {rows[-1]['loss_before']:.3f}", flush=True)
    found: dict[str, Any] = read_json(path)
    return found


def measure_all(runs: Path, results: Path) -> None:
    """Measure the runs that are missing, and write the tables of all."""
    with folder_errors(runs):
        runs.mkdir(parents=True, exist_ok=True)
    work = workload()
    records = [measured(seed, runs, work) for seed in SEEDS]
    made_by: list[dict[str, Any]] = []
    for record in records:
        made_by += [record["environment"]] if record["environment"] not in made_by else []
    rows = [row for record in records for row in record["rows"]]
    texts = {"branches.json": table_text(rows), "outcome.json": one_line_each(readings(rows))}
    write_tables(results, texts, {"commands": [COMMAND], "environments": made_by})


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/repeat_value/digits"), help="a file each")
    parser.add_argument("--results", type=Path, default=Path("runs/results/repeat_value/digits"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with told():
        try:
            measure_all(options.runs, options.results)
        except KeyboardInterrupt:
            print("interrupted; the same command continues", file=sys.stderr)
            sys.exit(130)
    print(options.results)


if __name__ == "__main__":
    main()
