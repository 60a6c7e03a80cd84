"""One process with one gradient a step: the variance across steps."""

import pytest
import torch

from adaecho import AdaScale
from tests.adascale.helpers import assert_identical, batches, mlp, train, weights


def lone(model, scale=8.0, **arguments):
    return AdaScale(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), scale=scale, **arguments)


def gains_of(optimizer, losses):
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        yield optimizer.gain()
        optimizer.step()


def test_gain_from_two_steps():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = AdaScale(torch.optim.SGD([parameter], lr=0.1), scale=4.0)
    gradients = torch.tensor([[3.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    gains = list(gains_of(optimizer, ((parameter * gradient).sum() for gradient in gradients)))
    # sigma^2 = S |a - b|^2 / 2, mu^2 = <a, b>: 10 and 3, then 4 and 4; averaged with theta = 1 - S / 1000.
    theta = 1 - 4 / 1000
    variance, square = (10 * theta + 4) / (theta + 1), (3 * theta + 4) / (theta + 1)
    expected = [1.0, (10 + 3) / (10 / 4 + 3), (variance + square) / (variance / 4 + square)]
    assert gains == pytest.approx(expected)
    assert optimizer.scale_invariant_steps == pytest.approx(sum(expected))


def test_gain_is_right_where_it_is_known():
    # Gradients with noise of variance 4 / S about a mean of squared norm 1, at weights that do not move.
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(16, dtype=torch.float64))
    optimizer = AdaScale(torch.optim.SGD([parameter], lr=0.0), scale=8.0, smoothing=0.999)
    noise = torch.randn(500, 16, generator=generator, dtype=torch.float64) * (4 / 8 / 16) ** 0.5
    *_, _ = gains_of(optimizer, ((parameter * (0.25 + one)).sum() for one in noise))
    assert optimizer.gain() == pytest.approx((4 + 1) / (4 / 8 + 1), rel=0.1)


def test_repeats_of_a_batch_take_no_sample():
    model = mlp()
    optimizer = lone(model, smoothing=0.9)
    gains = []
    for number, step in enumerate(batches(6, 1)):
        gains += train(model, optimizer, [step])
        before = (optimizer.grad_var_avg(), optimizer.grad_sqr_avg(), optimizer.gain())
        tau = optimizer.scale_invariant_steps
        optimizer.mark_repeated_batch()
        gains += train(model, optimizer, [step])
        assert (optimizer.grad_var_avg(), optimizer.grad_sqr_avg(), optimizer.gain()) == before
        assert optimizer.scale_invariant_steps == pytest.approx(tau + before[2])
        assert (before[2] > 1) == (number > 0)


def test_a_parameter_without_gradient_counts_as_zero():
    used, other = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    optimizer = AdaScale(torch.optim.SGD([used, other], lr=0.0), scale=4.0)
    losses = (3 * used.sum() + 2 * other.sum(), 3 * used.sum(), 2 * other.sum() + 3 * used.sum())
    # |a - b|^2 = 4 and <a, b> = 9, both times.
    known = (8 + 9) / (8 / 4 + 9)
    assert list(gains_of(optimizer, losses)) == pytest.approx([1.0, known, known])


def test_scale_one_is_the_wrapped_optimizer():
    model, plain = mlp(), mlp()
    assert train(model, lone(model, scale=1.0), batches(5, 1)) == [1.0] * 5
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for ((x, y),) in batches(5, 1):
        sgd.zero_grad()
        torch.nn.functional.cross_entropy(plain(x), y).backward()
        sgd.step()
    assert_identical(weights(model), weights(plain))
