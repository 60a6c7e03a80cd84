"""How far a run is, and whether it is over."""

from dataclasses import dataclass
from typing import Any

from adaecho.config.identity import BUDGETS
from adaecho.config.schema import Config
from adaecho.records.status import FINISHED, Status
from adaecho.tasks.base import Direction


@dataclass
class Progress:
    """Counts of a run up to its last step; the loader counts fresh examples.

    Attributes:
        steps: SGD updates.
        evaluations: lines in metrics.jsonl.
        factor_changes: those of ``echo.factor=auto`` that are in these lines.
        next_evaluation: the multiple of ``evaluate.every_fresh_examples`` that falls due next.
        fresh_scale_invariant_steps: AdaScale's tau with each step's share divided by its echoing factor.
        best: the best evaluation so far by the target's metric, with where it was.
        met_in_a_row: the newest evaluations that met the target, without one between them that didn't.
        to_target: the cost read off where ``target.in_a_row`` of them had.
    """

    steps: int = 0
    evaluations: int = 0
    factor_changes: int = 0
    next_evaluation: int = 0
    fresh_scale_invariant_steps: float = 0.0
    best: dict[str, Any] | None = None
    met_in_a_row: int = 0
    to_target: dict[str, Any] | None = None


def is_better(direction: Direction, value: float, other: float) -> bool:
    """Strictly better in the metric's direction."""
    return value > other if direction == "max" else value < other


def meets(direction: Direction, value: float, target: float | None) -> bool:
    """Whether an evaluation meets the target: ``>=`` where more is better, ``<=`` where less is."""
    if target is None:
        return False
    return value >= target if direction == "max" else value <= target


def is_at_chance(
    config: Config, direction: Direction, best: dict[str, Any] | None, fresh_examples: int
) -> bool:
    """Whether a share of the budget is read and no evaluation was better than guessing."""
    target, budget = config.target, config.max_fresh_examples
    if target.chance is None or budget is None or fresh_examples < target.chance_share * budget:
        return False
    return best is None or not is_better(direction, best["value"], target.chance)


def budget_spent(config: Config, *, steps: int, fresh_examples_ahead: int, train_time_s: float) -> bool:
    """Whether taking one more batch would exceed a budget.

    Args:
        config: the three budgets; None is no limit.
        steps: updates done.
        fresh_examples_ahead: the count once the next batch has been taken.
        train_time_s: seconds trained.
    """
    return (
        (config.max_steps is not None and steps >= config.max_steps)
        or (config.max_fresh_examples is not None and fresh_examples_ahead > config.max_fresh_examples)
        or (config.max_train_time_s is not None and train_time_s >= config.max_train_time_s)
    )


def is_finished(summary: dict[str, Any] | None, config: Config) -> bool:
    """Whether a run folder needs no more training under ``config``'s budgets."""
    if summary is None or summary["status"] not in FINISHED:
        return False
    if summary["status"] != Status.BUDGET_SPENT:
        return True
    return bool(summary.get("budgets") == {key: getattr(config, key) for key in BUDGETS})
