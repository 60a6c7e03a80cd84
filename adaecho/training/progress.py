"""The progress of a run: its counters, the rules that stop it, and the progress lines that it prints."""

import time
from dataclasses import dataclass
from typing import Any

from adaecho.config.identity import BUDGETS
from adaecho.config.schema import Config
from adaecho.errors import print_line
from adaecho.records.table import as_clock
from adaecho.records.trials import FINISHED, Status
from adaecho.tasks.base import Direction

# The pause between progress lines doubles each time, so that the first line appears soon but a long run does
# not print too many.
_FIRST_LINE_S, _LONGEST_PAUSE_S = 5.0, 60.0
_MANY_EXAMPLES = 10_000  # a smaller buffer fills within seconds, so no message is needed


@dataclass
class Progress:
    """The counters and the best result of a run so far, which are saved in each checkpoint."""

    fresh_examples: int = 0  # examples that all ranks together have used, without counting repeats
    steps: int = 0
    evaluations: int = 0  # number of lines in metrics.jsonl
    factor_changes: int = 0  # number of changes of the echoing factor that metrics.jsonl contains
    next_evaluation: int = 0  # number of fresh examples after which the next evaluation is due
    fresh_scale_invariant_steps: float = 0.0  # sum over steps of AdaScale's gain / echoing factor
    best: dict[str, Any] | None = None  # the best evaluation by the target's metric, with its costs
    met_in_a_row: int = 0  # number of consecutive evaluations, up to the last one, that met the target
    to_target: dict[str, Any] | None = None  # the costs of reaching the target; None until then


def is_better(direction: Direction, value: float, other: float) -> bool:
    """Return whether a value of a metric is strictly better than another value."""
    return value > other if direction == "max" else value < other


def meets(direction: Direction, value: float, target: float | None) -> bool:
    """Return whether a value is at least as good as the target; False without a target."""
    if target is None:
        return False
    return value >= target if direction == "max" else value <= target


def is_at_chance(
    config: Config, direction: Direction, best: dict[str, Any] | None, fresh_examples: int
) -> bool:
    """Return whether a run is still no better than random guessing (``target.chance_level``).

    The result is False until the run has used ``target.chance_share`` of its budget of fresh examples.
    """
    target, budget = config.target, config.max_fresh_examples
    if target.chance_level is None or budget is None or fresh_examples < target.chance_share * budget:
        return False
    return best is None or not is_better(direction, best["value"], target.chance_level)


def budget_spent(config: Config, steps: int, next_fresh_examples: float, train_time_s: float) -> bool:
    """Return whether the next step would exceed the maximum number of steps, fresh examples or seconds."""
    # ``next_fresh_examples`` includes the fresh examples of the next batch.
    return (
        (config.max_steps is not None and steps >= config.max_steps)
        or (config.max_fresh_examples is not None and next_fresh_examples > config.max_fresh_examples)
        or (config.max_train_time_s is not None and train_time_s >= config.max_train_time_s)
    )


def is_finished(summary: dict[str, Any], config: Config) -> bool:
    """Return whether a recorded run needs no more training."""
    # A run that spent its budgets can continue if the user has changed the budgets.
    if summary["status"] == Status.BUDGET_SPENT:
        return bool(summary.get("budgets") == {key: getattr(config, key) for key in BUDGETS})
    return summary["status"] in FINISHED


class ProgressLog:
    """A log that prints progress lines: first after 5 s, then at intervals that double up to 60 s."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._metric = ""
        self._pause_s = _FIRST_LINE_S
        self._begin_s = self._next_line_s = 0.0

    def begin(self, steps: int, examples_to_fill: float) -> None:
        """Start the timer, and announce a resumed run or a long wait before the first step.

        Args:
            steps: number of steps that a resumed run has completed; 0 for a new run.
            examples_to_fill: number of examples to read before the first step.
        """
        if steps:
            print_line(f"continuing at step {steps:,}")
        if examples_to_fill >= _MANY_EXAMPLES:
            print_line(f"reading about {examples_to_fill:,.0f} fresh examples before the first step")
        self._begin_s = time.monotonic()
        self._next_line_s = self._begin_s + self._pause_s

    def evaluated(self, line: dict[str, Any]) -> None:
        """Store the target's metric, so that the next progress lines show it."""
        metric = self._config.target.metric
        self._metric = f", {metric} {line[metric]:.4f}"

    def step(self, steps: int, fresh_examples: int) -> None:
        """Print a progress line if one is due."""
        now = time.monotonic()
        if now < self._next_line_s:
            return
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._next_line_s = now + self._pause_s
        elapsed = as_clock(now - self._begin_s)
        print_line(f"step {steps:,}, fresh {fresh_examples:,}{self._metric}, {elapsed}")
