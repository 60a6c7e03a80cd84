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
        self._bar = Progress(
            *(BarColumn(bar_width=None), TextColumn("{task.fields[state]}")), console=self._console,
            auto_refresh=False, transient=True, expand=True, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._measured = ""
        self._begin_s = self._redraw_at = 0.0
        # When the first step of this piece was done, and how much of the budget was: filling a buffer and
        # compiling come before, and tell nothing of the pace.
        self._paced_from: tuple[float, float] | None = None
        self._before = (0, 0)  # steps and examples read, of the pieces before

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self._console.print(text, soft_wrap=True, markup=False)

    @contextmanager
    def showing(self, trainer: Trainer) -> Iterator[None]:
        """Follow the training inside the block."""
        if trainer.progress.steps:
            self.say(f"continuing at step {trainer.progress.steps:,}")
        self._begin_s = time.monotonic()
        self._before = trainer.progress.steps, trainer.loader.examples_read
        with self._telling(lambda: self._state(trainer, time.monotonic())), self._bar:
            self._bar.add_task("", total=None, state="reading")
            self._bar.refresh()
            yield

    @contextmanager
    def evaluating(self, split: str, expected_s: float | None) -> Iterator[None]:
        """Tell inside the block that a split is measured, and for how long by now.

        Args:
            split: its name.
            expected_s: how long the evaluations before took on average; None where there were none.
        """
        usual = "" if expected_s is None else f" (an evaluation took {as_clock(expected_s)} on average)"
        begin_s, what = time.monotonic(), f"measuring the weights of the end on the {split} split"
        with self._telling(lambda: f"{what}: {as_clock(time.monotonic() - begin_s)}{usual}"):
            yield

    @contextmanager
    def _telling(self, state: Callable[[], str]) -> Iterator[None]:
        """Say inside the block, ever more rarely, what ``state`` returns, if anything."""
        ended = threading.Event()

        def tell() -> None:
            pause_s = _FIRST_LINE_S
            while not ended.wait(pause_s):
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                if text := state():
                    self.say(text)

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()

    def step(self, trainer: Trainer) -> None:
        """A step was made."""
        now = time.monotonic()
        if self._paced_from is None and trainer.progress.steps > self._before[0]:
            self._paced_from = now, _share_done(self._config, trainer)
        if now >= self._redraw_at and self._paced_from is not None and not self._bar.disable:
            self._redraw_at = now + _REDRAW_S
            done, state = _share_done(self._config, trainer), self._state(trainer, now)
            self._bar.update(self._bar.task_ids[0], completed=done, total=1.0 if done else None, state=state)
            self._bar.refresh()

    def evaluated(self, line: dict[str, Any]) -> None:
        """An evaluation was recorded."""
        metric = self._config.target.metric
        self._measured = f", {metric} {line[metric]:.4f}"

    def _state(self, trainer: Trainer, now: float) -> str:
        """How far the run is, short enough to leave a bar room in 80 columns."""
        steps, read = self._before
        if trainer.progress.steps == steps:
            to_fill, read = sum(trainer.loader.settings.to_fill.values()), trainer.loader.examples_read - read
            of_all = f"{read:,} of about {to_fill:,.0f} fresh examples"
            return f"reading before the first step: {of_all}" if to_fill >= _MANY_TO_FILL else ""
        done_steps, fresh = trainer.progress.steps, trainer.fresh_examples
        text = f"step {done_steps:,}, fresh {fresh:,}{self._measured}, {as_clock(now - self._begin_s)}"
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
