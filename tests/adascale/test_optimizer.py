"""AdaScale on one process: gains, steps, schedules, and its settings."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from adaecho import AdaScale
from tests.adascale.helpers import (
    accumulating,
    assert_identical,
    backward,
    batches,
    micro_gradients,
    mlp,
    train,
    weights,
)
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
    model, twin = mlp(), mlp()
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
    for micro_batches in batches(60, num_micro_batches):
        slow_gain = slow.step(list(micro_gradients(twin, twins, micro_batches)))
        optimizer.zero_grad()
        backward(model, micro_batches)
        assert optimizer.gain() == pytest.approx(slow_gain, rel=1e-9)
        optimizer.step()
        assert optimizer.scale_invariant_steps == pytest.approx(slow.tau, rel=1e-9)
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("across", ["gradients", "steps"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_are_squared_in_full(dtype, across):
    # Small enough that their squares underflow in half precision: mu^2 would be 0.
    parameter = nn.Parameter(torch.zeros(4096, dtype=dtype))
    arguments = {"num_gradients_to_accumulate": 2} if across == "gradients" else {"scale": 2.0}
    optimizer = AdaScale(torch.optim.SGD([parameter], lr=0.0), smoothing=0.0, **arguments)
    size = 2.0**-15
    if across == "gradients":
        for _ in range(2):
            (parameter.float() * size / 2).sum().backward()
    else:
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            (parameter.float() * size).sum().backward()
    assert optimizer.grad_sqr_avg() == pytest.approx(4096 * size**2, rel=1e-3)


def resized(model):
    for parameter in model.parameters():
        parameter.data = parameter.data[:2].clone()


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.bfloat16, resized])
@pytest.mark.parametrize("after", [0, 1])
def test_parameters_that_change_in_type_or_size(change, after):
    torch.manual_seed(0)
    model = nn.Embedding(6, 5).float()
    optimizer = accumulating(model, momentum=0.0, smoothing=0.0)
    for step in range(after + 1):
        if step == after:
            change(model)
        optimizer.zero_grad()
        gradients = [torch.randn_like(model.weight) for _ in range(2)]
        for gradient in gradients:
            (model.weight * gradient / 2).sum().backward()
        optimizer.step()
    mean = sum(gradients).double() / 2
    squares = sum(gradient.double().square().sum() for gradient in gradients) / 2
    variance = 2 * (squares - mean.square().sum())
    square = mean.square().sum() - variance / 2
    assert optimizer.grad_var_avg() == pytest.approx(float(variance), rel=0.02)
    assert optimizer.grad_sqr_avg() == pytest.approx(max(float(square), 0), rel=0.05, abs=0.05)


def test_made_in_inference_mode():
    model = mlp()
    with torch.inference_mode():
        optimizer = accumulating(model)
        optimizer.zero_grad()
    expected = mlp()
    assert train(model, optimizer, batches(2, 2)) == train(expected, accumulating(expected), batches(2, 2))


def test_complex_parameters_are_refused():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="view_as_real"):
        AdaScale(torch.optim.SGD([parameter], lr=0.1), scale=2.0)


def test_without_its_hooks_a_step_is_refused():
    model = mlp()
    optimizer = accumulating(model)
    optimizer.unhook()
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    backward(model, next(batches(1, 2)))
    with pytest.raises(RuntimeError, match="gradients that no backward pass brought"):
        optimizer.step()


def test_learning_rate_is_restored_even_if_the_step_fails():
    model = mlp()
    optimizer = accumulating(model)
    backward(model, next(batches(1, 2)))

    def fail(*_):
        raise OSError("no")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="no"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_tensor_learning_rate_stays_the_same_object():
    model, plain = mlp(), mlp()
    rate = torch.tensor(0.05, dtype=torch.float64)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=rate), num_gradients_to_accumulate=2)
    train(model, optimizer, batches(5, 2))
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.05
    train(plain, accumulating(plain, momentum=0.0), batches(5, 2))
    torch.testing.assert_close(weights(model), weights(plain))


def test_closure():
    model, expected = mlp(), mlp()
    optimizer = accumulating(model)
    steps = list(batches(3, 2))
    for micro_batches in steps:

        def closure(micro_batches=micro_batches):
            optimizer.zero_grad()
            backward(model, micro_batches)
            return 7.0

        assert optimizer.step(closure) == 7.0
    train(expected, accumulating(expected), steps)
    assert_identical(weights(model), weights(expected))


def test_scale_invariant_steps_and_the_stop_rule():
    model = mlp()
    optimizer = accumulating(model, num_gradients=4)
    gains, stops = [], []
    for micro_batches in batches(8, 4):
        stops.append(optimizer.done(10))
        gains += train(model, optimizer, [micro_batches])
    sums = [sum(gains[:k]) for k in range(9)]
    assert optimizer.scale_invariant_steps == pytest.approx(sums[-1])
    assert 1.5 < sums[-1] / 8 <= 4
    assert stops == [value >= 10 for value in sums[:-1]]
    assert optimizer.done(sums[-1] - 1e-9)
    assert not optimizer.done(sums[-1] + 1e-9)


def test_a_scheduler_advances_by_whole_base_steps():
    model = mlp()
    optimizer = accumulating(model, num_gradients=4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    for micro_batches in batches(9, 4):
        train(model, optimizer, [micro_batches], scheduler)
        step = math.floor(optimizer.scale_invariant_steps)
        assert scheduler.last_epoch == step
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * (1 - step / 100))


def test_another_scale_goes_on_with_the_same_base_batch():
    # Two micro-batches of one base batch, then four: the variance of a base batch is one number.
    model = mlp()
    optimizer = accumulating(model, num_gradients=2, smoothing=0.99)
    train(model, optimizer, batches(20, 2))
    variance, square = optimizer.grad_var_avg(), optimizer.grad_sqr_avg()
    state, tau = optimizer.state_dict(), optimizer.scale_invariant_steps
    optimizer.unhook()
    optimizer = accumulating(model, num_gradients=4)
    optimizer.load_state_dict(state)
    assert optimizer.smoothing == 0.996
    assert (optimizer.grad_var_avg(), optimizer.grad_sqr_avg()) == (variance, square)
    assert optimizer.gain() == pytest.approx((variance + square) / (variance / 4 + square))
    gains = train(model, optimizer, batches(5, 4, seed=1))
    assert optimizer.scale_invariant_steps == pytest.approx(tau + sum(gains))
    assert optimizer.grad_var_avg() == pytest.approx(variance, rel=0.3)


def test_added_group_is_hooked_and_counted():
    model = mlp()
    optimizer = AdaScale(
        torch.optim.SGD(model[0].parameters(), lr=0.05), num_gradients_to_accumulate=2, smoothing=0.0
    )
    steps = list(batches(2, 2))
    train(model, optimizer, steps[:1])
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
    model.zero_grad()
    groups = [list(model[0].parameters()), list(model[2].parameters())]
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    twins = [list(twin[0].parameters()), list(twin[2].parameters())]
    slow = SlowAdaScale([[p.detach() for p in g] for g in twins], [0.05, 0.01], 2, 0.0)
    expected = slow.step(list(micro_gradients(model, groups, steps[1])))
    assert train(model, optimizer, steps[1:]) == [pytest.approx(expected)]
    torch.testing.assert_close(weights(model), weights(twin))


def test_nothing_keeps_the_optimizer_or_its_hooks_alive():
    model = mlp()
    optimizer = accumulating(model)
    backward(model, next(batches(1, 2)))
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_attributes_of_the_wrapped_optimizer():
    optimizer = accumulating(mlp())
    assert optimizer.defaults["momentum"] == 0.9
    assert isinstance(optimizer, torch.optim.Optimizer)
    with pytest.raises(AttributeError, match="neither AdaScale nor the SGD in it has an attribute 'no_such'"):
        _ = optimizer.no_such
    assert not hasattr(optimizer, "set_scale")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Give scale="),
        ({"num_gradients_to_accumulate": 0}, "num_gradients_to_accumulate=0"),
        ({"num_gradients_to_accumulate": 2, "scale": 0.5}, "scale=0.5"),
        ({"num_gradients_to_accumulate": 2, "scale": float("nan")}, "scale=nan"),
        ({"num_gradients_to_accumulate": 2, "smoothing": 1.0}, "smoothing=1.0"),
        ({"num_gradients_to_accumulate": 2, "world_size": 4}, "world_size=4"),
    ],
)
def test_arguments_that_can_not_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaScale(torch.optim.SGD(mlp().parameters(), lr=0.1), **arguments)


def test_dividing_twice_is_refused():
    with pytest.raises(RuntimeError, match="divided already"):
        accumulating(mlp()).scale_grad_by_num_grads_to_accum()


def test_what_is_no_optimizer_and_methods_of_fairscale_that_are_not_here_are_told():
    with pytest.raises(TypeError, match=r"a Sequential is no optimizer; write AdaScale\(torch.optim.SGD"):
        AdaScale(mlp())
    optimizer = AdaScale(torch.optim.SGD(mlp().parameters(), lr=0.1), num_gradients_to_accumulate=2)
    with pytest.raises(AttributeError, match="another scale= and let it load"):
        optimizer.set_scale(4.0)
    with pytest.raises(AttributeError, match="another num_gradients_to_accumulate= and let it load"):
        optimizer.set_num_gradients_to_accumulate(4)
