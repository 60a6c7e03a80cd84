"""Statistics of the difference between two arms.

Costs are positive and their noise is multiplicative. So means and intervals use logarithms, and a ratio
compares geometric means.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """The ratio of the geometric mean costs of two arms, and its 95 % confidence interval.

    Attributes:
        value: below 1 if the first arm is cheaper.
        low, high: bounds of the interval; None with fewer than two runs on either side.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Noise:
    """The uncertainty of a difference of two means.

    Attributes:
        error: the standard error.
        freedom: the degrees of freedom of Student's t, by Welch and Satterthwaite.
    """

    error: float
    freedom: float


def cost_ratio(costs: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """The ratio of geometric means, with Welch's t interval of the difference of mean log costs.

    Args:
        costs: of the runs (or searches) that reached the target; at least one, each above 0.
        baseline: the same for the baseline.

    Returns:
        The ratio. It has no interval if the noise is unknown: a side has one run, or all costs are equal on
        both sides (evaluations are a grid, so equal costs are not exact).
    """
    ours, theirs = np.log(np.asarray(costs, float)), np.log(np.asarray(baseline, float))  # [searches] each
    difference = float(ours.mean() - theirs.mean())
    noise = welch_noise(ours, theirs)
    if noise is None or noise.error == 0:
        return Ratio(math.exp(difference), None, None)
    low, high = difference_interval(difference, noise)
    return Ratio(math.exp(difference), math.exp(low), math.exp(high))


def welch_noise(
    ours: Sequence[float] | NDArray[Any],
    theirs: Sequence[float] | NDArray[Any],
    least_variances: tuple[float, float] = (0.0, 0.0),
) -> Noise | None:
    """The noise of the difference of two means by Welch (1947), with one variance per side.

    Args:
        ours, theirs: finite values; the result is None with fewer than two on a side.
        least_variances: lower bounds of the variances, such as ``grid_variance``: values on a grid may be
            equal by chance.
    """
    if min(len(ours), len(theirs)) < 2:
        return None
    parts, freedom = [], 0.0
    for values, least in zip((ours, theirs), least_variances, strict=True):
        # Rounding gives equal values a variance of 1e-33.
        variance = 0.0 if np.ptp(values) == 0 else float(np.var(values, ddof=1))
        parts.append(max(variance, least) / len(values))
        freedom += parts[-1] ** 2 / (len(values) - 1)
    total = sum(parts)
    return Noise(math.sqrt(total), total**2 / freedom if freedom else math.inf)


def difference_interval(difference: float, noise: Noise) -> tuple[float, float]:
    """Student's 95 % t interval of a difference; an infinite difference is its own interval."""
    from scipy import special  # slow to import, and training does not need it

    half = float(special.stdtrit(noise.freedom, (1 + _CONFIDENCE) / 2)) * noise.error
    return difference - half, difference + half


def mean_interval(values: Sequence[float], confidence: float = _CONFIDENCE) -> tuple[float, float]:
    """Student's t interval of the mean of two or more values."""
    from scipy import stats

    array = np.asarray(values, float)  # [values]
    half = stats.t.ppf((1 + confidence) / 2, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array))
    return float(array.mean() - half), float(array.mean() + half)
