"""Tasks and callbacks are found by name: ours, an installed entry point's, or the path of a module.

A module's path counts only where the user has typed it: importing runs its code, and records may be
anyone's.

A task's module has a function ``build(config, options)`` and, where the task has options, a dataclass
``Options`` that extends ``TaskConfig``: its fields are the keys ``task.*``.
"""

import importlib
from collections.abc import Collection
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
    """Which workload, and in subclasses its own options; the keys ``task.*``."""

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


def find_task(name: str, typed: Collection[str] = ()) -> ModuleType:
    """The module of a task.

    Args:
        name: of a module in ``adaecho/tasks/``, of an entry point in the group ``adaecho.tasks``, or one of
            ``typed``.
        typed: the names that the user has typed: any of them may be the dotted path of a module that Python
            can import.

    Raises:
        ConfigError: there is none, it was not typed, or it has no ``build``.
    """
    module = _import(name, typed)
    if module is None:
        neither = f"is none of {', '.join(task_names())}, no entry point of the group {ENTRY_POINTS}"
        flag = f"--task {name} (of adaecho.evaluate: task.name={name})"
        raise _not_found(f"task.name={name}: {neither}", name in typed, flag)
    if not callable(getattr(module, "build", None)):
        raise ConfigError(f"task.name={name}: {module.__file__} has no function build(config, options)")
    return module


def _import(name: str, typed: Collection[str]) -> ModuleType | None:
    if name in our_options():
        return importlib.import_module(f"{ENTRY_POINTS}.{our_options()[name].module or name}")
    path = module_path(name, ENTRY_POINTS, typed)
    return None if path is None else importlib.import_module(path)


def task_names() -> list[str]:
    """The tasks of this package, and those of entry points."""
    return sorted({*our_options(), *metadata.entry_points(group=ENTRY_POINTS).names})


def options_class(name: str, typed: Collection[str] = ()) -> type[TaskConfig]:
    """The dataclass of a task's options; those of this package's tasks without importing torch.

    Raises:
        ConfigError: there is no such task (see ``find_task``), or its options don't extend ``TaskConfig``.
    """
    if name in our_options():
        return our_options()[name]
    options = getattr(find_task(name, typed), "Options", TaskConfig)
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


def check_options(plain: dict[str, Any], typed: Collection[str] = ()) -> TaskConfig:
    """A task's options from plain values, each of its own type; see ``find_task`` for ``typed``.

    Raises:
        ConfigError: no such task, an option that it doesn't have, of another type or out of range.
    """
    name = plain.get("name") if isinstance(plain, dict) else None
    if not isinstance(name, str) or name == "???":
        raise ConfigError("task.name: is missing; choose a workload with task=")
    options = options_class(name, typed)
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


def module_path(name: str, group: str, typed: Collection[str]) -> str | None:
    """The dotted path of the module that a name means; None where there is none, or a record may not name it.

    Args:
        name: of an entry point, or one of ``typed``.
        group: of entry points.
        typed: the names that the user has typed: any of them may be a module's own path.
    """
    for point in metadata.entry_points(group=group, name=name):
        return point.value
    if name not in typed:
        return None
    try:
        found = find_spec(name)
    except (ImportError, ValueError):  # a parent that is absent or no package; an empty name
        return None
    return None if found is None else name


def callback_path(name: str, typed: Collection[str] = ()) -> str:
    """The dotted path of a callback's module, which is not imported.

    Args:
        name: of an entry point in the group ``adaecho.callbacks``, or one of ``typed``.
        typed: see ``module_path``.

    Raises:
        ConfigError: there is none, or it was not typed.
    """
    path = module_path(name, _CALLBACKS, typed)
    if path is None:
        what = f"callbacks=[{name}]: is no entry point of the group {_CALLBACKS}"
        raise _not_found(what, name in typed, f"--callback {name}")
    return path


def _not_found(what: str, is_typed: bool, flag: str) -> ConfigError:
    if is_typed:
        return ConfigError(f"{what}, and no module that can be imported from here")
    return ConfigError(
        f"{what}; a record can name no other, as the code of whoever wrote it would run. If that module is "
        f"yours, name it in the command: {flag}"
    )


def names_in(config: dict[str, Any]) -> list[str]:
    """What a plain config names that may be a module of somebody's own: its task and its callbacks."""
    task = config.get("task")
    return [*([str(task.get("name"))] if isinstance(task, dict) else []), *config.get("callbacks", ())]
