"""Train a model for equal_steps.py, and measure its loss and the noise of its gradient."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, grad, vmap

from adaecho import EchoLoader
from adaecho.config.schema import Config
from adaecho.tasks.base import Task
from adaecho.training.device import measure

EXAMPLES, COPIES = 8192, 2  # numbers of examples, and of copies of each, for the estimate of the noise
_BLOCK = 128  # number of examples whose gradients are in memory at once

Rows = NDArray[np.int64]
"""Indices of training examples, [examples]."""


class Noise(NamedTuple):
    """How much the gradient varies between examples and between augmentations, and how large its mean is."""

    # Variances are sums over all parameters.
    between: float  # variance between examples, after averaging over augmentations
    within: float  # variance between augmentations of the same example
    square: float  # mu^2, the squared norm of the mean gradient over all examples and augmentations


def split_noise(blocks: Iterable[torch.Tensor]) -> Noise:
    """Return unbiased estimates of a gradient's noise and squared mean (see ``Noise``).

    There are m examples with k augmented copies each. Let g_ij be the gradient of copy j of example i, g_i
    the mean over the copies of example i, and g the mean of all gradients. The estimates are::

        within  = sum_ij |g_ij - g_i|^2 / (m (k - 1))
        v       = sum_i |g_i - g|^2 / (m - 1)
        between = v - within / k
        mu^2    = |g|^2 - v / m

    The estimates of ``between`` and mu^2 can be negative. The method is a one-way analysis of variance with
    random effects, summed over parameters. The sum between + within is AdaScale's sigma^2 for a batch of one
    example.

    Args:
        blocks: gradients [examples, copies, parameters], with at least two copies.
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
    """Return the gradient of each example's loss: [examples, parameters].

    Args:
        model: a model without operations across the batch, such as batch norm.
    """
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def of_one(weights: dict[str, torch.Tensor], example: dict[str, torch.Tensor]) -> torch.Tensor:
        alone = {name: part[None] for name, part in example.items()}
        total: torch.Tensor = loss(lambda inputs: functional_call(model, weights, (inputs,)), alone)[0]
        return total

    found = vmap(grad(of_one), in_dims=(None, 0))(weights, batch)
    return torch.cat([gradient.flatten(1) for gradient in found.values()], 1)


def upcoming(rest: Rows, number: int, length: int, rng: np.random.Generator) -> Rows:
    """Return the next ``number`` indices: the ``rest`` of this epoch in random order, then further epochs."""
    rows = rng.permutation(rest)
    while len(rows) < number:
        rows = np.concatenate([rows, rng.permutation(length)])
    return rows[:number]


@dataclass
class Workload:
    """A task and its config, with methods that train and measure a model on them."""

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
        """Train for one epoch on the examples with the given indices, including all their repeats."""
        loader = EchoLoader(
            {name: column[rows] for name, column in self.task.source.items()},
            self.config.batch_size,
            echo=echo,
            factor=factor,
            shuffle_buffer=shuffle_buffer,
            augment=self.task.augment,
            order="sequential",
            epochs=1,
            seed=seed,
        )
        for batch in loader:
            optimizer.zero_grad(set_to_none=True)
            total, weight = self.task.loss(model, batch)
            (total / weight).backward()
            optimizer.step()

    def loss(self, model: nn.Module) -> float:
        """Return the cross entropy on the validation split, which is infinite after divergence."""
        metrics = measure(self.task, model, "validation", torch.device("cpu"), self.config.precision)
        model.train()
        found = metrics["cross_entropy"]
        return found if math.isfinite(found) else math.inf

    def noise(self, model: nn.Module, rng: np.random.Generator) -> Noise:
        """Estimate the noise of this model's gradients from examples drawn with replacement."""
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
