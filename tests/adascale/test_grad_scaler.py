"""GradScaler: a loss scale that changes, and skipped steps."""

import pytest
import torch

from adaecho import AdaScale
from tests.adascale.helpers import batches, mlp, train, weights


def sgd(model, fused, momentum=0.9):
    rate = torch.tensor(0.05) if fused else 0.05
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, fused=fused or None)


def train_scaled(model, optimizer, scaler, steps, overflow_at=(), unscale=False):
    gains = []
    for number, micro_batches in enumerate(steps):
        optimizer.zero_grad()
        factor = float("inf") if number in overflow_at else 1.0
        for x, y in micro_batches:
            loss = torch.nn.functional.cross_entropy(model(x), y) / len(micro_batches)
            scaler.scale(factor * loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if number not in overflow_at:
            gains.append(optimizer.gain())
        scaler.step(optimizer)
        scaler.update()
    return gains


def scaled(model, fused, **arguments):
    """An AdaScale, and the GradScaler that it knows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, **arguments)
    return AdaScale(sgd(model, fused), num_gradients_to_accumulate=2, grad_scaler=scaler), scaler


def assert_as_without_scaler(model, optimizer, gains, steps):
    expected = mlp(torch.float32)
    plain = AdaScale(sgd(expected, fused=False), num_gradients_to_accumulate=2)
    assert gains == pytest.approx(train(expected, plain, steps), rel=1e-5)
    assert optimizer.scale_invariant_steps == pytest.approx(plain.scale_invariant_steps, rel=1e-5)
    torch.testing.assert_close(weights(model), weights(expected))


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_scale_does_not_matter(fused, unscale):
    model = mlp(torch.float32)
    optimizer, scaler = scaled(model, fused, growth_interval=2, growth_factor=4.0)
    steps = list(batches(8, 2, dtype=torch.float32))
    rate = optimizer.param_groups[0]["lr"]
    gains = train_scaled(model, optimizer, scaler, steps, unscale=unscale)
    assert scaler.get_scale() == 2.0**18
    assert_as_without_scaler(model, optimizer, gains, steps)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_is_skipped_even_at_the_first_step(fused):
    model, steps = mlp(torch.float32), list(batches(6, 2, dtype=torch.float32))
    optimizer, scaler = scaled(model, fused)
    gains = train_scaled(model, optimizer, scaler, [steps[0], *steps[:3], steps[3], *steps[3:]], (0, 4))
    assert scaler.get_scale() == 2.0**8
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 2  # GradScaler withholds them, or the fused kernel does
    assert_as_without_scaler(model, optimizer, gains, steps)


def test_the_floor_is_in_unscaled_units():
    model = mlp(torch.float32)
    optimizer, scaler = scaled(model, fused=False)
    ((x, y), _) = next(batches(1, 2, dtype=torch.float32))
    for _ in range(2):
        scaler.scale(torch.nn.functional.cross_entropy(model(x), y) / 2).backward()
    assert optimizer.grad_var_avg() == pytest.approx(1e-6)
    assert optimizer.gain() == pytest.approx(1.0, abs=1e-4)
