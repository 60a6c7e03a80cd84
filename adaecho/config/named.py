"""Modules that a config names: an installed entry point, or one that the user has typed.

Importing a module runs its code, and records may be anyone's: what only a record names is never imported.
"""

from collections.abc import Collection
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from adaecho.errors import ConfigError

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
    if path is not None:
        return path
    if name in typed:
        raise ConfigError(
            f"callbacks=[{name}]: is no entry point of the group {_CALLBACKS}, and no module that can be "
            "imported from here"
        )
    raise ConfigError(
        f"callbacks=[{name}]: is no entry point of the group {_CALLBACKS}; a record can name no other, as "
        f"the code of whoever wrote it would run. If that module is yours, name it in the command: "
        f"--callback {name}"
    )


def names_in(config: dict[str, Any]) -> list[str]:
    """What a plain config names that may be a module of somebody's own: its task and its callbacks."""
    task = config.get("task")
    return [*([str(task.get("name"))] if isinstance(task, dict) else []), *config.get("callbacks", ())]
