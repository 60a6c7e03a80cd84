"""The loader of a run: its task's examples behind the configured echo stage."""

from typing import Any

import torch

from adaecho.config.schema import Config
from adaecho.echo import EchoLoader
from adaecho.errors import ConfigError
from adaecho.tasks.base import Task


def upstream_arguments(config: Config, task: Task, device: torch.device) -> dict[str, Any]:
    """The arguments of an ``EchoLoader`` that have nothing to do with echoing."""
    return {
        "source": task.source,
        "batch_size": config.batch_size,
        "decode": task.decode,
        "augment": task.augment,
        "collate": task.collate,
        "order": config.data.order,
        "restore": config.data.restore,
        "place": config.echo.place,
        "num_workers": config.data.num_workers,
        "prefetch": config.data.prefetch,
        "max_bad_examples": config.data.max_bad_examples,
        "device": None if device.type == "cpu" else device,
    }


def make_loader(config: Config, task: Task, device: torch.device) -> EchoLoader:
    """The task's training examples behind the configured echo stage, in batches on ``device``.

    Raises:
        ConfigError: the loader refuses a setting, e.g. a shuffle buffer beyond all memory.
    """
    try:
        return EchoLoader(
            **upstream_arguments(config, task, device),
            echo=config.echo.variant,
            factor=config.echo.factor,
            shuffle_buffer=config.echo.shuffle_buffer,
            batch_shuffle_buffer=config.echo.batch_shuffle_buffer,
            seed=config.seed,
            max_factor=config.echo.max_factor,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
