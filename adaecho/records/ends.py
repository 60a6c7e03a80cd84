"""Where runs ended, for experiments without a target: what a budget bought instead of what a target cost.

A pure function over the rows of ``records.outcome``, which at the end of a budget also hold::

    trained_examples                                  steps times batch size: repeats count
    final_<metric>                                    of each metric of the task, where the budget ended
    gain, gradient_variance, gradient_square,         AdaScale's, of the last step; scale_invariant_steps
    scale_invariant_steps                             is tau
"""

from adaecho.records.outcome import Row, at_edge, spread

# Metrics of which less is better; of all others (accuracy, average precision) more is.
LESS_IS_BETTER = frozenset({"cross_entropy", "loss", "perplexity"})

COUNTS = ("fresh_examples", "steps", "trained_examples")
_ADASCALE = ("scale_invariant_steps", "gain", "gradient_variance", "gradient_square")


def without_target(rows: list[Row]) -> bool:
    """Whether the rows are of an experiment whose runs all go to the end of their budgets."""
    return all(row["target_value"] is None for row in rows)


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
        ``at_edge`` as of ``records.outcome``.
    """
    arms: dict[str, list[Row]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    finals = [key for key in rows[0] if key.startswith("final_")] if rows else []
    return [_arm(rows_of_arm, finals) for rows_of_arm in arms.values()]


def _arm(rows: list[Row], finals: list[str]) -> Row:
    all_ended = [row for row in rows if row["status"] == "budget_spent"]
    ended = [
        {**row, "mean_gain": row["scale_invariant_steps"] / row["steps"]} if _has_gain(row) else row
        for row in best_of_searches(all_ended)
    ]
    keys = (*COUNTS, *finals, "best_value", "mean_gain", *_ADASCALE)
    return {
        **{key: rows[0][key] for key in ("arm", "echo_variant", "echo_factor")},
        "searched": len(all_ended) > len(ended),
        "runs": len(ended),
        "diverged": sum(row["status"] == "diverged" for row in rows),
        "failed": sum(row["status"] == "failed" for row in rows),
        **at_edge(ended),
        **{key: spread([row[key] for row in ended if row.get(key) is not None]) for key in keys},
    }


def best_of_searches(rows: list[Row]) -> list[Row]:
    """Of each search (arm and repeat) the row with the best ``best_value``, ties by index."""
    best: dict[tuple[str, int], Row] = {}
    for row in sorted(rows, key=lambda row: (row["repeat"], row["index"])):
        key = (row["arm"], row["repeat"])
        if key not in best or _better(row, best[key]):
            best[key] = row
    return list(best.values())


def _better(row: Row, other: Row) -> bool:
    if row["best_value"] is None or other["best_value"] is None:
        return other["best_value"] is None and row["best_value"] is not None
    if row["target_metric"] in LESS_IS_BETTER:
        return bool(row["best_value"] < other["best_value"])
    return bool(row["best_value"] > other["best_value"])


def _has_gain(row: Row) -> bool:
    return row.get("scale_invariant_steps") is not None
