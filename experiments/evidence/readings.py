"""Different ways to compute the cost of a configuration from the same recorded trials, without new training.

Each configuration under comparison (arm) is tuned by several hyperparameter searches. The cost of a search is
the number of fresh examples that its best trial needed to reach the target. A *reading* is one way to compute
these costs. A verdict that depends on the reading is called fragile. There are five readings:

* One takes the searches as they were run.
* Two use only the trials in a part of the search space: the lower or the upper three quarters of each
  hyperparameter's range. If the search used a log scale, so do these parts.
* Two use easier targets, with 1.5 and 2 times the error (or a loss that is higher by 0.1 and 0.2). They take
  the costs from the training curves of the best trials at the original target, as the paper does for Fig. 4.
  An easier target is not used if a model that guesses would meet it.

The cost of a search may be known only up to bounds. If a search missed the target, its cost is at least the
number of examples that it read. In a part of the space, another trial may be the best of its search. This
trial may have been pruned (``search.prune``), which means stopped before it reached the target. Its cost is
then above the number of examples that it read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adaecho.records.outcome import (
    LESS_IS_BETTER,
    Bounds,
    Row,
    best_value,
    counted_cost,
    lowest,
    searched_costs,
    searches,
)

Curve = dict[str, Any]
_PART = 0.75  # share of each axis that a reading of a part of the space uses
_EASIER_LOSS = 0.1
_ROUNDING = 1e-9
# The metric of a model that guesses: the accuracy for ten equally frequent classes, and the loss in nats for
# the 1,024 subwords of small_text.
_CHANCE = {"digits": 0.1, "cifar10": 0.1, "small_text": math.log(1024)}


Costs = list[Bounds]  # one for each search
_UNKNOWN = Bounds(0, math.inf)


@dataclass(frozen=True)
class Reading:
    """A way to compute a configuration's costs: from all trials, some of them, or for an easier target.

    Attributes:
        name: name in the report.
        part: limits of the hyperparameters of the trials that count. Each hyperparameter has a position in
            its search range, from 0 (lower end) to 1 (upper end).
        step: how much easier the target is, 1 or 2 (see ``easier``). The original target has 0.
    """

    name: str
    part: tuple[float, float] = (-math.inf, math.inf)
    step: int = 0

    def costs(self, rows: Sequence[Row], curves: Sequence[Curve]) -> Costs | None:
        """Return the costs of one configuration in fresh examples, one for each hyperparameter search.

        The result is None if the records do not contain the data for this way of computing costs.

        Args:
            rows: all trials of the configuration.
            curves: the metric during training, for the best trial of each search.
        """
        if self == AS_SEARCHED:
            return searched_costs(rows)
        if not _were_searched(rows):
            return None
        if self.step:
            return _easier_costs(self.step, rows, curves)
        return [_bounds(_inside(search, *self.part)) for _, search in _searches(rows)]

    def best_values(self, rows: Sequence[Row]) -> list[float | None] | None:
        """Return the best metric of each search, over all evaluations of the trials that this reading uses.

        The result is None for a reading with an easier target, because the target does not change the best
        metric. It is also None for a part of the search space if no hyperparameters were searched.
        """
        if self.step or not (self == AS_SEARCHED or _were_searched(rows)):
            return None
        return [best_value(_inside(search, *self.part)) for _, search in _searches(rows)]


def _bounds(search: Sequence[Row]) -> Bounds:
    """Return a lower and an upper bound of a search's lowest cost.

    A trial that missed the target, e.g. because it was stopped early, costs at least what it read.
    """
    counted = [row for row in search if row["counted"]]
    read = [row["fresh_examples"] for row in counted if counted_cost(row) is None]
    cheapest = lowest(map(counted_cost, counted))
    return Bounds(lowest([cheapest, *read]) or 0, math.inf if cheapest is None else cheapest)


def _easier_costs(step: int, rows: Sequence[Row], curves: Sequence[Curve]) -> Costs | None:
    if not curves:
        return None
    metric = rows[0]["target_metric"]
    target = easier(metric, rows[0]["target_value"], step, _CHANCE.get(rows[0]["task"]))
    if target is None:
        return None
    by_repeat = {curve["repeat"]: curve for curve in curves}
    return [
        _first_at(by_repeat[repeat], target, metric) if repeat in by_repeat else _UNKNOWN
        for repeat, _ in _searches(rows)
    ]


def easier(metric: str, target: float, step: int, chance: float | None = None) -> float | None:
    """Return a target that is easier to reach than the original target.

    For an accuracy, each step adds half of the original error: 90 % becomes 85 % at step 1, and 80 % at step
    2. For a loss, each step adds 0.1.

    Args:
        metric: name of the metric.
        target: the original target.
        step: 1 or 2.
        chance: the metric of a model that guesses. None stands for 0 for an accuracy, and for infinity for a
            loss.

    Returns:
        The easier target, or None if a model that guesses would meet it.
    """
    if metric in LESS_IS_BETTER:
        value = target + _EASIER_LOSS * step
        return value if chance is None or value < chance - _ROUNDING else None
    value = 1 - (1 - target) * (1 + step / 2)
    return value if value > (chance or 0) + _ROUNDING else None


def _first_at(curve: Curve, target: float, metric: str) -> Bounds:
    sign = -1 if metric in LESS_IS_BETTER else 1
    pairs = zip(curve["fresh_examples"], curve["values"], strict=True)
    first = next((fresh for fresh, value in pairs if sign * value >= sign * target), None)
    return _UNKNOWN if first is None else Bounds(first, first)


def _searches(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """Return the trials of one configuration by hyperparameter search, sorted by the search's number."""
    return sorted((repeat, search) for (_, repeat), search in searches(rows).items())


def _were_searched(rows: Sequence[Row]) -> bool:
    """Return whether the rows come from hyperparameter searches. Other rows allow only ``AS_SEARCHED``."""
    return all(row.get("positions") for row in rows)


def _inside(rows: Sequence[Row], low: float, high: float) -> list[Row]:
    return [
        row
        for row in rows
        if all(low <= position <= high for position in (row.get("positions") or {}).values())
    ]


AS_SEARCHED = Reading("as searched")
OTHERS = (
    Reading("lower part of the space", part=(0, _PART)),
    Reading("upper part of the space", part=(1 - _PART, 1)),
    Reading("1.5 times the error", step=1),
    Reading("twice the error", step=2),
)
