"""Compare the arms of an experiment by their trials, following the protocol of the paper (section 3).

An arm is one configuration under comparison. Each arm is tuned by one or more independent searches. A search
consists of several trials, each with a different point (set of hyperparameter values).

If the experiment has a target value for a metric, ``outcome`` compares how many fresh examples each arm
needed to reach it. If there is no target, ``ends`` compares the metrics at the end of the budget. Both
functions use ``best_trials`` to choose the trial that represents each search. All functions in this module
are pure: they take rows and read no files.

A row describes one trial as a flat dict with these keys::

    experiment, task, arm, echo_variant, echo_factor     which configuration the trial belongs to
    baseline                                             name of the arm to compare with, or null
    batch_size, shuffle_buffer, batch_shuffle_buffer     settings that figures use as axes
    repeat, index                                        number of the search, number of its point
    status                                               reached, budget_spent, diverged, failed, ...
    counted                                              is it one of the search's non-divergent trials?
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
# For these metrics a lower value is better. For all others a higher value is better, unless the row has
# a target_direction.
LESS_IS_BETTER = frozenset({"cross_entropy", "loss", "perplexity"})
COSTS = ("fresh_examples", "steps", "train_time_s")
TARGET = ("target_metric", "target_value", "target_in_a_row")  # the oldest records lack target_in_a_row
COUNTS = ("fresh_examples", "steps", "trained_examples")
ADASCALE = ("scale_invariant_steps", "gain", "gradient_variance", "gradient_square")
# The outermost share of an axis, at each end, that counts as its edge. In the paper no best point lay there
# (section 3), so a best point at the edge suggests that the axis is too narrow.
EDGE = 0.05
_SHARED = ("batch_size", "shuffle_buffer")  # an arm and its default baseline must agree in these settings
SETTINGS = ("baseline", *_SHARED, "batch_shuffle_buffer")


def outcome(rows: list[Row]) -> list[Row]:
    """Summarize the cost of each arm to reach the target, and compare each arm with its baseline.

    An arm is one of the compared configurations. It is tuned by one or more searches, each with several
    trials (training runs). The target is a value of a metric. The cost of a search is that of its cheapest
    trial that reached the target. Means, minima and maxima are taken over the searches that reached the
    target, as in the paper's Fig. 3.

    Returns:
        One dict per arm, in order of first appearance in ``rows``. Its keys are:

        * ``arm``, ``echo_variant`` and ``echo_factor``, and every key of ``SETTINGS`` that was not searched.
        * ``searches``: the number of searches. ``reached``: how many of them reached the target.
        * ``trials``: the number of counted trials. ``missed``: how many of them missed the target.
          ``diverged`` and ``failed``: the number of trials with this status.
        * ``at_edge``: for each axis, the number of best points near its ends (see the function ``at_edge``).
        * ``fresh_examples``, ``steps`` and ``train_time_s``: the cost of reaching the target, each as
          {mean, min, max}. If at least two searches reached the target, ``low`` and ``high`` give the 95 %
          confidence interval of the mean. Null if no search reached the target.
        * ``baseline``: the name of the arm's baseline.
        * ``ratio_to_baseline``: the ratio of the geometric mean costs in fresh examples of the arm and its
          baseline, with the 95 % confidence interval ``ratio_low`` to ``ratio_high`` (see
          ``records.statistics.cost_ratio``). The ratio is null if the arm has no baseline, or if no search of
          the arm or of its baseline reached the target. The interval is null for the baseline itself, and if
          either arm has fewer than two searches.
        * ``ratio_bound``: only present if some searches of one of the two arms missed the target. Only a
          lower bound of their cost is known. The true ratio is then ``at least`` or ``at most`` the given
          value, and there is no interval. If both arms have searches that missed the target, the ratio is
          null.
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
    """Return the distinct targets of trials, each as (task, metric, value, consecutive evaluations)."""
    metric, value, in_a_row = TARGET
    return {(row["task"], row[metric], row[value], row.get(in_a_row) or 1) for row in rows}


class Bounds(NamedTuple):
    """The range in which the cost of a hyperparameter search lies, for example in fresh examples.

    The cost is what the search needed to reach the target value of its metric. If the search reached the
    target, ``low`` and ``high`` are equal. Otherwise usually only ``low`` is known, and ``high`` is infinite.
    """

    low: float
    high: float


def searched_costs(rows: Sequence[Row], cost: str = "fresh_examples") -> list[Bounds]:
    """Return the cost of each search of an arm to reach the target, as a lower and an upper bound.

    If the search reached the target, both bounds are the cost of its best trial (see ``best_trials``). If it
    missed the target, the lower bound is the smallest amount that any of its counted trials spent, and the
    upper bound is infinite. The lower bound is 0 while trials are unfinished.

    The cost ``s_per_fresh_example`` is a rate, which is known even if the target was missed. The bounds are
    then the smallest and the largest rate of the counted trials.

    Args:
        rows: the trials of one arm (compared configuration).
        cost: ``fresh_examples``, ``steps``, ``train_time_s``, or ``s_per_fresh_example`` (training time in
            seconds divided by the number of fresh examples).
    """
    found = []
    for _, search in sorted(searches(rows).items()):
        counted = [row for row in search if row["counted"]]
        best = next(iter(best_trials(search).values()), None)
        if best is not None and counted_cost(best) is not None:
            spent = _cost(best, "to_target_", cost)
            found.append(Bounds(spent, spent))
        elif cost == "s_per_fresh_example":  # known even if the target was missed
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
    """Return the keys ``ratio_*`` of ``outcome``, from the costs of an arm and of its baseline."""
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
    """Format the ratio of an arm's cost to its baseline's cost, for example as ``0.72``.

    If some searches missed the target, only a bound of the ratio is known. The text is then ``>0.72`` for a
    lower bound or ``<0.72`` for an upper bound.

    Args:
        arm: an arm as returned by ``outcome``, whose ratio is not null.
    """
    sign = {"at least": ">", "at most": "<"}.get(arm.get("ratio_bound", ""), "")
    return f"{sign}{arm['ratio_to_baseline']:.2f}"


def baseline_of(arm: Row, arms: list[Row]) -> str | None:
    """Return the name of the baseline with which an arm is compared, or None if it is ambiguous.

    An arm may name its baseline under ``baseline``. Otherwise, the candidates are the arms without echoing
    or, if there are none, the arms with echoing factor 1. These rules are tried in order:

    1. the only candidate with the same batch size and shuffle buffer;
    2. the arm that is named ``baseline``;
    3. the only candidate.

    Args:
        arm: the arm for which a baseline is wanted.
        arms: the arms with the same target.
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
    """Return whether the experiment has no target, in which case every run spends its whole budget."""
    return all(row["target_value"] is None for row in rows)


def best_trials(rows: list[Row]) -> dict[tuple[str, int], Row]:
    """Select the best trial (training run) of each search.

    If there is a target, the best trial is the counted trial that reached it with the fewest fresh examples.
    A search that missed the target has no best trial, and is left out. If there is no target, the best trial
    is the one with the best metric at any evaluation (paper, Fig. 8). Only trials that spent their whole
    budget are then considered.

    Returns:
        A dict from (arm, repeat), which identifies a search, to the row of the best trial.
    """
    merit = _distance_at_end if without_target(rows) else counted_cost
    best = {}
    for key, search in searches(rows).items():
        known = [(value, row["index"], row) for row in search if (value := merit(row)) is not None]
        if known:
            best[key] = min(known, key=lambda one: one[:2])[2]
    return best


def searches(rows: Iterable[Row]) -> dict[tuple[str, int], list[Row]]:
    """Group the rows of trials by search, that is by arm and repeat, in the order of first appearance."""
    return _grouped(rows, itemgetter("arm", "repeat"))


def best_value(search: Iterable[Row]) -> float | None:
    """Return the best value of the target's metric at any evaluation of any counted trial, or None."""
    best = min((row for row in search if row["counted"]), key=_distance, default=None)
    return None if best is None else best["best_value"]


def counted_cost(row: Row) -> int | None:
    """Return the number of fresh examples that a trial needed to reach the target.

    The result is None if the trial missed the target or is not marked ``counted``.
    """
    return row["to_target_fresh_examples"] if row["counted"] else None


def _distance_at_end(row: Row) -> float | None:
    return _distance(row) if row["status"] == Status.BUDGET_SPENT else None


def _distance(row: Row) -> float:
    """Return a sort key for the best value of a trial, such that a smaller key is better."""
    value: float | None = row["best_value"]
    direction = row.get("target_direction") or usual_direction(row["target_metric"])
    return math.inf if value is None else value if direction == "min" else -value


def usual_direction(metric: str) -> str:
    """Return whether a metric is to be minimized (``min``) or maximized (``max``), judging by its name."""
    return "min" if metric in LESS_IS_BETTER else "max"


def cost_to_target(summary: Row) -> int | None:
    """Return the number of fresh examples that a run needed to reach its target, or None if it missed it."""
    return (summary.get("to_target") or {}).get("fresh_examples")


def lowest(costs: Iterable[int | None]) -> int | None:
    """Return the lowest cost that is not None, or None if all are None."""
    return min((cost for cost in costs if cost is not None), default=None)


def by_arm(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows or curves by arm (compared configuration), in the order of first appearance."""
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
        "reached": len(reached),
        "trials": len(counted),
        "diverged": sum(row["status"] == Status.DIVERGED for row in rows),
        "missed": sum(row["to_target_fresh_examples"] is None for row in counted),
        "failed": sum(row["status"] == Status.FAILED for row in rows),
        **at_edge(reached),
        **{cost: _spread_with_interval([row[f"to_target_{cost}"] for row in reached]) for cost in COSTS},
    }


def _is_searched(key: str, rows: list[Row]) -> bool:
    """Return whether a setting was searched. Its value then varies and does not describe the arm."""
    axes = {name.rpartition(".")[2] for row in rows for name in row.get("positions") or {}}
    return key in axes or len({row.get(key) for row in rows}) > 1


def ends(rows: list[Row]) -> list[Row]:
    """Summarize the results of each arm at the end of its budget, for an experiment without a target.

    An arm is one of the compared configurations. It is tuned by one or more searches, each with several
    trials (training runs). The results are those of the best trial of each search (see ``best_trials``).

    Returns:
        One dict per arm, in order of first appearance in ``rows``. Its keys are:

        * ``arm``, ``echo_variant`` and ``echo_factor``.
        * ``searched``: whether the arm has searches with several trials.
        * ``runs``: the number of searches with a trial that spent its budget. ``diverged`` and ``failed``:
          the number of trials with this status.
        * ``fresh_examples``, ``steps``, ``trained_examples``, ``final_<metric>``, ``best_value`` (the best
          value at any evaluation), ``mean_gain`` (AdaScale's scale-invariant steps tau divided by steps) and
          AdaScale's other estimates: each as {mean, min, max} over the runs, or null without values.
        * ``at_edge``: as in ``outcome``.
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
    """Return how many hyperparameter searches of an arm have a best trial.

    With a target, these are the searches that reached it. Without a target, they are the searches in which
    at least one trial spent its whole budget.

    Args:
        arm: a dict as returned by ``outcome`` or ``ends``.
    """
    return int(arm["reached"] if "reached" in arm else arm["runs"])


def at_edge(best: list[Row]) -> dict[str, dict[str, int]]:
    """Count, for each searched hyperparameter, how often its best value lies near an end of its range.

    A value is near an end if it lies in the first or last 5 % of the range, on the scale of the search (for
    example logarithmic). Many such values suggest that the range is too narrow.

    Args:
        best: the best trial of each search of one arm.

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
