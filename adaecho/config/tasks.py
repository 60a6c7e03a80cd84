"""Find tasks and callbacks by name.

A name can be a built-in task, an entry point, or the dotted path of a module. A task module defines
``build(config, options)`` and, optionally, a dataclass ``Options`` for the config keys ``task.*``.
"""

import importlib
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adaecho.errors import ConfigError


class Size(NamedTuple):
    """The size of a dataset."""

    examples: int  # number of training examples; for text, an estimated number of blocks of tokens
    units: int  # number of documents or images, some of which may be held out for validation
    has_validation: bool  # whether the data has its own validation split


ENTRY_POINTS = "adaecho.tasks"


@dataclass
class TaskConfig:
    """Base class for the options ``task.*`` of a task."""

    name: str = MISSING  # a built-in task, an entry point of the group adaecho.tasks, or a module path

    # Options that were added after the first results of the task were recorded. At their defaults, they are
    # left out of a run's identity, so that existing run folders keep their names and existing searches keep
    # their points.
    added: ClassVar[tuple[str, ...]] = ()
    # The name of the module in adaecho/tasks/; empty if it equals the name of the task.
    module: ClassVar[str] = ""

    @classmethod
    def size_of(cls, path: str, plain: dict[str, Any], max_bad_examples: int) -> Size:  # noqa: ARG003
        """Return the size of the dataset. With ``scale=``, settings such as the batch size depend on it.

        Args:
            path: the value of ``data.path``.
            plain: the options of the task, which have not been checked yet.
            max_bad_examples: the value of ``data.max_bad_examples``.

        Raises:
            ConfigError: the task does not support ``scale=``.
            DataError: the data is missing or cannot be used for training.
        """
        raise ConfigError(
            f"scale: task {plain['name']} does not support it (only imagenet, coco and small_text do)"
        )


def find_task(name: str) -> ModuleType:
    """Import the module of a task, given its name, its entry point or its dotted path."""
    if name in our_options():
        return importlib.import_module(f"{ENTRY_POINTS}.{our_options()[name].module or name}")
    path = module_path(name, ENTRY_POINTS, f"task.name={name}: expected one of {', '.join(our_options())}")
    module = importlib.import_module(path)
    if not callable(getattr(module, "build", None)):
        raise ConfigError(f"task.name={name}: {module.__file__} has no function build(config, options)")
    return module


def options_class(name: str) -> type[TaskConfig]:
    """Return the dataclass of a task's options."""
    # Importing the module of a built-in task would import torch, which takes seconds.
    if name in our_options():
        return our_options()[name]
    options = getattr(find_task(name), "Options", TaskConfig)
    if not (isinstance(options, type) and issubclass(options, TaskConfig)):
        raise ConfigError(f"task.name={name}: its Options must extend adaecho.config.tasks.TaskConfig")
    return options


def added_options(name: str) -> dict[str, Any]:
    """Return the options that a task lists in ``TaskConfig.added``, with their default values."""
    options = our_options().get(name, TaskConfig)
    return {field.name: field.default for field in fields(options) if field.name in options.added}


def our_options() -> dict[str, type[TaskConfig]]:
    """Return the options class of each built-in task, by task name."""
    # The module of options does not import torch.
    options: dict[str, type[TaskConfig]] = importlib.import_module(f"{ENTRY_POINTS}.options").OPTIONS
    return options


def check_options(plain: dict[str, Any]) -> TaskConfig:
    """Build the typed options of a task from plain values, and check them."""
    name = plain.get("name") if isinstance(plain, dict) else None
    if not isinstance(name, str) or name == "???":
        raise ConfigError("task.name: missing; set one, for example task=digits")
    options = options_class(name)
    try:
        checked = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(options), plain))
    except OmegaConfBaseException as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        known = ", ".join(field.name for field in fields(options))
        raise ConfigError(f"task.{error.full_key or '*'}: {reason}; options of {name}: {known}") from error
    assert isinstance(checked, TaskConfig)
    return checked


def module_path(name: str, group: str, message_start: str) -> str:
    """Find a module by its dotted path or an entry point's name, and return its path."""
    # group is the group of the entry points. message_start begins the error message if there is no module.
    for point in metadata.entry_points(group=group, name=name):
        return point.value
    with suppress(ImportError, ValueError):  # the parent is missing or not a package, or the name is empty
        if find_spec(name) is not None:
            return name
    raise ConfigError(f"{message_start}, an entry point of the group {group}, or an importable module")


def callback_path(name: str) -> str:
    """Return the dotted path of a callback's module, given that path or the name of an entry point."""
    return module_path(name, "adaecho.callbacks", f"callbacks=[{name}]: expected the name of a callback")
