"""Call the user's callbacks on rank 0, at each evaluation and at the end of a run."""

from importlib import import_module
from pathlib import Path
from typing import Any

from adaecho.config.schema import Config
from adaecho.config.tasks import callback_path
from adaecho.errors import ConfigError

HOOKS = ("on_evaluation", "on_end")


class Callbacks:
    """The callbacks of one run, in the order of ``config.callbacks``.

    Each entry names a module with a function ``build(config, folder)`` that returns the callback. An error in
    a callback ends the run. A callback must not use the global random generators.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self._callbacks = []
        for name in config.callbacks:
            callback = import_module(callback_path(name)).build(config, folder)
            if not any(hasattr(callback, hook) for hook in HOOKS):
                raise ConfigError(
                    f"callbacks=[{name}]: build must return an object with {' or '.join(HOOKS)}"
                )
            self._callbacks.append(callback)

    def on_evaluation(self, line: dict[str, Any]) -> None:
        """Call ``on_evaluation(metrics, fresh_examples, steps)`` of each callback.

        Args:
            line: a line of metrics.jsonl.
        """
        metrics = {key: value for key, value in line.items() if key not in ("fresh_examples", "steps")}
        self._call("on_evaluation", metrics, line["fresh_examples"], line["steps"])

    def on_end(self, summary: dict[str, Any]) -> None:
        """Call ``on_end(summary)`` of each callback with the final summary."""
        self._call("on_end", dict(summary))

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook, lambda *_: None)(*arguments)
