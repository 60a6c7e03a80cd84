"""Hypothesis tests for the paper's claims: a t test, a rank test, and a correction for multiple tests."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.records.statistics import Noise

_RESAMPLES = 20_000  # number of random splits if there are more possible splits; otherwise all are used


def grid_variance(costs: Sequence[float], step: float) -> float:
    """Return the variance of log costs that comes from evaluating a model only every ``step`` examples."""
    # The true cost lies anywhere in the ``step`` examples before the recorded cost, so the variance of the
    # cost is step^2 / 12. The variance of its log is approximately this variance divided by cost^2.
    return float(np.mean((step / np.asarray(costs, float)) ** 2) / 12)


def less_p(difference: float, noise: Noise) -> float:
    """Return the p value of a one-sided t test that the difference between two means is negative."""
    from scipy import special

    # The standard error must be above 0.
    return float(special.stdtr(noise.freedom, difference / noise.error))


def power(difference: float, noise: Noise, level: float = 0.05) -> float:
    """Return the probability that ``less_p`` is below ``level`` if ``difference`` is the true difference."""
    from scipy import stats

    edge = stats.t.ppf(level, noise.freedom)
    return float(stats.nct.cdf(edge, noise.freedom, difference / noise.error))


def cheaper_p(costs: Sequence[float | None], baseline: Sequence[float | None]) -> float:
    """Return the p value of a one-sided rank test of whether a configuration costs less than the baseline.

    Each list has one cost per run or search; None stands for a missed target, the highest cost. The test
    pools all costs and splits them into two groups in all possible ways, or 20,000 times at random. The p
    value is the share of splits whose rank sum is at most that of ``costs``.
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
    """Correct p values for multiple tests by Holm's method (1979), to control the family-wise error rate."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for position, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - position) * p_value))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
