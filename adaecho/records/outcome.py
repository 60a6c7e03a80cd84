"""Compare arms by their trials: the protocol of the paper (section 3) as pure functions over rows.

``outcome`` compares the cost of reaching a target; without a target, ``ends`` compares the ends of budgets.
``best_trials`` defines the best trial of a search for both.

A row is one trial, as a flat dict. Its keys::

    experiment, task, arm, echo_variant, echo_factor     the comparison
    baseline                                             the arm that it is compared with, or null
    batch_size, shuffle_buffer, batch_shuffle_buffer     axes of figures
    repeat, index                                        search of the arm, point of the search
    status                                               reached, budget_spent, diverged, failed, ...
    counted                                              whether the search's non-divergent budget counts it
    seed, hyperparameters                                the point: {key: value}
    run_id                                               of the whole config; see ``config.identity``
    trials_left                                          of its search, if some trials have not ended
    positions                                            {key: 0 to 1}: the point's position on each axis
    target_metric, target_value; target_direction        min or max, if the metric's name does not tell
    to_target_fresh_examples, to_target_steps, to_target_train_time_s      null if the target was missed
    best_value, fresh_examples, steps, train_time_s, R                     at the end of the run

and without a target also, at the end of the budget::

    trained_examples                                  steps times batch size, including repeats
    final_<metric>                                    each metric of the task
    gain, gradient_variance, gradient_square,         of AdaScale, at the last step; scale_invariant_steps
    scale_invariant_steps                             is tau
"""

import math
import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from adaecho.records.statistics import cost_ratio, mean_interval
from adaecho.records.trials import Status

Row = dict[str, Any]
# Metrics of which less is better. Of all others more is better, unless a row has target_direction.
LESS_IS_BETTER = frozenset({"cross_entropy", "loss", "perplexity"})
COSTS = ("fresh_examples", "steps", "train_time_s")
TARGET = ("target_metric", "target_value", "target_in_a_row")  # the first records lack the last key
COUNTS = ("fresh_examples", "steps", "trained_examples")
ADASCALE = ("scale_invariant_steps", "gain", "gradient_variance", "gradient_square")
EDGE = 0.05  # share of an axis at either end; the paper found no best point there (section 3)
_SHARED = ("batch_size", "shuffle_buffer")  # an arm and its baseline have equal values
SETTINGS = ("baseline", *_SHARED, "batch_shuffle_buffer")


def outcome(rows: list[Row]) -> list[Row]:
    """One dict per arm, in the order of first appearance.

    The best counted trial represents each search. Means and extremes cover the searches that reached the
    target (the bars and error bars of the paper's Fig. 3).

    Returns:
        Per arm:

        * ``arm``, ``echo_variant``, ``echo_factor``, and those of ``SETTINGS`` that were not searched.
        * ``searches``, and how many of them ``reached`` the target.
        * Counted ``trials``, and how many of them ``missed`` the target; how many other trials ``diverged``
          (and were replaced) or ``failed``.
        * ``at_edge``: see the function.
        * ``fresh_examples``, ``steps`` and ``train_time_s`` to the target as {mean, min, max}; with several
          searches also ``low`` and ``high``, the mean's 95 % interval. Null if no search reached the target.
        * ``baseline``, and ``ratio_to_baseline`` of geometric means of fresh examples, with its 95 % interval
          ``ratio_low`` to ``ratio_high``; see ``records.statistics.cost_ratio``. Null without a baseline that
          reached the target. The interval is null for the baseline itself, and with fewer than two searches
          on either side.
        * ``ratio_bound``: if searches of one side missed the target, each of them costs at least what it
          read, so the ratio is ``at least`` or ``at most`` the value and has no interval. If searches of both
          sides missed, the ratio is null.
    """
    best = best_trials(rows)
    arms = [_arm(rows_of_arm, best) for rows_of_arm in by_arm(rows).values()]
    costs = {name: searched_costs(rows_of_arm) for name, rows_of_arm in by_arm(rows).items()}
    targets = {name: targets_of(rows_of_arm) for name, rows_of_arm in by_arm(rows).items()}
    for arm in arms:
        ours = targets[arm["arm"]]
        baseline = baseline_of(arm, [other for other in arms if targets[other["arm"]] == ours])
        arm["baseline"] = baseline if targets.get(baseline or "", ours) == ours else None
        if arm["arm"] == arm["baseline"]:
            value = 1.0 if arm["reached"] else None
            arm |= {"ratio_to_baseline": value, "ratio_low": None, "ratio_high": None}
        else:
            arm |= _ratio(costs[arm["arm"]], costs.get(arm["baseline"] or "", []))
    return arms


def targets_of(rows: Iterable[Row]) -> set[tuple[Any, ...]]:
    """The targets of rows: task, metric, value, consecutive evaluations. Equal targets are comparable."""
    metric, value, in_a_row = TARGET
    return {(row["task"], row[metric], row[value], row.get(in_a_row) or 1) for row in rows}


class Bounds(NamedTuple):
    """Bounds of a search's cost: equal if it reached the target; ``high`` is infinite if it missed."""

    low: float
    high: float


def searched_costs(rows: Sequence[Row], cost: str = "fresh_examples") -> list[Bounds]:
    """The cost to the target of each search: that of its best trial, with the fewest fresh examples.

    A search that missed the target costs at least what its shortest trial spent. The cost of a search with
    trials left is unknown.

    Args:
        rows: of one arm.
        cost: fresh_examples, steps, train_time_s, or s_per_fresh_example (seconds over fresh examples).
    """
    found = []
    for _, search in sorted(searches(rows).items()):
        counted = [row for row in search if row["counted"]]
        best = next(iter(best_trials(search).values()), None)
        if best is not None and counted_cost(best) is not None:
            spent = _cost(best, "to_target_", cost)
            found.append(Bounds(spent, spent))
        elif cost == "s_per_fresh_example":  # known without a target
            rates = [_cost(row, "", cost) for row in counted]
            found.append(Bounds(min(rates, default=0), max(rates, default=math.inf)))
        else:
            is_open = any(row.get("trials_left") for row in search)
            spent = 0 if is_open else min((row.get(cost) or 0 for row in counted), default=0)
            found.append(Bounds(spent, math.inf))
    return found


def _cost(row: Row, prefix: str, cost: str) -> float:
    if cost == "s_per_fresh_example":
        return _cost(row, prefix, "train_time_s") / _cost(row, prefix, "fresh_examples")
    found: float = row[f"{prefix}{cost}"]
    return found


def _ratio(ours: list[Bounds], theirs: list[Bounds]) -> Row:
    """The ratio of an arm's costs to those of its baseline, with its interval or bound."""
    unknown = {"ratio_to_baseline": None, "ratio_low": None, "ratio_high": None}
    missed = [[math.isinf(cost.high) for cost in costs] for costs in (ours, theirs)]
    if all(map(any, missed)) or any(map(all, missed)):
        return unknown
    least = [[cost.low for cost in costs] for costs in (ours, theirs)]
    if not all(least[0] + least[1]):  # a search without a counted trial
        return unknown
    ratio = cost_ratio(*least)
    if any(map(any, missed)):
        bound = "at least" if any(missed[0]) else "at most"
        return unknown | {"ratio_to_baseline": ratio.value, "ratio_bound": bound}
    return {"ratio_to_baseline": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}


def ratio_words(arm: Row) -> str:
    """The ratio of an arm of ``outcome`` to its baseline: ``0.72``, or ``>0.72`` and ``<0.72`` for bounds."""
    sign = {"at least": ">", "at most": "<"}.get(arm.get("ratio_bound", ""), "")
    return f"{sign}{arm['ratio_to_baseline']:.2f}"


def baseline_of(arm: Row, arms: list[Row]) -> str | None:
    """The name of the arm with which an arm is compared; None if it is ambiguous.

    The first rule that gives a single arm decides: the arm's own ``baseline``; the arm without echoing (or
    with factor 1) of equal batch size and shuffle buffer; the arm named baseline; the only arm without
    echoing.
    """
    if arm.get("baseline"):
        return str(arm["baseline"])
    plain = [other for other in arms if other["echo_variant"] == "none"]
    plain = plain or [other for other in arms if other["echo_factor"] == 1]
    alike = [other for other in plain if all(other.get(key) == arm.get(key) for key in _SHARED)]
    named = [other for other in arms if other["arm"] == "baseline"]
    for candidates in (alike, named, plain):
        if len(candidates) == 1:
            return str(candidates[0]["arm"])
    return None


def without_target(rows: list[Row]) -> bool:
    """Whether the experiment has no target, so that all runs spend their budgets."""
    return all(row["target_value"] is None for row in rows)


def best_trials(rows: list[Row]) -> dict[tuple[str, int], Row]:
    """The best trial of each search (arm and repeat), ties by index.

    The best trial is the counted one with the fewest fresh examples to the target; a search that missed it
    has no entry. Without a target it is the trial that spent its budget with the best value of the metric at
    any evaluation (paper, Fig. 8).
    """
    merit = _distance_at_end if without_target(rows) else counted_cost
    best = {}
    for key, search in searches(rows).items():
        known = [(value, row["index"], row) for row in search if (value := merit(row)) is not None]
        if known:
            best[key] = min(known, key=lambda one: one[:2])[2]
    return best


def searches(rows: Iterable[Row]) -> dict[tuple[str, int], list[Row]]:
    """The trials of each search, by its arm and repeat, in the order of first appearance."""
    by_search: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        by_search.setdefault((row["arm"], row["repeat"]), []).append(row)
    return by_search


def best_value(search: Iterable[Row]) -> float | None:
    """The best value of the target's metric at any evaluation of any counted trial; None without one."""
    best = min((row for row in search if row["counted"]), key=_distance, default=None)
    return None if best is None else best["best_value"]


def counted_cost(row: Row) -> int | None:
    """Fresh examples to the target of a counted trial; None if it missed or is not counted."""
    return row["to_target_fresh_examples"] if row["counted"] else None


def _distance_at_end(row: Row) -> float | None:
    return _distance(row) if row["status"] == Status.BUDGET_SPENT else None


def _distance(row: Row) -> float:
    """A sort key of the best value; smaller is better."""
    value: float | None = row["best_value"]
    direction = row.get("target_direction") or _by_name(row["target_metric"])
    return math.inf if value is None else value if direction == "min" else -value


def direction_column(metric: str, direction: str) -> Row:
    """``target_direction`` for a row; empty if the metric's name tells the direction."""
    return {} if direction == _by_name(metric) else {"target_direction": direction}


def _by_name(metric: str) -> str:
    return "min" if metric in LESS_IS_BETTER else "max"


def cost_to_target(summary: Row) -> int | None:
    """Fresh examples to the target in a run's summary; None if it has not reached it."""
    return (summary.get("to_target") or {}).get("fresh_examples")


def lowest(costs: Iterable[int | None]) -> int | None:
    """The lowest cost that is not None."""
    return min((cost for cost in costs if cost is not None), default=None)


def arm_of_winner(name: str) -> str:
    """The searched arm whose best point the arm ``<arm>_search<n>`` repeats."""
    return re.sub(r"_search\d+$", "", name)


def by_arm(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows (or curves) of each arm, in the order of first appearance."""
    arms: dict[str, list[Row]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    return arms


def _arm(rows: list[Row], best: dict[tuple[str, int], Row]) -> Row:
    first = rows[0]
    reached = [row for (arm, _), row in best.items() if arm == first["arm"]]
    counted = [row for row in rows if row["counted"]]
    settings = [key for key in SETTINGS if key in first and not _is_searched(key, rows)]
    return {
        **{key: first[key] for key in ("arm", "echo_variant", "echo_factor", *settings)},
        "searches": len({row["repeat"] for row in rows}),
        "reached": len(reached),
        "trials": len(counted),
        "diverged": sum(row["status"] == Status.DIVERGED for row in rows),
        "missed": sum(row["to_target_fresh_examples"] is None for row in counted),
        "failed": sum(row["status"] == Status.FAILED for row in rows),
        **at_edge(reached),
        **{cost: _spread_with_interval([row[f"to_target_{cost}"] for row in reached]) for cost in COSTS},
    }


def _is_searched(key: str, rows: list[Row]) -> bool:
    """Whether the search chose a setting, so that it does not describe the arm."""
    axes = {name.rpartition(".")[2] for row in rows for name in row.get("positions") or {}}
    return key in axes or len({row.get(key) for row in rows}) > 1


def ends(rows: list[Row]) -> list[Row]:
    """One dict per arm, in the order of first appearance.

    ``best_trials`` represents a search of several trials; a search of one trial is a run.

    Returns:
        Per arm:

        * ``arm``, ``echo_variant``, ``echo_factor``; ``searched``: whether its searches had several trials.
        * How many ``runs`` (or searches) spent their budgets, and how many ``diverged`` or ``failed``.
        * As {mean, min, max} over these runs, null without values: ``fresh_examples``, ``steps``,
          ``trained_examples``, ``final_<metric>``, ``best_value`` (at any evaluation), ``mean_gain`` (tau
          over steps), and the other values of AdaScale.
        * ``at_edge`` as in ``outcome``.
    """
    finals = [*dict.fromkeys(key for row in rows for key in row if key.startswith("final_"))]
    return [_arm_at_its_end(rows_of_arm, finals) for rows_of_arm in by_arm(rows).values()]


def _arm_at_its_end(rows: list[Row], finals: list[str]) -> Row:
    all_ended = [row for row in rows if row["status"] == Status.BUDGET_SPENT]
    ended = [
        row if (tau := row.get("scale_invariant_steps")) is None else {**row, "mean_gain": tau / row["steps"]}
        for row in best_trials(rows).values()
    ]
    keys = (*COUNTS, *finals, "best_value", "mean_gain", *ADASCALE)
    return {
        **{key: rows[0][key] for key in ("arm", "echo_variant", "echo_factor")},
        "searched": len(all_ended) > len(ended),
        "runs": len(ended),
        "diverged": sum(row["status"] == Status.DIVERGED for row in rows),
        "failed": sum(row["status"] == Status.FAILED for row in rows),
        **at_edge(ended),
        **{key: spread([row[key] for row in ended if row.get(key) is not None]) for key in keys},
    }


def num_best(arm: Row) -> int:
    """The number of searches with a best point in an arm of ``outcome`` or ``ends``."""
    return int(arm["reached"] if "reached" in arm else arm["runs"])


def at_edge(best: list[Row]) -> dict[str, dict[str, int]]:
    """``at_edge``: per axis, the number of searches with a best point in the outermost 5 %.

    Args:
        best: the best trial of each search of an arm. Without positions the result is empty.
    """
    keys = dict.fromkeys(key for row in best for key in row.get("positions") or {})
    counts = {key: sum(not EDGE <= row["positions"][key] <= 1 - EDGE for row in best) for key in keys}
    return {"at_edge": counts} if counts else {}


def _spread_with_interval(values: list[float]) -> dict[str, float] | None:
    found = spread(values)
    interval = mean_interval(values) if len(values) > 1 else None
    return found if found is None or interval is None else {**found, "low": interval[0], "high": interval[1]}


def spread(values: list[float]) -> dict[str, float] | None:
    """Mean and extremes; None without values."""
    return {"mean": fmean(values), "min": min(values), "max": max(values)} if values else None
