"""AdaScale on one process: gains, steps, and everything between backward and step."""

import pytest
import torch
from torch import nn

from adaecho import AdaScale
from tests.adascale.slow import SlowAdaScale

GOLDEN = [  # FairScale's golden gains: Linear(2, 2), loss = out.sum(), two micro-batches
    ([[[1.0, 0.0], [0.0, 1.0]]], 4 / 3),
    ([[[1.0, 1.0], [1.0, 1.0]]], 1.0000001249999846),
    ([[[-1.0, 1.0], [1.0, -1.0]]], 2.0),
    ([[[1.0, 4.0], [5.0, 0.5]]], 1.4688796680497926),
    ([[[-0.2, 3.0], [5.0, 0.5]]], 1.8472893901708),
    ([[[-0.2, 3.3], [5.2, 0.7]], [[1.0, 4.0], [3.1, 0.1]]], 1.6720968158031417),
]


@pytest.mark.parametrize("is_scaled_loss", [True, False])
@pytest.mark.parametrize(("steps", "expected"), GOLDEN)
def test_golden_gains(steps, expected, is_scaled_loss):
    model = nn.Linear(2, 2)
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1),
        num_gradients_to_accumulate=2,
        is_scaled_loss=is_scaled_loss,
    )
    for micro_batches in steps:
        optimizer.zero_grad()
        for row in micro_batches:
            (model(torch.tensor(row)).sum() / (2 if is_scaled_loss else 1)).backward()
        gain = optimizer.gain()
        if not is_scaled_loss:
            optimizer.scale_grad_by_num_grads_to_accum()
        weight, gradient = model.weight.detach().clone(), model.weight.grad.clone()
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), weight - 0.1 * optimizer.gain(0) * gradient)
    assert gain == pytest.approx(expected, abs=1e-6)


def double_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batches(num_steps, num_micro_batches, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        x = torch.randn(num_micro_batches, 4, 5, generator=generator, dtype=torch.float64)
        yield x, torch.randint(3, (num_micro_batches, 4), generator=generator)


def micro_gradients(model, groups, x, y):
    """Each micro-batch's gradient by group, computed apart from the optimizer and its hooks."""
    parameters = [p for group in groups for p in group]
    for inputs, labels in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        flat = list(torch.autograd.grad(loss, parameters))
        yield [[flat.pop(0) for _ in group] for group in groups]


@pytest.mark.parametrize(
    ("num_micro_batches", "scale", "smoothing", "debias", "momentum", "num_groups"),
    [
        (2, None, None, True, 0.0, 1),
        (4, None, 0.9, True, 0.9, 2),
        (4, 8.0, 0.5, False, 0.9, 2),
        (3, 1.5, 0.0, True, 0.0, 2),
        (16, None, 0.95, False, 0.5, 1),
    ],
)
def test_equals_the_slow_version(num_micro_batches, scale, smoothing, debias, momentum, num_groups):
    model, twin = double_mlp(), double_mlp()
    learning_rates = [0.05, 0.02][:num_groups]
    split = {1: [list(model.parameters())], 2: [list(model[0].parameters()), list(model[2].parameters())]}
    sgd = torch.optim.SGD(
        [{"params": p, "lr": lr} for p, lr in zip(split[num_groups], learning_rates, strict=True)],
        momentum=momentum,
    )
    optimizer = AdaScale(
        sgd,
        scale=scale,
        smoothing=smoothing,
        num_gradients_to_accumulate=num_micro_batches,
        debias_ewma=debias,
    )
    twins = (
        [list(twin.parameters())] if num_groups == 1 else [list(m.parameters()) for m in (twin[0], twin[2])]
    )
    slow = SlowAdaScale(
        [[p.detach() for p in group] for group in twins],
        learning_rates,
        scale or num_micro_batches,
        1 - num_micro_batches / 1000 if smoothing is None else smoothing,
        momentum,
        debias,
    )
    for x, y in batches(60, num_micro_batches):
        slow_gain = slow.step(list(micro_gradients(twin, twins, x, y)))
        optimizer.zero_grad()
        for inputs, labels in zip(x, y, strict=True):
            (nn.functional.cross_entropy(model(inputs), labels) / num_micro_batches).backward()
        assert optimizer.gain() == pytest.approx(slow_gain, rel=1e-9)
        optimizer.step()
        assert optimizer.scale_invariant_steps == pytest.approx(slow.tau, rel=1e-9)
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-12)
