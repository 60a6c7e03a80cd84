"""What a run shows while it trains: a bar on a terminal, elsewhere a line now and then."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from adaecho.config.schema import Config
from adaecho.records.table import as_clock
from adaecho.training.trainer import Trainer

_REDRAW_S = 0.5
# Lines come ever more rarely: a short run has few, a long one is followed from its first seconds.
_FIRST_LINE_S, _LONGEST_PAUSE_S = 5.0, 60.0
_MANY_TO_FILL = 10_000  # fresh examples before the first step that may take long enough to be told of


class Display:
    """Follows one run; asks nothing of the device, so that it costs the run nothing.

    Args:
        config: the run.
        console: where to; a terminal gets the bar.
    """

    def __init__(self, config: Config, console: Console | None = None) -> None:
        self._config = config
        self._console = console or Console(soft_wrap=True, highlight=False)
        self._bar = Progress(
            BarColumn(bar_width=None), TextColumn("{task.description}"), console=self._console,
            auto_refresh=False, transient=True, expand=True, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._measured = ""
        self._pause_s = _FIRST_LINE_S
        self._begin_s = self._redraw_at = self._line_at = 0.0
        self._paced_from: tuple[float, float] | None = (
            None  # when the first step was done, and what share then
        )

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self._console.print(text, soft_wrap=True, markup=False)

    @contextmanager
    def showing(self, trainer: Trainer) -> Iterator[None]:
        """Follow the training inside the block."""
        if trainer.progress.steps:
            self.say(f"continuing at step {trainer.progress.steps:,}")
        to_fill = sum(trainer.loader.settings.to_fill.values())
        if to_fill >= _MANY_TO_FILL:
            self.say(f"reading about {to_fill:,.0f} fresh examples before the first step")
        self._begin_s = time.monotonic()
        self._line_at = self._begin_s + self._pause_s
        with self._bar:
            self._bar.add_task("reading", total=None)
            yield

    def step(self, trainer: Trainer) -> None:
        """A step was made, or is about to be."""
        now, done = time.monotonic(), _share_done(self._config, trainer)
        if self._paced_from is None and done:
            self._paced_from = now, done
        if not self._bar.disable and now >= self._redraw_at:
            self._redraw_at = now + _REDRAW_S
            text = self._state(trainer, now, done)
            self._bar.update(
                self._bar.task_ids[0], completed=done, total=1.0 if done else None, description=text
            )
            self._bar.refresh()
        if now >= self._line_at:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._line_at = now + self._pause_s
            self.say(self._state(trainer, now, done))

    def evaluated(self, line: dict[str, Any]) -> None:
        """An evaluation was recorded."""
        metric = self._config.target.metric
        self._measured = f", {metric} {line[metric]:.4f}"

    def _state(self, trainer: Trainer, now: float, done: float) -> str:
        """How far the run is, short enough to leave a bar room in 80 columns."""
        steps, fresh = trainer.progress.steps, trainer.fresh_examples
        text = f"step {steps:,}, fresh {fresh:,}{self._measured}, {as_clock(now - self._begin_s)}"
        begin_s, done_then = self._paced_from or (now, done)
        if done > done_then:
            text += f", <= {as_clock((now - begin_s) * (1 - done) / (done - done_then))} left"
        return text


def _share_done(config: Config, trainer: Trainer) -> float:
    """How much of the budget that ends first is spent; 0 without one. The target may come before."""
    budgets = (
        (trainer.progress.steps, config.max_steps),
        (trainer.fresh_examples, config.max_fresh_examples),
        (trainer.clocks.train_time_s, config.max_train_time_s),
    )
    return min(max((done / most for done, most in budgets if most is not None), default=0.0), 1.0)
