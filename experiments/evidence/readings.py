"""Different ways to compute the cost of a configuration from the same recorded trials, without new training.

Each configuration is tuned by several hyperparameter searches. The cost of a search is the number of fresh
examples that its best trial needed to reach the target. A *reading* is one way to compute these costs:

* One reading takes the searches as they were run.
* Two use only trials in the lower or in the upper three quarters of each hyperparameter's range, on the scale
  of the search (linear or log).
* Two use easier targets: 1.5 or 2 times the error, or a loss that is 0.1 or 0.2 higher. They take the costs
  from the training curves of the best trials.

The cost may be known only within bounds: if a trial missed the target or was stopped early
(``search.prune``), its cost is at least the number of examples that it read.
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
_PART = 0.75  # share of each axis that a reading of part of the space uses
_EASIER_LOSS = 0.1
_ROUNDING = 1e-9
# The metric of a model that guesses: the accuracy for ten equally frequent classes, and the loss in nats for
# the 1,024 subwords of small_text.
_CHANCE = {"digits": 0.1, "cifar10": 0.1, "small_text": math.log(1024)}


Costs = list[Bounds]  # one for each search
_UNKNOWN = Bounds(0, math.inf)


@dataclass(frozen=True)
class Reading:
    """One of several ways to compute the cost of a configuration from its recorded trials."""

    name: str  # name in the report
    # The part of each hyperparameter's search range from which trials are used: from 0, the lower end of the
    # range, to 1, its upper end.
    part: tuple[float, float] = (-math.inf, math.inf)
    step: int = 0  # how much easier the target is than the recorded one: 0, 1 or 2 steps (see ``easier``)

    def costs(self, rows: Sequence[Row], curves: Sequence[Curve]) -> Costs | None:
        """Return bounds on the number of fresh examples that each search needed, or None if unknown."""
        # ``rows`` are all trials of one configuration. ``curves`` has the best trial of each search.
        if self == AS_SEARCHED:
            return searched_costs(rows)
        if not _were_searched(rows):
            return None
        if self.step:
            return _easier_costs(self.step, rows, curves)
        return [_cost_bounds(_inside(search, *self.part)) for _, search in _searches(rows)]

    def best_values(self, rows: Sequence[Row]) -> list[float | None] | None:
        """Return the best metric that each hyperparameter search found, or None if it is unknown."""
        # Easier targets are defined only for costs, and only a search has a range to take a part of.
        if self.step or not (self == AS_SEARCHED or _were_searched(rows)):
            return None
        return [best_value(_inside(search, *self.part)) for _, search in _searches(rows)]


def _cost_bounds(search: Sequence[Row]) -> Bounds:
    """Return bounds of a search's lowest cost. A trial that missed costs at least the examples it read."""
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
    """Return an easier target, or None if a model that only guesses would already reach it."""
    # ``chance`` is the metric of a model that guesses; None if it is unknown.
    if metric in LESS_IS_BETTER:
        value = target + _EASIER_LOSS * step
        return value if chance is None or value < chance - _ROUNDING else None
    # Each step adds half of the original error: 90% becomes 85% at step 1, and 80% at step 2.
    value = 1 - (1 - target) * (1 + step / 2)
    return value if value > (chance or 0) + _ROUNDING else None


def _first_at(curve: Curve, target: float, metric: str) -> Bounds:
    sign = -1 if metric in LESS_IS_BETTER else 1
    pairs = zip(curve["fresh_examples"], curve["values"], strict=True)
    first = next((fresh for fresh, value in pairs if sign * value >= sign * target), None)
    return _UNKNOWN if first is None else Bounds(first, first)


def _searches(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """Return the number and the trials of each hyperparameter search of one configuration."""
    return sorted((repeat, search) for (_, repeat), search in searches(rows).items())


def _were_searched(rows: Sequence[Row]) -> bool:
    """Return whether the rows come from hyperparameter searches."""
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
