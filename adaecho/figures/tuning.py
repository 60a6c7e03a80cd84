"""Tuning curves: what the best trial so far costs, over the trials of a search."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from adaecho.records.outcome import Row

Curve = dict[str, Any]
COST = "fresh examples to the target"


def tuning_curves(rows: Sequence[Row]) -> list[Curve]:
    """One curve per search of several trials that reached the target: the cheapest of its first n trials.

    A trial that was stopped early had already cost more than one that ran before it, or beside it.

    Returns:
        Curves as ``figures.curves`` draws them, with the number of counted trials in place of fresh examples,
        from the first trial on that reached the target.
    """
    searches: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row["counted"]:
            searches.setdefault((row["arm"], row["repeat"]), []).append(row)
    return [
        curve for search in searches.values() if len(search) > 1 and (curve := _curve(search)) is not None
    ]


def _curve(search: Sequence[Row]) -> Curve | None:
    ordered = sorted(search, key=lambda row: int(row["index"]))
    costs = [row["to_target_fresh_examples"] or float("inf") for row in ordered]
    best = list(accumulate(costs, min))
    first = next((place for place, cost in enumerate(best) if cost < float("inf")), None)
    if first is None:
        return None
    numbers = list(range(first + 1, len(best) + 1))
    return {**ordered[0], "metric": COST, "fresh_examples": numbers, "values": best[first:]}
