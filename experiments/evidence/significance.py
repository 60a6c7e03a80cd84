"""Hypothesis tests of the claims: on mean log costs, on ranks, and for several claims."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.records.statistics import Noise

_RESAMPLES = 20_000  # if the runs have more splits; otherwise the test is exact


def grid_variance(costs: Sequence[float], step: float) -> float:
    """Return the smallest variance of log costs that are known up to multiples of ``step``.

    A run meets the target anywhere in the step before the evaluation, so the error is uniform with variance
    step^2 / 12. The variance of the logarithm is this over the squared cost, averaged over the costs.
    """
    return float(np.mean((step / np.asarray(costs, float)) ** 2) / 12)


def less_p(difference: float, noise: Noise) -> float:
    """One-sided p value of "the difference is below 0", for a noise with an error above 0."""
    from scipy import special

    return float(special.stdtr(noise.freedom, difference / noise.error))


def power(difference: float, noise: Noise, level: float = 0.05) -> float:
    """Probability of a ``less_p`` below the level for a true difference with this noise."""
    from scipy import stats

    edge = stats.t.ppf(level, noise.freedom)
    return float(stats.nct.cdf(edge, noise.freedom, difference / noise.error))


def cheaper_p(costs: Sequence[float | None], baseline: Sequence[float | None]) -> float:
    """One-sided p value of "the arm is cheaper than the baseline": a permutation test of the rank sum.

    Exact (every split of the runs) up to 20,000 splits, otherwise over 20,000 random splits of a fixed seed.

    Args:
        costs: one per run or search; None for a missed target, which shares the worst rank.
        baseline: costs of the baseline.
    """
    from scipy import stats

    together = [math.inf if cost is None else float(cost) for cost in (*costs, *baseline)]
    ranks = stats.rankdata(together)

    def rank_sum(first: NDArray[Any], _: NDArray[Any], axis: int = -1) -> NDArray[Any]:
        return np.asarray(first.sum(axis=axis))

    exact = math.comb(len(together), len(costs)) <= _RESAMPLES
    test = stats.permutation_test(
        (ranks[: len(costs)], ranks[len(costs) :]),
        rank_sum,
        n_resamples=math.inf if exact else _RESAMPLES,
        alternative="less",
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """P values adjusted for their number (Holm 1979): all claims below alpha hold at once at level alpha."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for position, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - position) * p_value))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
