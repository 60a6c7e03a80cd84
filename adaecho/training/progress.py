"""Progress of a run: its counts, its stop rules, and the lines that it prints."""

import time
from dataclasses import dataclass
from typing import Any

from adaecho.config.identity import BUDGETS
from adaecho.config.schema import Config
from adaecho.errors import print_line
from adaecho.records.table import as_clock
from adaecho.records.trials import FINISHED, Status
from adaecho.tasks.base import Direction

# Pauses between lines double, so a short run prints few lines and a long run prints soon.
_FIRST_LINE_S, _LONGEST_PAUSE_S = 5.0, 60.0
_MANY_EXAMPLES = 10_000  # filling a smaller buffer takes seconds


@dataclass
class Progress:
    """Counts of a run up to its last step.

    Attributes:
        fresh_examples: read for these steps, by all ranks.
        steps: SGD updates.
        evaluations: lines in metrics.jsonl.
        factor_changes: how many changes of ``echo.factor=auto`` these lines hold.
        next_evaluation: the multiple of ``evaluate.every_fresh_examples`` at which the next one falls due.
        fresh_scale_invariant_steps: AdaScale's tau with each step's share divided by its echoing factor.
        best: the best evaluation by the target's metric, with its costs.
        met_in_a_row: how many consecutive evaluations up to the last one met the target.
        to_target: the cost at the evaluation that ended the run; None before.
    """

    fresh_examples: int = 0
    steps: int = 0
    evaluations: int = 0
    factor_changes: int = 0
    next_evaluation: int = 0
    fresh_scale_invariant_steps: float = 0.0
    best: dict[str, Any] | None = None
    met_in_a_row: int = 0
    to_target: dict[str, Any] | None = None


def is_better(direction: Direction, value: float, other: float) -> bool:
    """Whether a value is strictly better in the metric's direction."""
    return value > other if direction == "max" else value < other


def meets(direction: Direction, value: float, target: float | None) -> bool:
    """Whether an evaluation meets the target: ``>=`` if more is better, ``<=`` if less is better."""
    if target is None:
        return False
    return value >= target if direction == "max" else value <= target


def is_at_chance(
    config: Config, direction: Direction, best: dict[str, Any] | None, fresh_examples: int
) -> bool:
    """Whether ``target.chance_share`` of the budget is read and no evaluation was better than chance."""
    target, budget = config.target, config.max_fresh_examples
    if target.chance_level is None or budget is None or fresh_examples < target.chance_share * budget:
        return False
    return best is None or not is_better(direction, best["value"], target.chance_level)


def budget_spent(config: Config, steps: int, fresh_examples_ahead: float, train_time_s: float) -> bool:
    """Whether one more batch would exceed a budget.

    Args:
        config: the three budgets; None is no limit.
        steps: completed updates.
        fresh_examples_ahead: the count after the next batch.
        train_time_s: seconds trained.
    """
    return (
        (config.max_steps is not None and steps >= config.max_steps)
        or (config.max_fresh_examples is not None and fresh_examples_ahead > config.max_fresh_examples)
        or (config.max_train_time_s is not None and train_time_s >= config.max_train_time_s)
    )


def is_finished(summary: dict[str, Any], config: Config) -> bool:
    """Whether a run needs no more training under the budgets of ``config``."""
    if summary["status"] == Status.BUDGET_SPENT:
        return bool(summary.get("budgets") == {key: getattr(config, key) for key in BUDGETS})
    return summary["status"] in FINISHED


class ProgressLog:
    """Prints the progress of a run: after 5 s, then at doubling intervals of at most 60 s.

    It reads nothing from the device, so it does not slow the run.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._metric = ""
        self._pause_s = _FIRST_LINE_S
        self._begin_s = self._next_line_s = 0.0

    def begin(self, steps: int, examples_to_fill: float) -> None:
        """Start the timer; tell where a resumed run continues and how much the first batch must read."""
        if steps:
            print_line(f"continuing at step {steps:,}")
        if examples_to_fill >= _MANY_EXAMPLES:
            print_line(f"reading about {examples_to_fill:,.0f} fresh examples before the first step")
        self._begin_s = time.monotonic()
        self._next_line_s = self._begin_s + self._pause_s

    def evaluated(self, line: dict[str, Any]) -> None:
        """Show the target's metric of this evaluation in the next lines."""
        metric = self._config.target.metric
        self._metric = f", {metric} {line[metric]:.4f}"

    def step(self, steps: int, fresh_examples: int) -> None:
        """Print a line if one is due."""
        now = time.monotonic()
        if now < self._next_line_s:
            return
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._next_line_s = now + self._pause_s
        elapsed = as_clock(now - self._begin_s)
        print_line(f"step {steps:,}, fresh {fresh_examples:,}{self._metric}, {elapsed}")
