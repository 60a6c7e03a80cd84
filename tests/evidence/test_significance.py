"""Permutation tests and Holm's correction, against the formulas written out."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from experiments.evidence.significance import cheaper_p, holm


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]),
        ([1.0, 5.0, None], [2.0, 2.0, 6.0, None]),
        ([None, None], [1.0, 2.0, 3.0]),
    ],
)
def test_the_permutation_test_counts_every_split(
    ours: list[float | None], theirs: list[float | None]
) -> None:
    ranks = stats.rankdata([math.inf if cost is None else cost for cost in (*ours, *theirs)])
    seen = ranks[: len(ours)].sum()
    sums = [sum(chosen) for chosen in combinations(ranks, len(ours))]
    assert cheaper_p(ours, theirs) == pytest.approx(np.mean([total <= seen + 1e-9 for total in sums]))


def test_many_runs_are_sampled_and_repeat() -> None:
    rng = np.random.default_rng(1)
    ours, theirs = list(rng.normal(1.0, 0.3, 24)), list(rng.normal(1.4, 0.3, 24))
    assert cheaper_p(ours, theirs) == cheaper_p(ours, theirs) < 0.05


def test_holm_is_as_worked_out_by_hand() -> None:
    adjusted = holm({"a": 0.03, "b": 0.01, "c": 0.04, "d": 0.5})
    assert adjusted == pytest.approx({"b": 0.04, "a": 0.09, "c": 0.09, "d": 0.5})
