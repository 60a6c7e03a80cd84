"""Ways to read the costs of an arm's searches from its records; a claim that holds in one only is fragile.

Beside the searches as they were run: two parts of the space that they searched, three quarters of each axis
(by its scale) from the lower and from the upper end; and two easier targets, 1.5 and 2 times the error (0.1
and 0.2 more of a loss), read off the curves of the trials that were chosen at the target, as the paper does
for its Fig. 4. No reading needs training.

In a part of the space another trial may be its search's best, and one that was stopped early
(``search.prune``) may have become it: all that is known of its cost is that it lies above what it had read.
Such a cost is taken at both ends of what it can be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from adaecho.records.ends import LESS_IS_BETTER
from adaecho.records.outcome import Row, best_trials

Curve = dict[str, Any]
Costs = list[float | None]  # one of each search; None where it missed the target
_PART = 0.75  # of each axis
_EASIER_LOSS = 0.1


@dataclass(frozen=True)
class Reading:
    """One way to read an arm's records.

    Attributes:
        name: as the report says it.
        costs: of an arm's rows, the curves of their best trials, and whether to take the larger cost where a
            trial was stopped early; None where the records don't hold it.
        best_values: the best metric of each search, of an arm's rows; None where there is no such reading.
    """

    name: str
    costs: Callable[[Sequence[Row], Sequence[Curve], bool], Costs | None]
    best_values: Callable[[Sequence[Row]], list[float] | None]


def searched_costs(rows: Sequence[Row], _: Sequence[Curve], __: bool) -> Costs:
    """The cost of each search's best trial."""
    return costs_of_best(rows, "fresh_examples")


def costs_of_best(rows: Sequence[Row], cost: str) -> Costs:
    """What each search's best trial, that with the fewest fresh examples, took to the target.

    Args:
        rows: of one arm.
        cost: fresh_examples, steps, train_time_s, or s_per_fresh_example, the ratio of two of these.
    """
    best = {repeat: row for (_, repeat), row in best_trials(list(rows)).items()}
    return [_cost(best[repeat], cost) if repeat in best else None for repeat in _repeats(rows)]


def _cost(row: Row, cost: str) -> float:
    if cost == "s_per_fresh_example":
        return _cost(row, "train_time_s") / _cost(row, "fresh_examples")
    found: float = row[f"to_target_{cost}"]
    return found


def searched_best_values(rows: Sequence[Row]) -> list[float]:
    """The best metric, at any evaluation of any counted trial, of each search; larger is better."""
    values = [
        [row["best_value"] for row in rows if row["repeat"] == repeat and row["counted"]]
        for repeat in _repeats(rows)
    ]
    known = [[value for value in of_search if value is not None] for of_search in values]
    return [max(of_search) for of_search in known if of_search]


def _part_costs(
    low: float, high: float, rows: Sequence[Row], _: Sequence[Curve], worst: bool
) -> Costs | None:
    if not _were_searched(rows):
        return None
    found: Costs = []
    for repeat in _repeats(rows):
        inside = [row for row in _inside(rows, low, high) if row["repeat"] == repeat and row["counted"]]
        costs = [row["to_target_fresh_examples"] for row in inside if row["to_target_fresh_examples"]]
        if not worst:
            costs += [row["fresh_examples"] for row in inside if _was_stopped_early(row)]
        found.append(min(costs, default=None))
    return found


def _part_best_values(low: float, high: float, rows: Sequence[Row]) -> list[float] | None:
    return searched_best_values(_inside(rows, low, high)) if _were_searched(rows) else None


def _easier_costs(step: int, rows: Sequence[Row], curves: Sequence[Curve], _: bool) -> Costs | None:
    if not curves or not _were_searched(rows):
        return None
    metric, target = rows[0]["target_metric"], rows[0]["target_value"]
    by_repeat = {curve["repeat"]: curve for curve in curves}
    return [
        _first_at(by_repeat[repeat], easier(metric, target, step), metric) if repeat in by_repeat else None
        for repeat in _repeats(rows)
    ]


def easier(metric: str, target: float, step: int) -> float:
    """The easier target of a metric: at each step half as much error again, or 0.1 more of a loss."""
    return target + _EASIER_LOSS * step if metric in LESS_IS_BETTER else 1 - (1 - target) * (1 + step / 2)


def _first_at(curve: Curve, target: float, metric: str) -> float | None:
    sign = -1 if metric in LESS_IS_BETTER else 1
    pairs = zip(curve["fresh_examples"], curve["values"], strict=True)
    return next((fresh for fresh, value in pairs if sign * value >= sign * target), None)


def _repeats(rows: Sequence[Row]) -> list[int]:
    return sorted({row["repeat"] for row in rows})


def _were_searched(rows: Sequence[Row]) -> bool:
    return all(row.get("positions") for row in rows)


def _inside(rows: Sequence[Row], low: float, high: float) -> list[Row]:
    return [row for row in rows if all(low <= place <= high for place in row["positions"].values())]


def _was_stopped_early(row: Row) -> bool:
    return row["to_target_fresh_examples"] is None and row["status"] not in ("budget_spent", "reached")


AS_SEARCHED = Reading("as searched", searched_costs, searched_best_values)
OTHERS = (
    Reading("lower part of the space", partial(_part_costs, 0, _PART), partial(_part_best_values, 0, _PART)),
    Reading(
        "upper part of the space",
        partial(_part_costs, 1 - _PART, 1),
        partial(_part_best_values, 1 - _PART, 1),
    ),
    Reading("1.5 times the error", partial(_easier_costs, 1), lambda _: None),
    Reading("twice the error", partial(_easier_costs, 2), lambda _: None),
)
