"""Distributed training steps, in which each rank (process) trains on a part of every batch."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adaecho.config.schema import Config
from adaecho.errors import ConfigError
from adaecho.ranks import DistributedContext
from adaecho.tasks.base import Batch, LossAndWeight, Task
from adaecho.training.device import autocast


def share_of(config: Config, world_size: int) -> Config:
    """Return the config of one rank, with its share of the batch size and of the shuffle buffer."""
    if world_size == 1:
        return config
    passes = num_passes(config)
    if config.batch_size % (world_size * passes):
        raise ConfigError(
            f"batch_size={config.batch_size}: cannot be split evenly over {world_size} ranks with {passes} "
            f"micro-batches each; use a multiple of {world_size * passes}"
        )
    echo = replace(config.echo, shuffle_buffer=-(-config.echo.shuffle_buffer // world_size))
    return replace(config, batch_size=config.batch_size // world_size, echo=echo)


def num_passes(config: Config) -> int:
    """Return the number of micro-batches that one rank processes in a step."""
    return config.adascale.num_gradients_to_accumulate if config.adascale.enabled else 1


def synchronized(model: nn.Module, ranks: DistributedContext, device: torch.device) -> nn.Module:
    """Wrap the model so that its gradients, but not its buffers, are averaged over ranks."""
    if ranks.is_alone:
        return model
    gpus = [device.index] if device.type == "cuda" else None
    # torch 2.14 renamed this argument of DistributedDataParallel, and warns about the old name.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    # A task's loss always uses the model in the same way, so the graph is static.
    return DistributedDataParallel(model, gpus, static_graph=True, gradient_as_bucket_view=True, **options)


class MeanLoss:
    """The mean loss of a step over all micro-batches of all ranks, with its gradient."""

    def __init__(
        self, task: Task, model: nn.Module, ranks: DistributedContext, device: torch.device, precision: str
    ) -> None:
        self._task, self._ranks, self._device, self._precision = task, ranks, device, precision
        self._model = synchronized(model, ranks, device)

    def backward(self, micro_batches: list[Batch]) -> torch.Tensor:
        """Compute the gradient of the weighted mean loss over all micro-batches of all ranks.

        A weight is, for example, the number of unmasked tokens in a micro-batch.

        Returns:
            This rank's part of the mean loss. The parts of all ranks add up to the mean loss.
        """
        weight = self._task.weight
        if weight is None:
            losses = [self._loss(one) for one in micro_batches]
            total = self._total([weight for _, weight in losses])
            shares = [self._share(loss, total) for loss, _ in losses]
        else:
            total = self._total([weight(one) for one in micro_batches])
            shares = []
            for number, one in enumerate(micro_batches, start=1):
                # no_sync() must contain the forward pass too.
                with self._synchronizing(number == len(micro_batches)):
                    shares.append(self._share(self._loss(one)[0], total))
        return sum(shares[1:], shares[0])

    def _total(self, weights: list[torch.Tensor | float]) -> torch.Tensor | float:
        """Return the total weight of all micro-batches of all ranks."""
        total = sum(weights[1:], weights[0])
        # A plain number is a count of examples, which is the same on every rank.
        return self._ranks.sum(total) if isinstance(total, torch.Tensor) else total * self._ranks.world_size

    def _synchronizing(self, last: bool) -> AbstractContextManager[object]:
        """Return a context that averages gradients over ranks only after the last micro-batch."""
        if last or not isinstance(self._model, DistributedDataParallel):
            return nullcontext()
        return self._model.no_sync()

    def _loss(self, micro_batch: Batch) -> LossAndWeight:
        with autocast(self._device, self._precision):
            return self._task.loss(self._model, micro_batch)

    def _share(self, loss: torch.Tensor, total: torch.Tensor | float) -> torch.Tensor:
        """Divide a micro-batch's loss by the total weight, add its gradient, and return the quotient."""
        share = loss / total
        # The shares of all ranks must be summed, but DistributedDataParallel averages gradients over ranks.
        scaled = share if self._ranks.is_alone else share * self._ranks.world_size
        scaled.backward()  # type: ignore[no-untyped-call]
        return share.detach()


@torch.no_grad()
def average_statistics(model: nn.Module, ranks: DistributedContext) -> None:
    """Average the running means and variances of batch norm over all ranks."""
    found = [
        getattr(module, name, None) for module in model.modules() for name in ("running_mean", "running_var")
    ]
    statistics = [statistic for statistic in found if isinstance(statistic, torch.Tensor)]
    if ranks.is_alone or not statistics:
        return
    # The mean variance is too small, because it ignores differences between the means of the ranks.
    total = ranks.sum(torch.cat([statistic.reshape(-1) for statistic in statistics])) / ranks.world_size
    parts = torch.split(total, [statistic.numel() for statistic in statistics])
    for statistic, part in zip(statistics, parts, strict=True):
        statistic.copy_(part.view_as(statistic))
