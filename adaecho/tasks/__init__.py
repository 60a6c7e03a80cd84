"""Tasks: the workloads that can be trained. ``docs/your-own.md`` shows how to add your own task."""

from dataclasses import replace
from typing import TYPE_CHECKING

from adaecho.config.schema import Config
from adaecho.config.tasks import find_task
from adaecho.errors import ConfigError

if TYPE_CHECKING:
    from adaecho.tasks.base import Task


def build_task(config: Config) -> "Task":
    """Build the configured task, and open its training and validation data.

    Raises:
        ConfigError: there is no such task, or the task does not report the metric ``target.metric``.
        DataError: the data cannot be used.
    """
    from adaecho.datasets.storage import digest_of_files

    name = config.task.name
    task: Task = find_task(name).build(config, config.task)
    if not hasattr(task, "metrics"):
        raise ConfigError(f"task.name={name}: build returned a {type(task).__name__}, expected a Task")
    if config.target.metric not in task.metrics:
        raise ConfigError(
            f"target.metric={config.target.metric}: task {name} reports {', '.join(task.metrics)}; choose one"
        )
    files = digest_of_files(task.files)
    return replace(task, fingerprint={**task.fingerprint, **files}, facts={**task.facts, **files})
