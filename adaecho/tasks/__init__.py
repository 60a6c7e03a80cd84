"""One file per workload."""

from importlib import import_module
from typing import TYPE_CHECKING

from adaecho.config.schema import Config
from adaecho.errors import ConfigError

if TYPE_CHECKING:
    from adaecho.tasks.base import Task

# Modules of this package with build(config) -> Task, imported when asked for: they import torch.
TASKS = ("digits", "digits_mlp", "cifar10")


def build_task(config: Config) -> "Task":
    """The workload that ``config.task.name`` names, its training and validation data read.

    Raises:
        ConfigError: there is no such task, or it does not report ``target.metric``.
        DataError: the data is missing, empty, of the wrong schema or corrupt.
    """
    name = config.task.name
    if name not in TASKS:
        raise ConfigError(f"task.name={name}: must be one of {', '.join(TASKS)}")
    task: Task = import_module(f"{__name__}.{name}").build(config)
    if config.target.metric not in task.metrics:
        raise ConfigError(
            f"target.metric={config.target.metric}: task {name} reports {', '.join(task.metrics)}; choose one"
        )
    return task
