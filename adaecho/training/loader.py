"""The loader of a run: its task's examples behind the configured echo stage."""

import math
from typing import Any

import torch

from adaecho.config.schema import Config
from adaecho.echo import EchoLoader
from adaecho.echo.memory.budget import check_slots
from adaecho.errors import ConfigError
from adaecho.ranks import ALONE, Ranks
from adaecho.tasks.base import Task

_LEAST_BYTES = 256  # of an example in a batch: the smallest image here, of 8x8 floats


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
        ConfigError: the loader refuses a setting, e.g. a shuffle buffer beyond all memory, or a batch is; or
            see ``upstream_arguments``.
    """
    try:
        check_slots(config.batch_size, _LEAST_BYTES, "batch_size")
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
    _check_budget(config, loader)
    if not ranks.is_alone:
        loader.agree_on_R = lambda mine: _mean([one for (one,) in ranks.gather([mine or math.nan])])
    return loader


def _check_budget(config: Config, loader: EchoLoader) -> None:
    """Raises ConfigError where filling a buffer, or one batch, alone would read more than the run may."""
    most, settings = config.max_fresh_examples, loader.settings
    of_batch = config.batch_size / (settings.first_factor if settings.variant.repeats == "examples" else 1)
    first = {f"echo.{name}": examples for name, examples in settings.to_fill.items()}
    for key, examples in {**first, "batch_size": of_batch}.items():
        needed = math.floor(examples) * settings.world_size
        if most is not None and needed > most:
            loader.close()
            raise ConfigError(
                f"max_fresh_examples={most}: {key}={getattr(settings, key.removeprefix('echo.'))} fills "
                f"first, with about {needed} fresh examples; allow more, or make {key} smaller"
            )


def _mean(ratios: list[float]) -> float | None:
    """The mean over ranks; None until all ranks know theirs."""
    mean = sum(ratios) / len(ratios)
    return None if math.isnan(mean) else mean
