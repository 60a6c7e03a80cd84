"""Ratios with intervals, against the formulas written out."""

import math

import numpy as np
import pytest
from scipy import stats

from adaecho.records.statistics import Ratio, cost_ratio


def test_the_interval_is_welchs_of_the_log_costs() -> None:
    ours, theirs = [900.0, 1100.0, 1000.0, 700.0], [2000.0, 1500.0, 1800.0]
    a, b = np.log(ours), np.log(theirs)
    parts = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    half = stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts))
    found = cost_ratio(ours, theirs)
    assert found.value == pytest.approx(math.exp(a.mean() - b.mean()))
    assert found.low == pytest.approx(math.exp(a.mean() - b.mean() - half))
    assert found.high == pytest.approx(math.exp(a.mean() - b.mean() + half))


def test_one_run_a_side_has_a_ratio_and_no_interval() -> None:
    found = cost_ratio([500.0], [1000.0, 1000.0])
    assert (found.value, found.low, found.high) == (pytest.approx(0.5), None, None)


def test_equal_costs_tell_no_interval() -> None:
    found = cost_ratio([500.0, 500.0], [1000.0, 1000.0])  # read off a grid: not known to all digits
    assert found == Ratio(pytest.approx(0.5), None, None)


def test_equal_costs_on_one_side_have_an_interval_without_a_warning():
    ratio = cost_ratio([2396.0, 2396.0, 2396.0], [4392.0, 4792.0, 4392.0])
    assert ratio.low < ratio.value < ratio.high
    assert ratio.value == pytest.approx(2396 / (4392 * 4792 * 4392) ** (1 / 3))
