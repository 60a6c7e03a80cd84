"""Compare the costs of two configurations: ratio, standard error and 95% confidence intervals."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_CONFIDENCE = 0.95


class Ratio(NamedTuple):
    """The ratio of two geometric mean costs, and its 95% confidence interval.

    Attributes:
        value: the ratio, which is below 1 if the first configuration is cheaper.
        low, high: the interval; None if it cannot be computed (see ``cost_ratio``).
    """

    value: float
    low: float | None
    high: float | None


class Noise(NamedTuple):
    """The uncertainty of the difference between two means.

    Attributes:
        error: the standard error of the difference.
        freedom: the degrees of freedom of Student's t distribution.
    """

    error: float
    freedom: float


def cost_ratio(costs: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Return the ratio of the geometric means of two lists of costs, with its 95% confidence interval."""
    # Each list has at least one cost, and all costs are positive. The interval is Welch's t interval for the
    # logarithms of the costs.
    ours, theirs = np.log(np.asarray(costs, float)), np.log(np.asarray(baseline, float))  # [searches] each
    difference = float(ours.mean() - theirs.mean())
    noise = welch_noise(ours, theirs)
    # There is no interval if a list has a single cost, or if each list has only equal costs. Equal costs do
    # not prove that there is no noise, because costs are measured only at evaluations.
    if noise is None or noise.error == 0:
        return Ratio(math.exp(difference), None, None)
    low, high = difference_interval(difference, noise)
    return Ratio(math.exp(difference), math.exp(low), math.exp(high))


def welch_noise(
    ours: Sequence[float] | NDArray[Any],
    theirs: Sequence[float] | NDArray[Any],
    least_variances: tuple[float, float] = (0.0, 0.0),
) -> Noise | None:
    """Estimate the standard error of the difference between the means of two samples (Welch 1947)."""
    # least_variances has a lower bound on the variance of each sample. For example, rounded values may be
    # equal by chance, but their variance is not 0.
    if min(len(ours), len(theirs)) < 2:  # the variance of a single value is unknown
        return None
    parts, freedom = [], 0.0
    for values, least in zip((ours, theirs), least_variances, strict=True):
        # Because of rounding, np.var may return about 1e-33 instead of 0 for equal values.
        variance = 0.0 if np.ptp(values) == 0 else float(np.var(values, ddof=1))
        parts.append(max(variance, least) / len(values))
        freedom += parts[-1] ** 2 / (len(values) - 1)
    total = sum(parts)
    return Noise(math.sqrt(total), total**2 / freedom if freedom else math.inf)


def difference_interval(difference: float, noise: Noise) -> tuple[float, float]:
    """Return Student's 95% t interval of a difference."""
    from scipy import special  # slow to import, and training does not need it

    half = float(special.stdtrit(noise.freedom, (1 + _CONFIDENCE) / 2)) * noise.error
    return difference - half, difference + half


def mean_interval(values: Sequence[float], confidence: float = _CONFIDENCE) -> tuple[float, float]:
    """Return Student's t interval of the mean of at least two values."""
    from scipy import stats

    array = np.asarray(values, float)  # [values]
    half = stats.t.ppf((1 + confidence) / 2, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array))
    return float(array.mean() - half), float(array.mean() + half)
