"""Estimators against the definitions, by simulation and in cases with a known answer."""

import pytest
import torch

from adaecho.adascale.estimators import (
    estimate_across_gradients,
    estimate_across_steps,
    gain_ratio,
)


def sums(gradients):
    """(sum |g_i|^2, |mean|^2) of rows."""
    return gradients.square().sum(), gradients.mean(0).square().sum()


@pytest.mark.parametrize(("num_gradients", "scale"), [(2, 2.0), (4, 4.0), (16, 16.0), (4, 8.0), (4, 2.0)])
def test_estimates_are_unbiased(num_gradients, scale):
    # Base batches have covariance diag(v); a micro-batch of scale / n of them has diag(v) * n / scale.
    generator = torch.Generator().manual_seed(num_gradients)
    base_variance = torch.linspace(0.5, 2.0, 8, dtype=torch.float64)
    mean = torch.linspace(-1.0, 1.5, 8, dtype=torch.float64)
    deviation = (base_variance * num_gradients / scale).sqrt()
    trials = 20_000
    noise = torch.randn(trials, num_gradients, 8, generator=generator, dtype=torch.float64)
    gradients = mean + deviation * noise
    total = gradients.square().sum((1, 2))
    of_mean = gradients.mean(1).square().sum(1)
    # Not through the clipped function alone: clipping is what makes single estimates biased.
    micro_variance = (total - num_gradients * of_mean) / (num_gradients - 1)
    estimate = estimate_across_gradients(total, of_mean, num_gradients, scale)
    torch.testing.assert_close(estimate.variance, (scale / num_gradients * micro_variance).clamp(min=1e-6))
    error = (scale / num_gradients * micro_variance).std() / trials**0.5
    assert abs(estimate.variance.mean() - base_variance.sum()) < 4 * error
    square = of_mean - micro_variance / num_gradients
    assert abs(square.mean() - mean.square().sum()) < 4 * square.std() / trials**0.5
    torch.testing.assert_close(estimate.square, square.clamp(min=0.0))


def test_difference_between_steps_is_unbiased():
    generator = torch.Generator().manual_seed(0)
    scale, trials = 8.0, 20_000
    mean = torch.linspace(0.0, 1.0, 5, dtype=torch.float64)
    deviation = torch.linspace(0.2, 1.0, 5, dtype=torch.float64) / scale**0.5
    pair = mean + deviation * torch.randn(2, trials, 5, generator=generator, dtype=torch.float64)
    difference = (pair[0] - pair[1]).square().sum(1)
    inner = (pair[0] * pair[1]).sum(1)
    estimate = estimate_across_steps(difference, inner, scale)
    assert abs(estimate.variance.mean() - scale * deviation.square().sum()) < (
        4 * scale / 2 * difference.std() / trials**0.5
    )
    assert abs(inner.mean() - mean.square().sum()) < 4 * inner.std() / trials**0.5
    torch.testing.assert_close(estimate.square, inner.clamp(min=0.0))


def test_estimates_equal_the_paper_where_a_micro_batch_is_a_base_batch():
    gradients = torch.randn(5, 30, dtype=torch.float64)
    total, of_mean = sums(gradients)
    estimate = estimate_across_gradients(total, of_mean, 5, 5.0)
    torch.testing.assert_close(estimate.variance, total / 4 - 5 / 4 * of_mean)
    torch.testing.assert_close(estimate.variance, gradients.var(0).sum())
    torch.testing.assert_close(estimate.square, (of_mean - estimate.variance / 5).clamp(min=0.0))


def gain_of(gradients, scale=None):
    scale = float(len(gradients)) if scale is None else scale
    estimate = estimate_across_gradients(*sums(gradients), len(gradients), scale)
    return gain_ratio(*estimate, scale).item()


EYE = torch.eye(4, dtype=torch.float64)
KNOWN = {
    "orthogonal: the scale": (EYE, 4.0),
    "identical: nothing beyond the floor": (torch.ones_like(EYE), 1.0),
    # sigma^2 = 1e-6 floor against mu^2 = 1e-6: (1 + 1) / (1 / 4 + 1).
    "small: the floor bites": (torch.full_like(EYE[:, :1], 1e-3), 1.6),
    # r = E|g|^2 / E|G|^2 whatever the correlation: two distinct gradients, each twice, gain as two do.
    "two, each twice": (EYE[:2, :2].repeat(2, 1), 2.0),
}


@pytest.mark.parametrize(("gradients", "gain"), KNOWN.values(), ids=KNOWN)
def test_gains_that_are_known(gradients, gain):
    assert gain_of(gradients) == pytest.approx(gain, abs=1e-6)


def test_gain_is_the_ratio_of_mean_squares():
    # With S = n and no clipping: r = mean |g_i|^2 / |mean g|^2 (paper, section 3.4).
    gradients = 1.0 + torch.randn(4, 50, dtype=torch.float64)
    total, of_mean = sums(gradients)
    assert gain_of(gradients) == pytest.approx((total / 4 / of_mean).item())


@pytest.mark.parametrize("scale", [1.0, 2.0, 64.0])
def test_gain_is_between_one_and_the_scale(scale):
    variance, square = torch.rand(2, 1000, dtype=torch.float64) * 10
    gains = gain_ratio(variance, square, scale)
    assert gains.min() >= 1
    assert gains.max() <= scale


def test_gain_is_one_before_anything_was_seen():
    zero = torch.zeros(3, dtype=torch.float64)
    assert gain_ratio(zero, zero, 8.0).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("directions", "percent_low"), [(100, 3.5), (1000, 1.1)])
def test_clipping_makes_the_gain_low_where_noise_dominates(directions: int, percent_low: float) -> None:
    """S = 2, sigma^2 / mu^2 = 300 spread evenly over so many directions: what the module states."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(20):
        noise = torch.randn(1000, 2, directions, generator=generator, dtype=torch.float64)
        gradients = noise * (300 / directions) ** 0.5
        gradients[..., 0] += 1  # mu^2 = 1
        sums, mean = gradients.square().sum((1, 2)), gradients.mean(1).square().sum(1)
        samples.append(torch.stack(estimate_across_gradients(sums, mean, 2, 2.0)))
    variance, square = torch.cat(samples, dim=1).mean(1)
    true = (300 + 1) / (300 / 2 + 1)
    low = 100 * (1 - gain_ratio(variance, square, 2.0).item() / true)
    assert low == pytest.approx(percent_low, abs=0.15)
