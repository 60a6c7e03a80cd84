"""Hypothesis tests for the paper's claims: a t test, a rank test, and a correction for multiple tests."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.records.statistics import Noise

_RESAMPLES = 20_000  # number of random splits if there are more possible splits; otherwise all are used


def grid_variance(costs: Sequence[float], step: float) -> float:
    """Return the variance of log costs that is due to evaluating the model only every ``step`` examples.

    The cost of a run is the number of examples at its first evaluation that meets the target. The run in fact
    met the target somewhere in the ``step`` examples before. The error of the cost is therefore uniform, with
    variance step^2 / 12. Divided by the squared cost, this is approximately the variance of the log cost. The
    result is the mean over all costs.
    """
    return float(np.mean((step / np.asarray(costs, float)) ** 2) / 12)


def less_p(difference: float, noise: Noise) -> float:
    """Return the p value of a one-sided t test of whether the true difference between two means is below 0.

    Args:
        difference: the measured difference between the means.
        noise: the standard error of this difference, which must be above 0, and the degrees of freedom.
    """
    from scipy import special

    return float(special.stdtr(noise.freedom, difference / noise.error))


def power(difference: float, noise: Noise, level: float = 0.05) -> float:
    """Return the power of the test ``less_p``: the probability that its p value is below ``level``.

    Args:
        difference: the true difference between the means, which is assumed.
        noise: the standard error of the measured difference, and the degrees of freedom.
    """
    from scipy import stats

    edge = stats.t.ppf(level, noise.freedom)
    return float(stats.nct.cdf(edge, noise.freedom, difference / noise.error))


def cheaper_p(costs: Sequence[float | None], baseline: Sequence[float | None]) -> float:
    """Return the p value of a one-sided rank test of whether a configuration costs less than the baseline.

    The test is a permutation test. It compares the sum of the configuration's ranks with the sums after all
    other ways of splitting the costs into two groups of the same sizes. If there are more than 20,000 ways,
    the test uses 20,000 random ones with a fixed seed.

    Args:
        costs: one cost per run or hyperparameter search. None if the target was missed, which counts as the
            highest cost.
        baseline: the costs of the baseline, in the same form.
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
    """Return p values that are corrected for multiple tests by Holm's method (1979).

    The correction controls the family-wise error rate. If all claims with a corrected p value below alpha are
    accepted, the probability that any accepted claim is false is at most alpha.
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for position, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - position) * p_value))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
