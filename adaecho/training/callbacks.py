"""A user's callbacks, on rank 0: told of each evaluation and of a run's end.

The clocks stand still meanwhile, and the global generators of random numbers are put back.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from adaecho.config.schema import Config
from adaecho.config.tasks import callback_path
from adaecho.errors import ConfigError, UserError, with_notes
from adaecho.training import draws

HOOKS = ("on_evaluation", "on_end")


class Callbacks:
    """Those of one run, each made by the function ``build(config, folder)`` of the module of its name.

    They are called in the order of ``config.callbacks``.

    Args:
        config: the run.
        folder: of the run.
        device: the generator of which is put back too.

    Raises:
        ConfigError: what a module's ``build`` returns has neither of ``HOOKS``.
        UserError: a module, or its ``build``, raised an error; so do the methods if a callback does.
    """

    def __init__(self, config: Config, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._built: list[tuple[str, Any]] = []
        for name in config.callbacks:
            with self._about(f"build of {name}"):
                built = importlib.import_module(callback_path(name)).build(config, folder)
            if not any(hasattr(built, hook) for hook in HOOKS):
                raise ConfigError(f"callbacks=[{name}]: its build returned none of {' and '.join(HOOKS)}")
            self._built.append((name, built))

    def __bool__(self) -> bool:
        return bool(self._built)

    def on_evaluation(self, line: dict[str, Any]) -> None:
        """Tell of an evaluation: a line of metrics.jsonl."""
        counts = ("fresh_examples", "steps")
        metrics = {key: value for key, value in line.items() if key not in counts}
        self._call("on_evaluation", metrics, *(line[key] for key in counts))

    def on_end(self, summary: dict[str, Any]) -> None:
        """Tell of the end: the last summary.json."""
        self._call("on_end", dict(summary))

    def _call(self, hook: str, *told: Any) -> None:
        for name, callback in self._built:
            if hasattr(callback, hook):
                with self._about(f"{hook} of {name}"):
                    getattr(callback, hook)(*told)

    @contextmanager
    def _about(self, what: str) -> Iterator[None]:
        try:
            with draws.kept(self._device):
                yield
        except Exception as error:
            raise UserError(
                f"callbacks: {what} raised {type(error).__name__}: {with_notes(error)}. Its traceback is in "
                f"{self._folder / 'traceback.txt'}; mend it or leave it out, and the same command continues"
            ) from error
