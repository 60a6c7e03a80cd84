"""From trials to arms: the paper's protocol (section 3) as pure functions over rows.

Arms are compared by what a target cost (``outcome``) or, where none was set, by what a budget bought
(``ends``). What the best trial of a search is, ``best_trials`` says for both.

A row is one trial, as a flat dict; ``trials.json`` of a sweep is a list of them. Its keys::

    experiment, task, arm, echo_variant, echo_factor     what was compared
    baseline                                             the arm it names for comparison, or null
    batch_size, shuffle_buffer, batch_shuffle_buffer     what figures draw costs against
    repeat, index                                        which search of the arm, which point of the search
    status                                               reached, budget_spent, diverged, failed, ...
    counted                                              whether it is among the search's non-divergent budget
    seed, hyperparameters                                the point: {key: value}
    run_id                                               of the whole config; see ``config.identity``
    trials_left                                          of its search, where some have not ended
    positions                                            {key: 0 to 1}: where on its axes the point lies
    target_metric, target_value; target_direction        min or max, where the metric's name doesn't tell
    to_target_fresh_examples, to_target_steps, to_target_train_time_s      null where the target was missed
    best_value, fresh_examples, steps, train_time_s, R                     at the end of the run

and of those without a target also, at the end of the budget::

    trained_examples                                  steps times batch size: repeats count
    final_<metric>                                    of each metric of the task, where the budget ended
    gain, gradient_variance, gradient_square,         AdaScale's, of the last step; scale_invariant_steps
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
# Metrics of which less is better; of all others (accuracy, average precision) more is, unless a row tells.
LESS_IS_BETTER = frozenset({"cross_entropy", "loss", "perplexity"})
COSTS = ("fresh_examples", "steps", "train_time_s")
TARGET = ("target_metric", "target_value", "target_in_a_row")  # the first records have no last one
COUNTS = ("fresh_examples", "steps", "trained_examples")
ADASCALE = ("scale_invariant_steps", "gain", "gradient_variance", "gradient_square")
EDGE = 0.05  # of an axis, at either end: the paper checked that no best point lay there (section 3)
_SHARED = ("batch_size", "shuffle_buffer")  # an arm's with its baseline's; a buffer of batches is the echo's
SETTINGS = ("baseline", *_SHARED, "batch_shuffle_buffer")


def outcome(rows: list[Row]) -> list[Row]:
    """One dict per arm, in the order of first appearance.

    Each search is represented by its best counted trial; the costs of these are averaged over the searches
    that reached the target, and their extremes kept (the bars and error bars of the paper's Fig. 3).

    Returns:
        Per arm: ``arm``, ``echo_variant``, ``echo_factor`` and what else of ``SETTINGS`` its rows hold,
        unless it was searched;
        ``searches`` and how many of them ``reached`` the target; ``trials`` that count, and how many of these
        ``missed`` the target; how many others ``diverged`` (replaced, not counted) or ``failed``;
        ``at_edge``, see the function;
        ``fresh_examples``, ``steps`` and ``train_time_s`` to the target as {mean, min, max}, with ``low`` and
        ``high``, the mean's 95 % interval, where several searches reached it, null where none did; its
        ``baseline``; ``ratio_to_baseline``, of geometric means of fresh examples, null without a baseline
        that reached the target, and ``ratio_low`` and ``ratio_high``, its 95 % interval, null for the
        baseline itself and with fewer than two searches on either side; see
        ``records.statistics.cost_ratio``. Where searches of one of the two missed the target, each cost at
        least what it read: ``ratio_bound`` says that the ratio is ``at least`` or ``at most`` that, without
        an interval, and where searches of both missed it is null.
    """
    best = best_trials(rows)
    arms = [_arm(rows_of_arm, best) for rows_of_arm in by_arm(rows).values()]
    costs = {name: searched_costs(rows_of_arm) for name, rows_of_arm in by_arm(rows).items()}
    targets = {name: targets_of(rows_of_arm) for name, rows_of_arm in by_arm(rows).items()}
    for arm in arms:
        comparable = [other for other in arms if targets[other["arm"]] == targets[arm["arm"]]]
        arm["baseline"] = baseline_of(arm, comparable)
        if targets.get(arm["baseline"], targets[arm["arm"]]) != targets[arm["arm"]]:  # it names another's
            arm["baseline"] = None
        if arm["arm"] == arm["baseline"]:
            value = 1.0 if arm["reached"] else None
            arm |= {"ratio_to_baseline": value, "ratio_low": None, "ratio_high": None}
        else:
            arm |= _ratio(costs[arm["arm"]], costs.get(arm["baseline"] or "", []))
    return arms


def targets_of(rows: Iterable[Row]) -> set[tuple[Any, ...]]:
    """The targets that rows went to: task, metric, value, evaluations in a row. Costs compare within one."""
    metric, value, in_a_row = TARGET
    return {(row["task"], row[metric], row[value], row.get(in_a_row) or 1) for row in rows}


class Bounds(NamedTuple):
    """The bounds of a search's cost: equal where it was read off, ``high`` infinite where it missed."""

    low: float
    high: float


def searched_costs(rows: Sequence[Row], cost: str = "fresh_examples") -> list[Bounds]:
    """What each search's best trial, that with the fewest fresh examples, took to the target.

    A search that missed its target costs at least what its shortest trial had spent; of one with trials left
    nothing is known.

    Args:
        rows: of one arm.
        cost: fresh_examples, steps, train_time_s, or s_per_fresh_example, the ratio of two of these.
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
    """The ratio of an arm's costs to its baseline's, with its interval, or what bounds it."""
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
    """The ratio of an arm of ``outcome`` to its baseline: ``0.72``, of a bound ``>0.72`` or ``<0.72``."""
    sign = {"at least": ">", "at most": "<"}.get(arm.get("ratio_bound", ""), "")
    return f"{sign}{arm['ratio_to_baseline']:.2f}"


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


def without_target(rows: list[Row]) -> bool:
    """Whether the rows are of an experiment whose runs all go to the end of their budgets."""
    return all(row["target_value"] is None for row in rows)


def best_trials(rows: list[Row]) -> dict[tuple[str, int], Row]:
    """The best trial of each search (arm and repeat), ties by index.

    It is the counted trial with fewest fresh examples to the target; a search that never reached it has no
    entry. Without a target it is the one with the best value of the target's metric at any evaluation (paper,
    Fig. 8), of those that came to the end of their budgets; one without an evaluation comes last.
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
    """Fresh examples to the target of a trial that is among its search's; None if it missed, or is not."""
    return row["to_target_fresh_examples"] if row["counted"] else None


def _distance_at_end(row: Row) -> float | None:
    return _distance(row) if row["status"] == Status.BUDGET_SPENT else None


def _distance(row: Row) -> float:
    """Orders rows by their best value: the less the better."""
    value: float | None = row["best_value"]
    direction = row.get("target_direction") or _by_name(row["target_metric"])
    return math.inf if value is None else value if direction == "min" else -value


def untold(metric: str, direction: str) -> Row:
    """What a row must hold so that its metric's direction is known: nothing where the name tells."""
    return {} if direction == _by_name(metric) else {"target_direction": direction}


def _by_name(metric: str) -> str:
    return "min" if metric in LESS_IS_BETTER else "max"


def cost_to_target(summary: Row) -> int | None:
    """Fresh examples to the target of a run's summary; None before it reached it."""
    return (summary.get("to_target") or {}).get("fresh_examples")


def lowest(costs: Iterable[int | None]) -> int | None:
    """The lowest cost of those that have one."""
    return min((cost for cost in costs if cost is not None), default=None)


def arm_of_winner(name: str) -> str:
    """The arm whose search was won by what an arm of this name runs again (``<arm>_search0``, ...)."""
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
    told = [key for key in SETTINGS if key in first and not _is_searched(key, rows)]
    return {
        **{key: first[key] for key in ("arm", "echo_variant", "echo_factor", *told)},
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
    """Whether a setting is one draw of a search's, which says nothing of the arm."""
    axes = {name.rpartition(".")[2] for row in rows for name in row.get("positions") or {}}
    return key in axes or len({row.get(key) for row in rows}) > 1


def ends(rows: list[Row]) -> list[Row]:
    """One dict per arm, in the order of first appearance.

    Of a search of several trials the one counts that had the best value of the target's metric at any
    evaluation (paper, Fig. 8); a search of one trial is a run.

    Returns:
        Per arm: ``arm``, ``echo_variant``, ``echo_factor``; ``searched``, whether its searches had several
        trials; how many ``runs`` (or searches) came to the end of their
        budgets, how many ``diverged`` or ``failed``; and as {mean, min, max} over these runs, null where
        none has it: ``fresh_examples``, ``steps``, ``trained_examples``, ``final_<metric>``, ``best_value``
        (of the target's metric, at any evaluation), ``mean_gain`` (tau over steps) and AdaScale's others.
        ``at_edge`` as of ``outcome``.
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
    """How many searches of an arm of ``outcome`` or ``ends`` have a best point."""
    return int(arm["reached"] if "reached" in arm else arm["runs"])


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
