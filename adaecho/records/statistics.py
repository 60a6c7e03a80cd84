"""Whether two arms differ: the statistics behind every ratio and every decided claim.

Costs are positive and their noise is multiplicative, so means and intervals are of logarithms: a ratio is one
of geometric means. A run that missed its target has no cost, only a rank: worse than every run that reached.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 20_000  # where the number of ways to split the runs is larger; exact below


@dataclass(frozen=True)
class Ratio:
    """A ratio of two arms' geometric mean costs, and its confidence interval.

    Attributes:
        value: below 1 where the first arm is cheaper.
        low, high: the interval's ends; None with fewer than two runs on either side.
    """

    value: float
    low: float | None
    high: float | None


def cost_ratio(costs: Sequence[float], baseline: Sequence[float], confidence: float = 0.95) -> Ratio:
    """The ratio of geometric means, with Welch's t interval of the difference of mean log costs.

    Args:
        costs: of the runs (or searches) that reached the target; at least one, each above 0.
        baseline: the same of the baseline.
        confidence: of the interval, in (0, 1).
    """
    ours, theirs = np.log(np.asarray(costs, float)), np.log(np.asarray(baseline, float))
    difference = float(ours.mean() - theirs.mean())
    if min(len(ours), len(theirs)) < 2:
        return Ratio(math.exp(difference), None, None)
    if ours.var() == theirs.var() == 0:  # equal costs throughout: scipy would divide by their variance
        return Ratio(math.exp(difference), math.exp(difference), math.exp(difference))
    interval = welch(ours, theirs).confidence_interval(confidence)
    return Ratio(math.exp(difference), math.exp(interval.low), math.exp(interval.high))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's t interval of the mean of two values or more."""
    from scipy import stats

    array = np.asarray(values, float)
    half = stats.t.ppf((1 + confidence) / 2, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array))
    return float(array.mean() - half), float(array.mean() + half)


def welch(ours: Any, theirs: Any, alternative: str = "two-sided") -> Any:
    """Welch's t test; scipy warns of a side whose costs are equal, and is right on it."""
    from scipy import stats  # takes a second to import, and no run or worker needs it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return stats.ttest_ind(ours, theirs, equal_var=False, alternative=alternative)


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
