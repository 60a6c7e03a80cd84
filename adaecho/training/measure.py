"""A model on its device, and its metrics on a whole split: while a run trains, and of its saved weights."""

from inspect import signature

import torch
from torch import nn

from adaecho.config.schema import Config
from adaecho.ranks import ALONE, Ranks
from adaecho.tasks.base import Split, Task
from adaecho.training.device import autocast


def place(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """The model on its device, in the memory format and compiled as the config says."""
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if config.compile != "off":
        model.compile(mode=None if config.compile == "default" else config.compile)
    return model


def measure(
    task: Task, model: nn.Module, split: Split, device: torch.device, precision: str, ranks: Ranks = ALONE
) -> dict[str, float]:
    """A model's metrics on a split; rank 0's on every rank. The model is left in eval mode."""
    model.eval()
    shared = {"ranks": ranks} if "ranks" in signature(task.evaluate).parameters else {}
    with autocast(device, precision), torch.inference_mode():
        metrics = task.evaluate(model, split, device=device, **shared)
    return ranks.from_first(lambda: metrics)
