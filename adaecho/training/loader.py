"""Build the data loader of a run, which reads the examples of a task and repeats (echoes) them."""

import math
from typing import Any

import torch

from adaecho.config.schema import Config
from adaecho.echo import EchoLoader
from adaecho.errors import ConfigError
from adaecho.ranks import SINGLE_PROCESS, DistributedContext
from adaecho.tasks.base import Task

# These config keys have the same names as the arguments of EchoLoader.
_DATA_KEYS = ("order", "num_workers", "prefetch", "processes", "max_bad_examples")
_ECHO_KEYS = ("factor", "shuffle_buffer", "batch_shuffle_buffer", "max_factor")


def upstream_arguments(config: Config, task: Task, device: torch.device) -> dict[str, Any]:
    """Return the arguments of ``EchoLoader`` for reading, augmenting and batching, but not for echoing."""
    if config.echo.split_augmentation and task.augment_parts is None:
        raise ConfigError(
            f"echo.split_augmentation=true: task {task.name} has no augment_parts; use digits, cifar10 or "
            "imagenet, add augment_parts to your Task, or remove echo.split_augmentation"
        )
    return {
        "source": task.source,
        "batch_size": config.batch_size,
        "decode": task.decode,
        "augment": task.augment_parts if config.echo.split_augmentation else task.augment,
        "collate": task.collate,
        "buffer_format": config.echo.buffer_format,
        **{key: getattr(config.data, key) for key in _DATA_KEYS},
        "device": None if device.type == "cpu" else device,
    }


def make_loader(
    config: Config, task: Task, device: torch.device, ranks: DistributedContext = SINGLE_PROCESS
) -> EchoLoader:
    """Build the data loader of one rank, from the config that ``share_of`` returns for this rank."""
    try:
        loader = EchoLoader(
            **upstream_arguments(config, task, device),
            echo=config.echo.variant,
            **{key: getattr(config.echo, key) for key in _ECHO_KEYS},
            seed=config.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not ranks.is_alone:
        # With echo.factor=auto, all ranks use the same mean R, so they choose the same echoing factor.
        loader.sync_R = lambda mine: _mean([one for (one,) in ranks.gather([mine or math.nan])])
    return loader


def _mean(ratios: list[float]) -> float | None:
    """Return the mean over ranks, or None until all ranks have measured their ratio."""
    mean = sum(ratios) / len(ratios)
    return None if math.isnan(mean) else mean
