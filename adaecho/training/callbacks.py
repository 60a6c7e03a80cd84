"""A user's callbacks, on rank 0: told of each evaluation and of a run's end. They see and change nothing.

What they are given is a copy, the clocks stand still meanwhile, and the global generators of random numbers
are put back.
"""

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from adaecho.config.schema import Config
from adaecho.config.tasks import callback_path
from adaecho.echo.threads.generators import global_generators_kept
from adaecho.errors import ConfigError, UserError, with_notes

HOOKS = ("on_evaluation", "on_end")


class Callbacks:
    """Those of one run, each made by the function ``build(config, folder)`` of the module of its name.

    They are called in the order of ``config.callbacks``. Whether a name may be a module of the user's own was
    decided when the config was checked.

    Args:
        config: the run.
        folder: of the run.
        device: the generator of which is put back too.

    Raises:
        ConfigError: a module has no ``build``, or what that returns has neither of ``HOOKS``.
        UserError: a module, or its ``build``, raised an error; so do the methods if a callback does.
    """

    def __init__(self, config: Config, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._built = [(name, self._build(name, config)) for name in config.callbacks]

    def __bool__(self) -> bool:
        return bool(self._built)

    def on_evaluation(self, line: dict[str, Any]) -> None:
        """Tell of an evaluation: a line of metrics.jsonl."""
        metrics = {key: value for key, value in line.items() if key not in ("fresh_examples", "steps")}
        self._call("on_evaluation", metrics, line["fresh_examples"], line["steps"])

    def on_end(self, summary: dict[str, Any]) -> None:
        """Tell of the end: the last summary.json."""
        self._call("on_end", summary)

    def _build(self, name: str, config: Config) -> Any:
        with self._about(name):
            module = importlib.import_module(callback_path(name, [name]))
        if not callable(getattr(module, "build", None)):
            raise ConfigError(f"callbacks=[{name}]: {module.__file__} has no function build(config, folder)")
        with self._about(f"build of {name}"):
            built = module.build(copy.deepcopy(config), self._folder)
        if not any(callable(getattr(built, hook, None)) for hook in HOOKS):
            raise ConfigError(
                f"callbacks=[{name}]: its build returned {type(built).__name__}, which has neither of the "
                f"methods {' and '.join(HOOKS)}"
            )
        return built

    def _call(self, hook: str, *told: Any) -> None:
        for name, callback in self._built:
            if hasattr(callback, hook):
                with self._about(f"{hook} of {name}"):
                    getattr(callback, hook)(*copy.deepcopy(told))

    @contextmanager
    def _about(self, what: str) -> Iterator[None]:
        """Name whose an error inside is, and put back what draws inside have moved."""
        cuda = [self._device] if self._device.type == "cuda" else []
        try:
            with global_generators_kept(), torch.random.fork_rng(cuda):
                yield
        except Exception as error:
            raise UserError(
                f"callbacks: {what} raised {type(error).__name__}: {with_notes(error)}. Its traceback is in "
                f"{self._folder / 'traceback.txt'}; mend it or leave it out, and the same command continues"
            ) from error
