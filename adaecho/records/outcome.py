"""Compare the arms of an experiment by their trials, following the protocol of the paper (section 3).

An arm is one configuration under comparison, which is tuned by one or more independent searches. A search
consists of several trials, each with a different point (set of hyperparameter values).

If the experiment has a target value for a metric, ``outcome`` compares how many fresh examples each arm
needed to reach it. If there is no target, ``ends`` compares the metrics at the end of the budget.
``best_trials`` chooses the best trial of each search, which represents the search.

A row describes one trial as a flat dict with these keys::

    experiment, task, arm, echo_variant, echo_factor     which configuration the trial belongs to
    baseline                                             name of the arm to compare with, or null
    batch_size, shuffle_buffer, batch_shuffle_buffer     settings that figures use as axes
    repeat, index                                        number of the search, number of the point in it
    status                                               reached, budget_spent, diverged, failed, ...
    counted                                              whether it is among the search's non-divergent trials
    seed, hyperparameters                                the seed, and the point as {key: value}
    run_id                                               digest of the config; see ``config.identity``
    trials_left                                          number of unfinished trials in the same search
    positions                                            {key: 0 to 1}: position of the point on each axis
    target_metric, target_value                          the target
    target_direction                                     min or max; only for metrics with unknown names
    to_target_fresh_examples, to_target_steps, to_target_train_time_s    cost; null if the target was missed
    best_value                                           best value of the metric at any evaluation
    fresh_examples, steps, train_time_s, R               values at the end of the run

Without a target, a row also has these keys, with the values at the end of the budget::

    trained_examples                                     steps times batch size, so repeats are included
    final_<metric>                                       one key for each metric of the task
    gain, gradient_variance, gradient_square             AdaScale's estimates at the last step
    scale_invariant_steps                                AdaScale's tau at the last step
"""

import math
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from adaecho.records.statistics import cost_ratio, mean_interval
from adaecho.records.trials import Status

Row = dict[str, Any]
# For these metrics, lower values are better. For all others, higher values are better, unless the row has a
# target_direction.
LESS_IS_BETTER = frozenset({"cross_entropy", "loss", "perplexity"})
COSTS = ("fresh_examples", "steps", "train_time_s")
TARGET = ("target_metric", "target_value", "target_in_a_row")  # the oldest records lack target_in_a_row
COUNTS = ("fresh_examples", "steps", "trained_examples")
ADASCALE = ("scale_invariant_steps", "gain", "gradient_variance", "gradient_square")
# The share of an axis at each end that counts as its edge. In the paper, no best point lay there (section 3),
# so a best point at the edge suggests that the axis is too narrow.
EDGE = 0.05
_SHARED = ("batch_size", "shuffle_buffer")  # an arm and its default baseline must agree in these settings
SETTINGS = ("baseline", *_SHARED, "batch_shuffle_buffer")


def outcome(rows: list[Row]) -> list[Row]:
    """Return the cost of each arm to reach the target, and this cost relative to the arm's baseline."""
    # There is one dict per arm, in order of first appearance. _arm and _ratio explain the keys.
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
    """Return the distinct targets of trials as (task, metric, value, consecutive evaluations)."""
    metric, value, in_a_row = TARGET
    return {(row["task"], row[metric], row[value], row.get(in_a_row) or 1) for row in rows}


class Bounds(NamedTuple):
    """Lower and upper bounds on the cost of a search; equal if the search reached the target."""

    low: float
    high: float


def searched_costs(rows: Sequence[Row], cost: str = "fresh_examples") -> list[Bounds]:
    """Return lower and upper bounds on what each search spent to reach the target."""
    # rows are the trials of one arm. cost is one of COSTS, or s_per_fresh_example (training time per fresh
    # example).
    found = []
    for _, search in sorted(searches(rows).items()):
        counted = [row for row in search if row["counted"]]
        best = next(iter(best_trials(search).values()), None)
        if best is not None and counted_cost(best) is not None:
            spent = _cost(best, "to_target_", cost)
            found.append(Bounds(spent, spent))
        elif cost == "s_per_fresh_example":  # a rate, which is known even if the target was missed
            rates = [_cost(row, "", cost) for row in counted]
            found.append(Bounds(min(rates, default=0), max(rates, default=math.inf)))
        else:
            # The search missed the target, so its cost is at least the smallest amount that a trial spent.
            # The bound is 0 while trials are left, because they may reach the target at a lower cost.
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
    """Return the keys ``ratio_*`` of ``outcome``, from the costs of an arm and of its baseline."""
    # The ratio of geometric mean costs in fresh examples, and its 95% confidence interval; null if unknown.
    unknown = {"ratio_to_baseline": None, "ratio_low": None, "ratio_high": None}
    missed = [[math.isinf(cost.high) for cost in costs] for costs in (ours, theirs)]
    if all(map(any, missed)) or any(map(all, missed)):
        return unknown
    least = [[cost.low for cost in costs] for costs in (ours, theirs)]
    if not all(least[0] + least[1]):  # a search without a counted trial
        return unknown
    ratio = cost_ratio(*least)
    if any(map(any, missed)):
        # Some searches of one of the two arms missed the target, so the ratio is only a bound.
        bound = "at least" if any(missed[0]) else "at most"
        return unknown | {"ratio_to_baseline": ratio.value, "ratio_bound": bound}
    return {"ratio_to_baseline": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}


def ratio_words(arm: Row) -> str:
    """Format an arm's cost ratio, for example ``0.72``, or ``>0.72`` if it is at least 0.72."""
    # arm is an item of outcome's result, and its ratio is known.
    sign = {"at least": ">", "at most": "<"}.get(arm.get("ratio_bound", ""), "")
    return f"{sign}{arm['ratio_to_baseline']:.2f}"


def baseline_of(arm: Row, arms: list[Row]) -> str | None:
    """Return the name of the baseline of an arm, or None if the choice is ambiguous."""
    # arms are all arms with the same target.
    if arm.get("baseline"):  # the config names the baseline
        return str(arm["baseline"])
    # Otherwise compare with an arm without echoing or, if there is none, with echoing factor 1.
    plain = [other for other in arms if other["echo_variant"] == "none"]
    plain = plain or [other for other in arms if other["echo_factor"] == 1]
    alike = [other for other in plain if all(other.get(key) == arm.get(key) for key in _SHARED)]
    named = [other for other in arms if other["arm"] == "baseline"]
    # Prefer an arm with the same batch size and shuffle buffer, then an arm named "baseline". A choice counts
    # only if exactly one arm fits.
    for candidates in (alike, named, plain):
        if len(candidates) == 1:
            return str(candidates[0]["arm"])
    return None


def without_target(rows: list[Row]) -> bool:
    """Return whether the experiment has no target, so that every run spends its whole budget."""
    return all(row["target_value"] is None for row in rows)


def best_trials(rows: list[Row]) -> dict[tuple[str, int], Row]:
    """Return the best trial of each search, in a dict with keys (arm, number of the search)."""
    # With a target, the best trial reached the target with the fewest fresh examples. Without a target, it
    # has the best metric at any evaluation (paper, Fig. 8), among the trials that spent their whole budget.
    # A search without a best trial is left out.
    merit = _distance_at_end if without_target(rows) else counted_cost
    best = {}
    for key, search in searches(rows).items():
        known = [(value, row["index"], row) for row in search if (value := merit(row)) is not None]
        if known:
            best[key] = min(known, key=lambda one: one[:2])[2]
    return best


def searches(rows: Iterable[Row]) -> dict[tuple[str, int], list[Row]]:
    """Group trials by search, that is, by (arm, repeat), in order of first appearance."""
    return _grouped(rows, itemgetter("arm", "repeat"))


def best_value(search: Iterable[Row]) -> float | None:
    """Return the best value of the target's metric among all counted trials, or None."""
    best = min((row for row in search if row["counted"]), key=_distance, default=None)
    return None if best is None else best["best_value"]


def counted_cost(row: Row) -> int | None:
    """Return a trial's fresh examples to the target; None if it missed the target or does not count."""
    return row["to_target_fresh_examples"] if row["counted"] else None


def _distance_at_end(row: Row) -> float | None:
    return _distance(row) if row["status"] == Status.BUDGET_SPENT else None


def _distance(row: Row) -> float:
    """Return a sort key for the best value of a trial. Smaller keys are better."""
    value: float | None = row["best_value"]
    direction = row.get("target_direction") or usual_direction(row["target_metric"])
    return math.inf if value is None else value if direction == "min" else -value


def usual_direction(metric: str) -> str:
    """Return ``min`` if a lower value of a metric is better, else ``max``, judging by its name."""
    return "min" if metric in LESS_IS_BETTER else "max"


def cost_to_target(summary: Row) -> int | None:
    """Return how many fresh examples a run needed to reach its target, or None if it missed it."""
    return (summary.get("to_target") or {}).get("fresh_examples")


def lowest(costs: Iterable[int | None]) -> int | None:
    """Return the lowest cost that is not None, or None if all are None."""
    return min((cost for cost in costs if cost is not None), default=None)


def by_arm(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows or curves by arm, in order of first appearance."""
    return _grouped(rows, itemgetter("arm"))


def _grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _arm(rows: list[Row], best: dict[tuple[str, int], Row]) -> Row:
    first = rows[0]
    reached = [row for (arm, _), row in best.items() if arm == first["arm"]]
    counted = [row for row in rows if row["counted"]]
    settings = [key for key in SETTINGS if key in first and not _is_searched(key, rows)]
    return {
        **{key: first[key] for key in ("arm", "echo_variant", "echo_factor", *settings)},
        "searches": len({row["repeat"] for row in rows}),
        "reached": len(reached),  # number of searches that reached the target
        "trials": len(counted),  # not counting diverged trials
        "diverged": sum(row["status"] == Status.DIVERGED for row in rows),  # number of trials
        "missed": sum(row["to_target_fresh_examples"] is None for row in counted),  # number of trials
        "failed": sum(row["status"] == Status.FAILED for row in rows),  # number of trials
        **at_edge(reached),
        # mean, min and max over the searches that reached the target (paper, Fig. 3), and the 95% confidence
        # interval of the mean, from low to high
        **{cost: _spread_with_interval([row[f"to_target_{cost}"] for row in reached]) for cost in COSTS},
    }


def _is_searched(key: str, rows: list[Row]) -> bool:
    """Return whether a setting was searched, or whether its value varies within the arm."""
    axes = {name.rpartition(".")[2] for row in rows for name in row.get("positions") or {}}
    return key in axes or len({row.get(key) for row in rows}) > 1


def ends(rows: list[Row]) -> list[Row]:
    """Return the results of each arm at the end of its budget, for an experiment without a target."""
    # There is one dict per arm, in order of first appearance. _arm_at_its_end explains the keys.
    finals = [*dict.fromkeys(key for row in rows for key in row if key.startswith("final_"))]
    return [_arm_at_its_end(rows_of_arm, finals) for rows_of_arm in by_arm(rows).values()]


def _arm_at_its_end(rows: list[Row], finals: list[str]) -> Row:
    # The results are those of the best trial of each search. finals contains the names of the final metrics.
    all_ended = [row for row in rows if row["status"] == Status.BUDGET_SPENT]
    ended = [
        row if (tau := row.get("scale_invariant_steps")) is None else {**row, "mean_gain": tau / row["steps"]}
        for row in best_trials(rows).values()
    ]
    keys = (*COUNTS, *finals, "best_value", "mean_gain", *ADASCALE)
    return {
        **{key: rows[0][key] for key in ("arm", "echo_variant", "echo_factor")},
        "searched": len(all_ended) > len(ended),  # whether searches have several trials
        "runs": len(ended),  # number of searches with a trial that spent its budget
        "diverged": sum(row["status"] == Status.DIVERGED for row in rows),
        "failed": sum(row["status"] == Status.FAILED for row in rows),
        **at_edge(ended),
        # mean, min and max over these searches; mean_gain is AdaScale's tau divided by the number of steps
        **{key: spread([row[key] for row in ended if row.get(key) is not None]) for key in keys},
    }


def num_best(arm: Row) -> int:
    """Return how many searches of an arm reached the target or, without a target, spent a budget."""
    return int(arm["reached"] if "reached" in arm else arm["runs"])


def at_edge(best: list[Row]) -> dict[str, dict[str, int]]:
    """Count how often the best value of each hyperparameter lies in the first or last 5% of its range.

    Args:
        best: the best trials of one arm, one for each search.

    Returns:
        ``{"at_edge": {key: count}}``, or an empty dict if no hyperparameter was searched.
    """
    keys = dict.fromkeys(key for row in best for key in row.get("positions") or {})
    counts = {key: sum(not EDGE <= row["positions"][key] <= 1 - EDGE for row in best) for key in keys}
    return {"at_edge": counts} if counts else {}


def _spread_with_interval(values: list[float]) -> dict[str, float] | None:
    found = spread(values)
    interval = mean_interval(values) if len(values) > 1 else None
    return found if found is None or interval is None else {**found, "low": interval[0], "high": interval[1]}


def spread(values: list[float]) -> dict[str, float] | None:
    """Return the mean, minimum and maximum of values, or None if there are no values."""
    return {"mean": fmean(values), "min": min(values), "max": max(values)} if values else None
