"""Tasks and callbacks are found by name: ours, an installed entry point's, or the path of a module.

A task's module has a function ``build(config, options)`` and, where the task has options, a dataclass
``Options`` that extends ``TaskConfig``: its fields are the keys ``task.*``.
"""

import importlib
from dataclasses import dataclass, fields
from importlib import metadata
from importlib.util import find_spec
from inspect import get_annotations
from types import ModuleType
from typing import Any, ClassVar

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adaecho.errors import ConfigError

_MOST_HELD_OUT = 1_000


@dataclass(frozen=True)
class Size:
    """How much there is to train on.

    Attributes:
        examples: in the training files.
        units: what ``data.validation_examples`` holds out of: the examples themselves, or documents of them.
        has_validation: whether there is a validation split beside them.
        name: of the examples.
    """

    examples: int
    units: int
    has_validation: bool
    name: str = "images"

    @property
    def held_out(self) -> int | None:
        """Units to hold out: a fifth, at most 1,000; None where there is a validation split."""
        return None if self.has_validation else max(1, min(self.units // 5, _MOST_HELD_OUT))

    @property
    def training(self) -> int:
        """Examples that are left, in proportion."""
        return max(1, self.examples - self.examples * (self.held_out or 0) // self.units)


ENTRY_POINTS = "adaecho.tasks"


@dataclass
class TaskConfig:
    """Base class for the options ``task.*`` of a task."""

    name: str = MISSING  # of a module in adaecho/tasks/, an entry point of adaecho.tasks, or a module's path

    # Options that came after the task's first records. At their defaults, which mean what runs did before,
    # they are no part of a run's identity: so folders keep their names and searches their points.
    added: ClassVar[tuple[str, ...]] = ()
    module: ClassVar[str] = ""  # of adaecho/tasks/, where it isn't called as the task is

    @classmethod
    def size_of(cls, path: str, plain: dict[str, Any], max_bad_examples: int) -> Size:  # noqa: ARG003
        """How much data lies in ``data.path``, for ``scale=``; what a look shows to be wrong is an error.

        Args:
            path: what ``data.path`` names.
            plain: the keys ``task.*``, not checked yet.
            max_bad_examples: as ``data.max_bad_examples``.

        Raises:
            ConfigError: the task's data has no such measure.
            DataError: there is no such data, or no run could be trained on it.
        """
        raise ConfigError(
            f"scale: is of tasks imagenet, coco and small_text, not of {plain['name']}; drop scale="
        )


def find_task(name: str) -> ModuleType:
    """The module of a task.

    Args:
        name: of a module in ``adaecho/tasks/``, of an entry point in the group ``adaecho.tasks``, or the
            dotted path of a module that Python can import.

    Raises:
        ConfigError: there is none, or it has no ``build``.
    """
    if name in our_options():
        return importlib.import_module(f"{ENTRY_POINTS}.{our_options()[name].module or name}")
    path = module_path(name, ENTRY_POINTS)
    if path is None:
        raise ConfigError(
            f"task.name={name}: is none of {', '.join(task_names())}, no entry point of the group "
            f"{ENTRY_POINTS}, and no module that can be imported from here"
        )
    module = importlib.import_module(path)
    if not callable(getattr(module, "build", None)):
        raise ConfigError(f"task.name={name}: {module.__file__} has no function build(config, options)")
    return module


def task_names() -> list[str]:
    """The tasks of this package, and those of entry points."""
    return sorted({*our_options(), *metadata.entry_points(group=ENTRY_POINTS).names})


def options_class(name: str) -> type[TaskConfig]:
    """The dataclass of a task's options; those of this package's tasks without importing torch.

    Raises:
        ConfigError: there is no such task (see ``find_task``), or its options don't extend ``TaskConfig``.
    """
    if name in our_options():
        return our_options()[name]
    options = getattr(find_task(name), "Options", TaskConfig)
    if not (isinstance(options, type) and issubclass(options, TaskConfig)):
        raise ConfigError(f"task.name={name}: its Options must extend adaecho.config.tasks.TaskConfig")
    if get_annotations(options) and "__dataclass_fields__" not in vars(options):
        raise ConfigError(f"task.name={name}: its Options are no dataclass; write @dataclass above them")
    return options


def added_options(name: str) -> dict[str, Any]:
    """The options that came after a task's first records, with their defaults; see ``TaskConfig``."""
    options = our_options().get(name, TaskConfig)
    return {field.name: field.default for field in fields(options) if field.name in options.added}


def our_options() -> dict[str, type[TaskConfig]]:
    """The options of this package's tasks, by name; no torch is imported."""
    options: dict[str, type[TaskConfig]] = importlib.import_module(f"{ENTRY_POINTS}.options").OPTIONS
    return options


def check_options(plain: dict[str, Any]) -> TaskConfig:
    """A task's options from plain values, each of its own type.

    Raises:
        ConfigError: no such task, an option that it doesn't have, of another type or out of range.
    """
    name = plain.get("name") if isinstance(plain, dict) else None
    if not isinstance(name, str) or name == "???":
        raise ConfigError("task.name: is missing; choose a workload with task=")
    options = options_class(name)
    known = [field.name for field in fields(options) if field.name != "name"]
    for key in plain:
        if key not in ("name", *known):
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"task.{key}: task {name} has no such option; {has}")
    try:
        checked = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(options), plain))
    except OmegaConfBaseException as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError(f"task.{error.full_key or '*'}: {reason}") from error
    assert isinstance(checked, TaskConfig)
    return checked


# A callback's module has a function ``build(config, folder)``; see ``adaecho.training.callbacks``.
_CALLBACKS = "adaecho.callbacks"  # the group of entry points


def module_path(name: str, group: str) -> str | None:
    """The dotted path of the module that a name means: an entry point's, or its own; None for none."""
    for point in metadata.entry_points(group=group, name=name):
        return point.value
    try:
        return name if find_spec(name) is not None else None
    except (ImportError, ValueError):  # a parent that is absent or no package; an empty name
        return None


def callback_path(name: str) -> str:
    """The dotted path of a callback's module, which is not imported.

    Args:
        name: of an entry point in the group ``adaecho.callbacks``, or the module's own path.

    Raises:
        ConfigError: there is none.
    """
    path = module_path(name, _CALLBACKS)
    if path is None:
        raise ConfigError(
            f"callbacks=[{name}]: is no entry point of the group {_CALLBACKS}, and no module that can be "
            "imported from here"
        )
    return path
