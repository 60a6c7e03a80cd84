"""Callbacks are found as tasks are: by the name of an entry point, or by a module's path that was typed.

A callback's module has a function ``build(config, folder)``; see ``adaecho.training.callbacks``.
"""

from collections.abc import Collection

from adaecho.config.named import module_path
from adaecho.errors import ConfigError

ENTRY_POINTS = "adaecho.callbacks"


def callback_path(name: str, typed: Collection[str] = ()) -> str:
    """The dotted path of a callback's module, which is not imported.

    Args:
        name: of an entry point in the group ``adaecho.callbacks``, or one of ``typed``.
        typed: see ``adaecho.config.named.module_path``.

    Raises:
        ConfigError: there is none, or it was not typed.
    """
    path = module_path(name, ENTRY_POINTS, typed)
    if path is not None:
        return path
    if name in typed:
        raise ConfigError(
            f"callbacks=[{name}]: is no entry point of the group {ENTRY_POINTS}, and no module that can be "
            "imported from here"
        )
    raise ConfigError(
        f"callbacks=[{name}]: is no entry point of the group {ENTRY_POINTS}; a record can name no other, as "
        f"the code of whoever wrote it would run. If that module is yours, name it in the command: "
        f"--callback {name}"
    )
