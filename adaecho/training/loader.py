"""The loader of a run: its task's examples behind the configured echo stage."""

import math
from typing import Any

import torch

from adaecho.config.schema import Config
from adaecho.echo import EchoLoader
from adaecho.errors import ConfigError
from adaecho.ranks import ALONE, Ranks
from adaecho.tasks.base import Task


def upstream_arguments(config: Config, task: Task, device: torch.device) -> dict[str, Any]:
    """The arguments of an ``EchoLoader`` that have nothing to do with echoing.

    Raises:
        ConfigError: ``echo.split`` of a task that doesn't name the parts of its augmentation.
    """
    if config.echo.split and task.augment_parts is None:
        raise ConfigError(
            f"echo.split=true: task {task.name} doesn't name two parts of its augmentation (digits, cifar10 "
            "and imagenet do); give its Task augment_parts, or drop echo.split"
        )
    return {
        "source": task.source,
        "batch_size": config.batch_size,
        "decode": task.decode,
        "augment": task.augment_parts if config.echo.split else task.augment,
        "collate": task.collate,
        "order": config.data.order,
        "place": config.echo.place,
        "num_workers": config.data.num_workers,
        "prefetch": config.data.prefetch,
        "processes": config.data.processes,
        "max_bad_examples": config.data.max_bad_examples,
        "device": None if device.type == "cpu" else device,
    }


def make_loader(config: Config, task: Task, device: torch.device, ranks: Ranks = ALONE) -> EchoLoader:
    """The task's training examples behind the configured echo stage, in batches on ``device``.

    Args:
        config: of one rank's share.
        task: the workload.
        device: of the batches.
        ranks: those that share the examples out; under ``echo.factor=auto`` they follow their mean R.

    Raises:
        ConfigError: the loader refuses a setting, e.g. a shuffle buffer beyond all memory; or see
            ``upstream_arguments``.
    """
    try:
        loader = EchoLoader(
            **upstream_arguments(config, task, device),
            echo=config.echo.variant,
            factor=config.echo.factor,
            shuffle_buffer=config.echo.shuffle_buffer,
            batch_shuffle_buffer=config.echo.batch_shuffle_buffer,
            seed=config.seed,
            max_factor=config.echo.max_factor,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not ranks.is_alone:
        loader.agree_on_R = lambda mine: _mean([one for (one,) in ranks.gather([mine or math.nan])])
    return loader


def _mean(ratios: list[float]) -> float | None:
    """The mean over ranks; None until all ranks know theirs."""
    mean = sum(ratios) / len(ratios)
    return None if math.isnan(mean) else mean
