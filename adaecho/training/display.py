"""What a run shows while it trains: a bar on a terminal, and everywhere a line now and then."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from adaecho.config.schema import Config
from adaecho.records.table import as_clock
from adaecho.records.terminal import Terminal
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
        self._console = console or Terminal(soft_wrap=True, highlight=False)
        self._bar: Progress | None = None
        self._measured = ""
        self._begin_s = self._redraw_at = self._line_at = 0.0
        self._pause_s = _FIRST_LINE_S
        # When the first step of this piece was done, and how much of the budget was: filling a buffer and
        # compiling come before, and tell nothing of the pace.
        self._paced_from: tuple[float, float] | None = None
        self._steps_before = 0

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self._console.print(text, soft_wrap=True, markup=False)

    @contextmanager
    def showing(self, trainer: Trainer) -> Iterator[None]:
        """Follow the training inside the block."""
        if trainer.progress.steps:
            self.say(f"continuing at step {trainer.progress.steps:,}")
        self._begin_s = time.monotonic()
        self._line_at = self._begin_s + self._pause_s
        self._steps_before = trainer.progress.steps
        with self._filling(trainer), self._bar_shown():
            yield

    @contextmanager
    def _filling(self, trainer: Trainer) -> Iterator[None]:
        """Tell inside the block, until the first step, how much of a large buffer has been read."""
        loader = trainer.loader
        to_fill = sum(loader.settings.to_fill.values())
        if to_fill < _MANY_TO_FILL:
            yield
            return
        steps, read_before = trainer.progress.steps, loader.examples_read

        def state(_: float) -> str | None:
            if trainer.progress.steps > steps:
                return None
            read = loader.examples_read - read_before
            return f"reading before the first step: {read:,} of about {to_fill:,.0f} fresh examples"

        with self._telling(state):
            yield

    @contextmanager
    def evaluating(self, split: str, expected_s: float | None) -> Iterator[None]:
        """Tell inside the block that a split is measured, and for how long by now.

        Args:
            split: its name.
            expected_s: how long the evaluations before took on average; None where there were none.
        """
        usual = "" if expected_s is None else f" (an evaluation took {as_clock(expected_s)} on average)"

        def state(spent_s: float) -> str:
            return f"measuring the weights of the end on the {split} split: {as_clock(spent_s)}{usual}"

        with self._telling(state):
            yield

    @contextmanager
    def _telling(self, state: Callable[[float], str | None]) -> Iterator[None]:
        """Say inside the block, ever more rarely, what ``state(seconds)`` returns, until that is None."""
        ended, begin_s = threading.Event(), time.monotonic()

        def tell() -> None:
            pause_s = _FIRST_LINE_S
            while not ended.wait(pause_s):
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                text = state(time.monotonic() - begin_s)
                if text is None:
                    return
                self.say(text)

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()

    @contextmanager
    def _bar_shown(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        columns = (BarColumn(bar_width=None), TextColumn("{task.fields[state]}"))
        with Progress(
            *columns, console=self._console, auto_refresh=False, transient=True, expand=True
        ) as bar:
            self._bar = bar
            bar.add_task("", total=None, state="reading")
            bar.refresh()
            yield
        self._bar = None

    def step(self, trainer: Trainer) -> None:
        """A step was made."""
        now = time.monotonic()
        if self._paced_from is None and trainer.progress.steps > self._steps_before:
            self._paced_from = now, _share_done(self._config, trainer)
        if now >= self._line_at:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._line_at = now + self._pause_s
            self.say(self._state(trainer, now))
        if self._bar is not None and now >= self._redraw_at:
            self._redraw_at = now + _REDRAW_S
            done = _share_done(self._config, trainer)
            task = self._bar.task_ids[0]
            self._bar.update(
                task, completed=done, total=1.0 if done else None, state=self._state(trainer, now)
            )
            self._bar.refresh()

    def evaluated(self, line: dict[str, Any]) -> None:
        """An evaluation was recorded."""
        metric = self._config.target.metric
        self._measured = f", {metric} {line[metric]:.4f}"

    def _state(self, trainer: Trainer, now: float) -> str:
        """How far the run is, short enough to leave a bar room in 80 columns."""
        fresh = trainer.fresh_examples
        spent_s = now - self._begin_s
        text = f"step {trainer.progress.steps:,}, fresh {fresh:,}{self._measured}, {as_clock(spent_s)}"
        done = _share_done(self._config, trainer)
        begin_s, done_then = self._paced_from or (now, done)
        if done > done_then:
            left_s = (now - begin_s) * (1 - done) / (done - done_then)
            text += f", <= {as_clock(left_s)} left"
        return text


def _share_done(config: Config, trainer: Trainer) -> float:
    """How much of the budget that ends first is spent; 0 without one. The target may come before."""
    shares = [
        done / budget
        for done, budget in (
            (trainer.progress.steps, config.max_steps),
            (trainer.fresh_examples, config.max_fresh_examples),
            (trainer.clocks.train_time_s, config.max_train_time_s),
        )
        if budget is not None
    ]
    return min(max(shares, default=0.0), 1.0)
