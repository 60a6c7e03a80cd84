"""Modules that a config names: an installed entry point, or one that the user has typed.

Importing a module runs its code, and records may be anyone's: what only a record names is never imported.
"""

from collections.abc import Collection
from importlib import metadata
from importlib.util import find_spec
from typing import Any


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


def names_in(config: dict[str, Any]) -> list[str]:
    """What a plain config names that may be a module of somebody's own: its task and its callbacks."""
    task = config.get("task")
    return [*([str(task.get("name"))] if isinstance(task, dict) else []), *config.get("callbacks", ())]
