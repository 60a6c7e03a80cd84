"""A run on one rank or several: each one's share of a batch, the gradient of all, and what they average."""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adaecho.config.schema import Config
from adaecho.errors import ConfigError
from adaecho.ranks import Ranks
from adaecho.tasks.base import Batch, LossAndWeight, Task
from adaecho.training import draws
from adaecho.training.device import autocast


def share_of(config: Config, world_size: int) -> Config:
    """The config of one rank's loader and model: its part of every batch and of the shuffle buffer.

    ``batch_size`` and ``echo.shuffle_buffer`` are of the whole run, so that one config means the same
    training for any number of ranks.

    Raises:
        ConfigError: batches can't be dealt evenly.
    """
    if world_size == 1:
        return config
    passes = num_passes(config)
    if config.batch_size % (world_size * passes):
        parts = f" times {passes} micro-batches each" if passes > 1 else ""
        raise ConfigError(
            f"batch_size={config.batch_size}: is of the whole step and can't be dealt evenly to {world_size} "
            f"ranks{parts}; make it a multiple of {world_size * passes}"
        )
    echo = replace(config.echo, shuffle_buffer=-(-config.echo.shuffle_buffer // world_size))
    return replace(config, batch_size=config.batch_size // world_size, echo=echo)


def num_passes(config: Config) -> int:
    """Micro-batches of one rank's part of a step."""
    return config.adascale.num_gradients_to_accumulate if config.adascale.enabled else 1


def synchronised(model: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
    """The model with its gradients averaged over ranks, beside the backward pass that makes them.

    The graph is static (every task's loss takes one way through its model), gradients are views of the
    buckets that are reduced, and buffers are left to ``average_statistics``.
    """
    if ranks.is_alone:
        return model
    # torch 2.14 renamed the argument; under the old name it warns.
    parameters = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    options: dict[str, Any] = {name: False}
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        static_graph=True,
        gradient_as_bucket_view=True,
        **options,
    )


class MeanLoss:
    """A task's mean loss over all micro-batches of all ranks.

    Args:
        task: whose loss.
        model: of this rank.
        ranks, device, precision: of the run.
    """

    def __init__(
        self, task: Task, model: nn.Module, ranks: Ranks, device: torch.device, precision: str
    ) -> None:
        self._task, self._ranks, self._device, self._precision = task, ranks, device, precision
        self._model = synchronised(model, ranks, device)

    def backward(self, micro_batches: list[Batch]) -> torch.Tensor:
        """Leave its gradient; this rank's share of it.

        Each micro-batch's share is its sum over the weight of all of them, so that it doesn't matter how
        unevenly masked tokens or boxes were dealt.
        """
        weight = self._task.weight
        if weight is not None:
            total = self._total(list(map(weight, micro_batches)))
            shares = []
            for number, one in enumerate(micro_batches, start=1):
                with self._synchronising(number == len(micro_batches)):  # around both directions
                    shares.append(self._share(self._loss(one)[0], total))
        else:
            losses = [self._loss(one) for one in micro_batches]
            total = self._total([weight for _, weight in losses])
            shares = [self._share(loss, total) for loss, _ in losses]
        return sum(shares[1:], shares[0])

    def _total(self, weights: list[torch.Tensor | float]) -> torch.Tensor | float:
        """The weights of all micro-batches of all ranks."""
        total = sum(weights[1:], weights[0])
        # A plain number counts examples, of which every rank has as many.
        return self._ranks.sum(total) if isinstance(total, torch.Tensor) else total * self._ranks.world_size

    def _synchronising(self, last: bool) -> AbstractContextManager[object]:
        """Let gradients add up on this rank alone until the last micro-batch."""
        if last or not isinstance(self._model, DistributedDataParallel):
            return nullcontext()
        return self._model.no_sync()

    def _loss(self, micro_batch: Batch) -> LossAndWeight:
        with autocast(self._device, self._precision):
            return self._task.loss(self._model, micro_batch)

    def _share(self, loss: torch.Tensor, total: torch.Tensor | float) -> torch.Tensor:
        """Add the gradient of one micro-batch's loss over the total weight."""
        share = loss / total
        # The shares of all ranks are to be added up, and their gradients are averaged.
        scaled = share if self._ranks.is_alone else share * self._ranks.world_size
        scaled.backward()  # type: ignore[no-untyped-call]
        return share.detach()


@torch.no_grad()
def average_statistics(model: nn.Module, ranks: Ranks) -> None:
    """Replace batch norm's running means and variances by their averages over ranks, before an evaluation.

    In between each rank's follow its own share of the data; for variances the average leaves out how far the
    means are apart.
    """
    if ranks.is_alone:
        return
    statistics = [
        statistic
        for module in model.modules()
        for statistic in (getattr(module, "running_mean", None), getattr(module, "running_var", None))
        if isinstance(statistic, torch.Tensor)
    ]
    if not statistics:
        return
    total = ranks.sum(torch.cat([statistic.reshape(-1) for statistic in statistics])) / ranks.world_size
    parts = torch.split(total, [statistic.numel() for statistic in statistics])
    for statistic, part in zip(statistics, parts, strict=True):
        statistic.copy_(part.view_as(statistic))


@contextmanager
def undone(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Whatever a pass through the model inside draws or counts is taken back after it."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with draws.kept(device):
        yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
