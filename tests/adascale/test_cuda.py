"""On a GPU: nothing in a step waits for the device, and the numbers are those of the CPU."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from adaecho import AdaScale
from adaecho.adascale.squares import sum_of_squares
from tests.adascale.helpers import backward, batches, mlp, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@contextmanager
def waiting_is_an_error():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(steps):
    return [[(x.cuda(), y.cuda()) for x, y in micro_batches] for micro_batches in steps]


def wrapped(model, lr, **arguments):
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, **arguments)
    return AdaScale(sgd, num_gradients_to_accumulate=2)


def staying_on_the_device(model):
    return wrapped(model, torch.tensor(0.05, device="cuda"), fused=True)


def take(model, optimizer, steps):
    for micro_batches in steps:
        optimizer.zero_grad()
        backward(model, micro_batches)
        optimizer.step()


def test_norms_of_mixed_types():
    tensors = [torch.randn(5), torch.randn(7, dtype=torch.float64), torch.randn(3).half()]
    expected = sum(tensor.double().square().sum().item() for tensor in tensors)
    assert sum_of_squares([tensor.cuda() for tensor in tensors]).item() == pytest.approx(expected, rel=1e-6)


def test_a_fused_step_with_its_rate_on_the_device_never_waits():
    model, expected = mlp().cuda(), mlp()
    optimizer, plain = staying_on_the_device(model), wrapped(expected, 0.05)
    steps = list(batches(6, 2))
    first, *others = on_gpu(steps)
    take(model, optimizer, [first])  # averages and tau move to the device once
    with waiting_is_an_error():
        take(model, optimizer, others)
    take(expected, plain, steps)
    torch.testing.assert_close([w.cpu() for w in weights(model)], weights(expected), rtol=1e-5, atol=1e-6)
    assert optimizer.gain() == pytest.approx(plain.gain(), rel=1e-5)
    assert optimizer.done(plain.scale_invariant_steps - 1e-3)


def test_a_step_that_is_not_finite_is_skipped_without_waiting():
    model = mlp().cuda()
    optimizer = staying_on_the_device(model)
    first, (bad, other) = on_gpu(batches(2, 2))
    take(model, optimizer, [first])
    before, gain = weights(model), optimizer.gain()
    infinite = [(bad[0] / 0, bad[1]), other]
    with waiting_is_an_error():
        take(model, optimizer, [infinite])
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    assert optimizer.gain() == gain
    assert optimizer.skipped_steps == 1


def test_tau_is_that_of_one_step_earlier():
    model = mlp().cuda()
    optimizer = staying_on_the_device(model)
    taus = [0.0]
    for micro_batches in on_gpu(batches(6, 2)):
        optimizer.zero_grad()
        backward(model, micro_batches)
        taus.append(taus[-1] + optimizer.gain())
        optimizer.step()
        assert optimizer.scale_invariant_steps == pytest.approx(taus[-2])


def test_a_step_with_its_rate_on_the_host_does_wait():
    model = mlp().cuda()
    optimizer = wrapped(model, 0.05)
    (micro_batches,) = on_gpu(batches(1, 2))
    backward(model, micro_batches)
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        optimizer.step()


@pytest.mark.parametrize("inner", [0, 2])
def test_a_reentrant_checkpoint_is_no_pass_of_its_own(inner):
    """The engine's thread of the device runs the hooks, not the one that called backward."""
    model, expected = mlp().cuda(), mlp()
    optimizer, plain = wrapped(model, 0.05), wrapped(expected, 0.05)
    for micro_batches in batches(3, 2):
        optimizer.zero_grad()
        for x, y in micro_batches:
            hidden = x.cuda().requires_grad_()
            for number, layer in enumerate(model):
                hidden = checkpoint(layer, hidden, use_reentrant=True) if number == inner else layer(hidden)
            (torch.nn.functional.cross_entropy(hidden, y.cuda()) / 2).backward()
        plain.zero_grad()
        backward(expected, micro_batches)
        assert optimizer.gain() == pytest.approx(plain.gain(), rel=1e-5)
        optimizer.step()
        plain.step()
