"""From trials to arms: the paper's protocol (section 3) as a pure function over rows.

A row is one trial, as a flat dict; ``trials.json`` of a sweep is a list of them. Its keys::

    experiment, task, arm, echo_variant, echo_factor     what was compared
    baseline                                             the arm it names for comparison, or null
    batch_size, shuffle_buffer, batch_shuffle_buffer     what figures draw costs against
    repeat, index                                        which search of the arm, which point of the search
    status                                               reached, budget_spent, diverged, failed, ...
    counted                                              whether it is among the search's non-divergent budget
    seed, hyperparameters                                the point: {key: value}
    positions                                            {key: 0 to 1}: where on its axes the point lies
    target_metric, target_value
    to_target_fresh_examples, to_target_steps, to_target_train_time_s      null where the target was missed
    best_value, fresh_examples, steps, train_time_s, R                     at the end of the run
"""

import re
from statistics import fmean
from typing import Any

from adaecho.records.statistics import cost_ratio, mean_interval

Row = dict[str, Any]
# What a run ends with; one that failed, was preempted or is running is still to be done.
FINISHED = frozenset({"reached", "budget_spent", "diverged", "pruned"})
COSTS = ("fresh_examples", "steps", "train_time_s")
EDGE = 0.05  # of an axis, at either end: the paper checked that no best point lay there (section 3)
_SHARED = ("batch_size", "shuffle_buffer")  # an arm's with its baseline's; a buffer of batches is the echo's
# What every row holds, of whatever version; figures refuse a table without.
COLUMNS = (
    *("experiment", "task", "arm", "echo_variant", "echo_factor", "repeat", "index", "status", "counted"),
    *("target_metric", "target_value", "best_value", *(f"to_target_{cost}" for cost in COSTS)),
)
SETTINGS = ("baseline", *_SHARED, "batch_shuffle_buffer")


def outcome(rows: list[Row]) -> list[Row]:
    """One dict per arm, in the order of first appearance.

    Each search is represented by its best counted trial; the costs of these are averaged over the searches
    that reached the target, and their extremes kept (the bars and error bars of the paper's Fig. 3).

    Returns:
        Per arm: ``arm``, ``echo_variant``, ``echo_factor`` and what else of ``SETTINGS`` its rows hold;
        ``searches`` and how many of them ``reached`` the target; ``trials`` that count, and how many of these
        ``missed`` the target; how many others ``diverged`` (replaced, not counted) or ``failed``;
        ``at_edge``, see the function;
        ``fresh_examples``, ``steps`` and ``train_time_s`` to the target as {mean, min, max}, with ``low`` and
        ``high``, the mean's 95 % interval, where several searches reached it, null where none did; its
        ``baseline``; ``ratio_to_baseline``, of geometric means of fresh examples, null without a baseline
        that reached the target, and ``ratio_low`` and ``ratio_high``, its 95 % interval, null for the
        baseline itself and with fewer than two searches on either side; see
        ``records.statistics.cost_ratio``.
    """
    best = best_trials(rows)
    by_arm = _by_arm(rows)
    arms = [_arm(rows_of_arm, best) for rows_of_arm in by_arm.values()]
    costs = {
        name: [row["to_target_fresh_examples"] for (arm, _), row in best.items() if arm == name]
        for name in by_arm
    }
    for arm in arms:
        arm["baseline"] = baseline_of(arm, arms)
        ours, theirs = costs[arm["arm"]], costs.get(arm["baseline"] or "", [])
        ratio = cost_ratio(ours, theirs) if ours and theirs else None
        arm["ratio_to_baseline"] = ratio and ratio.value
        itself = arm["arm"] == arm["baseline"]
        arm["ratio_low"], arm["ratio_high"] = (None, None) if itself or not ratio else (ratio.low, ratio.high)
    return arms


def baseline_of(arm: Row, arms: list[Row]) -> str | None:
    """The arm that another is compared with: its name, or None where that can't be told.

    It is the one that the arm names; else, of those without echoing (or else of factor 1), the one with the
    arm's batch size and shuffle buffer; else the one called baseline; else the only one without echoing.
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


def best_trials(rows: list[Row]) -> dict[tuple[str, int], Row]:
    """The counted trial of each (arm, repeat) with fewest fresh examples to the target, ties by index.

    A search that never reached the target has no entry.
    """
    best: dict[tuple[str, int], Row] = {}
    for row in rows:
        if not row["counted"] or row["to_target_fresh_examples"] is None:
            continue
        key = (row["arm"], row["repeat"])
        if key not in best or _cost(row) < _cost(best[key]):
            best[key] = row
    return best


def arm_of_winner(name: str) -> str:
    """The arm whose search was won by what an arm of this name runs again (``<arm>_search0``, ...)."""
    return re.sub(r"_search\d+$", "", name)


def _cost(row: Row) -> tuple[int, int]:
    return row["to_target_fresh_examples"], row["index"]


def _by_arm(rows: list[Row]) -> dict[str, list[Row]]:
    arms: dict[str, list[Row]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    return arms


def _arm(rows: list[Row], best: dict[tuple[str, int], Row]) -> Row:
    first = rows[0]
    reached = [row for (arm, _), row in best.items() if arm == first["arm"]]
    counted = [row for row in rows if row["counted"]]
    return {
        **{key: first[key] for key in ("arm", "echo_variant", "echo_factor", *SETTINGS) if key in first},
        "searches": len({row["repeat"] for row in rows}),
        "reached": len(reached),
        "trials": len(counted),
        "diverged": sum(row["status"] == "diverged" for row in rows),
        "missed": sum(row["to_target_fresh_examples"] is None for row in counted),
        "failed": sum(row["status"] == "failed" for row in rows),
        **at_edge(reached),
        **{cost: _spread_with_interval([row[f"to_target_{cost}"] for row in reached]) for cost in COSTS},
    }


def at_edge(best: list[Row]) -> dict[str, dict[str, int]]:
    """``at_edge``: of how many searches the best point lies in the outermost 5 % of an axis, by its key.

    Args:
        best: the best trial of each search of an arm; without positions (no search) nothing is said.
    """
    keys = dict.fromkeys(key for row in best for key in row.get("positions") or {})
    counts = {key: sum(not EDGE <= row["positions"][key] <= 1 - EDGE for row in best) for key in keys}
    return {"at_edge": counts} if counts else {}


def _spread_with_interval(values: list[float]) -> dict[str, float] | None:
    found = spread(values)
    interval = mean_interval(values) if len(values) > 1 else None
    return found if found is None or interval is None else {**found, "low": interval[0], "high": interval[1]}


def spread(values: list[float]) -> dict[str, float] | None:
    """Mean and extremes; None of nothing."""
    return {"mean": fmean(values), "min": min(values), "max": max(values)} if values else None
