"""Tests of hypotheses behind the decided claims: of mean log costs, of ranks, and of several at once."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.records.statistics import Noise

_RESAMPLES = 20_000  # where the number of ways to split the runs is larger; exact below


def grid_variance(costs: Sequence[float], step: float) -> float:
    """The least variance of log costs that are read off at multiples of ``step``: that of a uniform error.

    The target was met anywhere in the step before the evaluation that saw it: step^2 / 12, and of the
    logarithm that over the cost's square, averaged over the costs.
    """
    return float(np.mean((step / np.asarray(costs, float)) ** 2) / 12)


def less_p(difference: float, noise: Noise) -> float:
    """One-sided p value of "the difference is below 0"; the noise's error is above 0."""
    from scipy import special

    return float(special.stdtr(noise.freedom, difference / noise.error))


def power(difference: float, noise: Noise, level: float = 0.05) -> float:
    """How often a true difference would give a ``less_p`` below the level, with this noise."""
    from scipy import stats

    edge = stats.t.ppf(level, noise.freedom)
    return float(stats.nct.cdf(edge, noise.freedom, difference / noise.error))


def cheaper_p(costs: Sequence[float | None], baseline: Sequence[float | None]) -> float:
    """One-sided p value of "the arm is cheaper than the baseline": a permutation test of the rank sum.

    Exact (every split of the runs) up to 20,000 splits, beyond that over as many drawn with a fixed seed.

    Args:
        costs: one of each run (or search); None for one that missed the target: the worst rank, shared.
        baseline: the same of the baseline.
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
