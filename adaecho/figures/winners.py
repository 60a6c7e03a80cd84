"""The winners of searches run again on new seeds, and what of their cost was luck."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adaecho.records.outcome import Row, arm_of_winner, best_trials
from adaecho.records.statistics import Ratio, cost_ratio

_SPLITS = 2000  # of the seeds into those that choose and those that cost


def costs_of_winners(rows: Sequence[Row], arm: str) -> dict[int, NDArray[np.float64]]:
    """The costs of each winner (``<arm>_search0``, ...) on its seeds, in order, by the number of its search.

    A seed that missed the target counts with what it read.
    """
    costs: dict[int, list[float]] = {}
    for row in sorted(rows, key=lambda row: int(row["repeat"])):
        if row["arm"] != arm and arm_of_winner(row["arm"]) == arm:
            number = int(row["arm"].removeprefix(f"{arm}_search"))
            costs.setdefault(number, []).append(row["to_target_fresh_examples"] or row["fresh_examples"])
    return {number: np.asarray(costs[number], float) for number in sorted(costs)}  # [seeds] each


def ratio_of_winners(rows: Sequence[Row], arm: str, other: str) -> Ratio | None:
    """The ratio of the searches' costs, each the geometric mean of its winner's over the seeds."""
    ours, theirs = (
        [float(np.exp(np.log(costs).mean())) for costs in costs_of_winners(rows, name).values()]
        for name in (arm, other)
    )
    return cost_ratio(ours, theirs) if ours and theirs else None


def ratio_of_cheapest(rows: Sequence[Row], searched: Sequence[Row], arm: str, other: str) -> Ratio | None:
    """Over the seeds, of the one winner that had the cheapest trial of all searches, of equals the first."""
    found = []
    for name in (arm, other):
        best = {repeat: row for (one, repeat), row in best_trials(list(searched)).items() if one == name}
        costs = costs_of_winners(rows, name)
        if not best or not costs:
            return None
        found.append(costs[min(best, key=lambda number: (best[number]["to_target_fresh_examples"], number))])
    return cost_ratio(found[0].tolist(), found[1].tolist())


def cross_fit(rows: Sequence[Row], arm: str, other: str) -> float | None:
    """The ratio if half of the seeds choose the winner and the other half say what it costs.

    The mean of the logarithm over 2,000 splits, drawn with a fixed seed: what was chosen is not what is
    counted.
    """
    # float64 [winners, seeds] each, of the same seeds.
    ours, theirs = (np.log([*costs_of_winners(rows, name).values()]) for name in (arm, other))
    if not ours.size or not theirs.size:
        return None
    rng = np.random.default_rng(0)
    differences = []
    for _ in range(_SPLITS):
        order = rng.permutation(ours.shape[1])
        choose, count = np.array_split(order, 2)  # int64 [seeds / 2] each
        means = [table[table[:, choose].mean(1).argmin()][count].mean() for table in (ours, theirs)]
        differences.append(means[0] - means[1])
    return float(np.exp(np.mean(differences)))
