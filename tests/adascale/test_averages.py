"""Moving averages of groups and of samples that are none; what they are, test_optimizer compares."""

import pytest
import torch

from adaecho.adascale.estimators import Averages, Estimate, updated


def run(samples, smoothing, debias):
    averages = Averages.empty(1)
    for sample in samples:
        value = torch.tensor([sample], dtype=torch.float64)
        averages = updated(averages, Estimate(value, 2 * value), smoothing, debias)
        yield averages.variance.item(), averages.square.item()


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_leaves_no_trace(debias, bad):
    before, after = list(run([1.0, 3.0, bad], 0.9, debias))[1:]
    assert after == before
    assert list(run([1.0, bad, 3.0], 0.9, debias))[-1] == before


def test_one_bad_group_discards_the_whole_sample():
    averages = Averages.empty(2)
    sample = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    assert updated(averages, Estimate(sample, sample), 0.9, debias=True).weight.tolist() == [0.0, 0.0]


def test_a_group_added_later_has_its_own_weight():
    averages = Averages.empty(1)
    one = torch.ones(1, dtype=torch.float64)
    for _ in range(5):
        averages = updated(averages, Estimate(one, one), 0.9, debias=True)
    two = torch.tensor([1.0, 7.0], dtype=torch.float64)
    averages = updated(averages.with_group(), Estimate(two, two), 0.9, debias=True)
    torch.testing.assert_close(averages.variance, two)
