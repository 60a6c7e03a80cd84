"""GradScaler's changing loss scale, and steps that stay on the device."""

import pytest
import torch

from adaecho import AdaScale
from tests.adascale.helpers import assert_identical, backward, batches, mlp, train, weights


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


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_scale_does_not_matter(fused, unscale):
    model, expected = mlp(torch.float32), mlp(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, growth_factor=4.0)
    optimizer = AdaScale(sgd(model, fused), num_gradients_to_accumulate=2, grad_scaler=scaler)
    steps = list(batches(8, 2, dtype=torch.float32))
    gains = train_scaled(model, optimizer, scaler, steps, unscale=unscale)
    assert scaler.get_scale() == 2.0**18
    plain = AdaScale(sgd(expected, fused=False), num_gradients_to_accumulate=2)
    assert gains == pytest.approx(train(expected, plain, steps), rel=1e-5)
    assert optimizer.scale_invariant_steps == pytest.approx(plain.scale_invariant_steps, rel=1e-5)
    torch.testing.assert_close(weights(model), weights(expected))


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_is_skipped_even_at_the_first_step(fused):
    model, expected = mlp(torch.float32), mlp(torch.float32)
    steps = list(batches(6, 2, dtype=torch.float32))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = AdaScale(sgd(model, fused), num_gradients_to_accumulate=2, grad_scaler=scaler)
    gains = train_scaled(model, optimizer, scaler, [steps[0], *steps[:3], steps[3], *steps[3:]], (0, 4))
    assert scaler.get_scale() == 2.0**8
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 2  # GradScaler withholds them, or the fused kernel does
    plain = AdaScale(sgd(expected, fused=False), num_gradients_to_accumulate=2)
    assert gains == pytest.approx(train(expected, plain, steps), rel=1e-5)
    assert optimizer.scale_invariant_steps == pytest.approx(plain.scale_invariant_steps, rel=1e-5)
    torch.testing.assert_close(weights(model), weights(expected))


def test_the_floor_is_in_unscaled_units():
    model = mlp(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    optimizer = AdaScale(sgd(model, fused=False), num_gradients_to_accumulate=2, grad_scaler=scaler)
    ((x, y), _) = next(batches(1, 2, dtype=torch.float32))
    for _ in range(2):
        scaler.scale(torch.nn.functional.cross_entropy(model(x), y) / 2).backward()
    assert optimizer.grad_var_avg() == pytest.approx(1e-6)
    assert optimizer.gain() == pytest.approx(1.0, abs=1e-4)


def test_the_device_step_equals_the_host_step():
    model, expected = mlp(torch.float32), mlp(torch.float32)
    steps = list(batches(5, 3, dtype=torch.float32))
    optimizer = AdaScale(sgd(model, fused=True), num_gradients_to_accumulate=3)
    rate = optimizer.param_groups[0]["lr"]
    train(model, optimizer, steps)
    train(expected, AdaScale(sgd(expected, fused=False), num_gradients_to_accumulate=3), steps)
    torch.testing.assert_close(weights(model), weights(expected))
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == torch.tensor(0.05)


def test_the_device_step_skips_what_is_not_finite():
    model, expected = mlp(torch.float32), mlp(torch.float32)
    steps = list(batches(4, 2, dtype=torch.float32))
    optimizer, clean = (
        AdaScale(sgd(m, fused=True), num_gradients_to_accumulate=2) for m in (model, expected)
    )
    train(expected, clean, steps)
    for number, micro_batches in enumerate(steps):
        if number in (0, 2):
            optimizer.zero_grad()
            backward(model, micro_batches, factor=float("nan"))
            optimizer.step()
        train(model, optimizer, [micro_batches])
    assert optimizer.skipped_steps == 2
    assert_identical(weights(model), weights(expected))
    assert optimizer.scale_invariant_steps == clean.scale_invariant_steps


def test_dampening_steps_on_the_host():
    # Its first step differs from the others, so a skipped first step must be known to the host.
    model, expected = mlp(torch.float32), mlp(torch.float32)
    steps = list(batches(3, 2, dtype=torch.float32))
    for one, arguments in ((model, {"fused": True, "lr": torch.tensor(0.05)}), (expected, {"lr": 0.05})):
        damped = torch.optim.SGD(one.parameters(), momentum=0.9, dampening=0.5, **arguments)
        train(one, AdaScale(damped, num_gradients_to_accumulate=2), steps)
    torch.testing.assert_close(weights(model), weights(expected))


@pytest.mark.parametrize("clears", ["optimizer", "model"])
def test_the_mark_of_a_repeat_that_the_scaler_skips_does_not_reach_the_next_fresh_batch(clears):
    model, expected = mlp(torch.float32), mlp(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = AdaScale(sgd(model, fused=False), scale=2.0, smoothing=0.5, grad_scaler=scaler)
    plain = AdaScale(sgd(expected, fused=False), scale=2.0, smoothing=0.5)

    def step(x, y, factor=1.0):
        scaler.scale(factor * torch.nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        (optimizer if clears == "optimizer" else model).zero_grad()

    for number, ((x, y),) in enumerate(batches(4, 1, dtype=torch.float32)):
        step(x, y)
        if number == 1:
            optimizer.mark_repeated_batch()
            step(x, y, factor=float("inf"))
            assert scaler.get_scale() == 2.0**9
        train(expected, plain, [[(x, y)]])
        assert optimizer.grad_var_avg() == pytest.approx(plain.grad_var_avg(), rel=1e-5)
        assert optimizer.gain() == pytest.approx(plain.gain(), rel=1e-5)
    torch.testing.assert_close(weights(model), weights(expected))
