"""Hypothesis tests of the claims: on mean log costs, on ranks, and adjusted for the number of claims."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.records.statistics import Noise

_RESAMPLES = 20_000  # number of random splits if there are more possible splits; otherwise all are used


def grid_variance(costs: Sequence[float], step: float) -> float:
    """Return the smallest possible variance of log costs that are known only up to multiples of ``step``.

    A run meets the target somewhere between two evaluations, which are ``step`` examples apart. The error of
    its cost is therefore uniform, with variance step^2 / 12. Divided by the squared cost, this is
    approximately the variance of the log cost. The result is the average of this variance over the costs.
    """
    return float(np.mean((step / np.asarray(costs, float)) ** 2) / 12)


def less_p(difference: float, noise: Noise) -> float:
    """Return the one-sided p value of the claim that the difference is below 0.

    The standard error of the noise must be above 0.
    """
    from scipy import special

    return float(special.stdtr(noise.freedom, difference / noise.error))


def power(difference: float, noise: Noise, level: float = 0.05) -> float:
    """Return the probability that ``less_p`` is below the level, if the true difference has this value."""
    from scipy import stats

    edge = stats.t.ppf(level, noise.freedom)
    return float(stats.nct.cdf(edge, noise.freedom, difference / noise.error))


def cheaper_p(costs: Sequence[float | None], baseline: Sequence[float | None]) -> float:
    """Return the one-sided p value of "the arm is cheaper than the baseline", by a permutation test of ranks.

    The test compares the arm's rank sum with the rank sums of all splits of the runs into two groups. If
    there are more than 20,000 splits, the test uses 20,000 random splits with a fixed seed.

    Args:
        costs: one cost per run or search; None if the target was missed, which counts as the worst rank.
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
    """Return p values adjusted for their number (Holm 1979).

    If all claims with an adjusted p value below alpha are accepted, the probability that any of these claims
    is false is at most alpha.
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for position, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - position) * p_value))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
