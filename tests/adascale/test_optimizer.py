"""AdaScale on one process: gains, steps, schedules and arguments."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from adaecho import AdaScale
from tests.adascale.helpers import (
    accumulating,
    assert_identical,
    backward,
    batches,
    layers,
    micro_gradients,
    mlp,
    train,
    weights,
)  # fmt: skip
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
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = AdaScale(sgd, num_gradients_to_accumulate=2, is_scaled_loss=is_scaled_loss)
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
    ("count", "momentum", "num_groups", "given"),
    [
        (2, 0.0, 1, {}),
        (4, 0.9, 2, {"smoothing": 0.9}),
        (4, 0.9, 2, {"scale": 8.0, "smoothing": 0.5, "debias_ewma": False}),
        (3, 0.0, 2, {"scale": 1.5, "smoothing": 0.0}),
        (16, 0.5, 1, {"smoothing": 0.95, "debias_ewma": False}),
    ],
)
def test_equals_the_slow_version(count, momentum, num_groups, given):
    model, twin = mlp(), mlp()
    rates = [0.05, 0.02][:num_groups]
    groups = layers(model, *rates) if num_groups == 2 else [{"params": model.parameters(), "lr": 0.05}]
    optimizer = AdaScale(
        torch.optim.SGD(groups, momentum=momentum), num_gradients_to_accumulate=count, **given
    )
    twins = layers(twin) if num_groups == 2 else [list(twin.parameters())]
    smoothing, debias = given.get("smoothing", 1 - count / 1000), given.get("debias_ewma", True)
    slow = SlowAdaScale(twins, rates, given.get("scale", count), smoothing, momentum, debias)
    for micro_batches in batches(60, count):
        slow_gain = slow.step(list(micro_gradients(twin, twins, micro_batches)))
        optimizer.zero_grad()
        backward(model, micro_batches)
        assert optimizer.gain() == pytest.approx(slow_gain, rel=1e-9)
        optimizer.step()
        assert optimizer.scale_invariant_steps == pytest.approx(slow.tau, rel=1e-9)
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-9, atol=1e-12)


def test_unhook_is_final_and_a_step_without_hooks_is_refused():
    model = mlp()
    optimizer = accumulating(model)
    optimizer.unhook()
    optimizer.zero_grad()
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    backward(model, next(batches(1, 2)))
    with pytest.raises(RuntimeError, match="gradients that did not come from backward"):
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
    assert isinstance(optimizer, torch.optim.Optimizer)
    train(model, optimizer, batches(5, 2))
    assert optimizer.param_groups[0]["lr"] is rate
    assert (rate, optimizer.defaults["momentum"]) == (0.05, 0)
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


def test_a_scheduler_advances_by_whole_base_steps_up_to_the_stop_rule():
    model = mlp()
    optimizer = accumulating(model, num_gradients=4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    tau = 0.0
    for micro_batches in batches(9, 4):
        assert optimizer.done(10) == (tau >= 10)
        tau += train(model, optimizer, [micro_batches], scheduler)[0]
        assert optimizer.scale_invariant_steps == pytest.approx(tau)
        assert scheduler.last_epoch == math.floor(tau)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * (1 - math.floor(tau) / 100))
    assert 1.5 < tau / 9 <= 4
    assert optimizer.done(tau - 1e-9)
    assert not optimizer.done(tau + 1e-9)


def test_averages_of_an_added_group_cover_its_own_steps():
    model, twin = mlp(), mlp()
    sgd = torch.optim.SGD(layers(model)[0], lr=0.05)
    optimizer = AdaScale(sgd, num_gradients_to_accumulate=2, smoothing=0.5)
    slow = SlowAdaScale(layers(twin)[:1], [0.05], 2, 0.5)
    for number, micro_batches in enumerate(batches(4, 2)):
        if number == 2:
            optimizer.add_param_group(layers(model, 0.05, 0.01)[1])
            slow.groups, slow.learning_rates = layers(twin), [0.05, 0.01]
            slow.samples.append([])
            model.zero_grad()
        expected = slow.step(list(micro_gradients(twin, slow.groups, micro_batches)))
        assert train(model, optimizer, [micro_batches]) == [pytest.approx(expected)]
    torch.testing.assert_close(weights(model), weights(twin))


def test_the_pooled_gain_covers_the_groups_that_are_trained():
    model = mlp()
    optimizer = AdaScale(torch.optim.SGD(layers(model, 0.01, 0.01)), num_gradients_to_accumulate=2)
    steps = list(batches(12, 2))
    train(model, optimizer, steps[:4])
    averages = optimizer.grad_var_avg(1), optimizer.grad_sqr_avg(1)
    assert optimizer.grad_var_avg() == pytest.approx(optimizer.grad_var_avg(0) + averages[0])
    model[2].requires_grad_(False)
    gains = train(model, optimizer, steps[4:8])
    assert (gains[-1], optimizer.grad_var_avg()) == (optimizer.gain(0), optimizer.grad_var_avg(0))
    assert (optimizer.grad_var_avg(1), optimizer.grad_sqr_avg(1)) == averages
    model[2].requires_grad_(True)
    train(model, optimizer, steps[8:])
    assert optimizer.grad_var_avg() == optimizer.grad_var_avg(0) + optimizer.grad_var_avg(1)
    assert optimizer.grad_var_avg(1) != averages[0]


def test_hooks_do_not_keep_the_optimizer_alive():
    model = mlp()
    optimizer = accumulating(model)
    backward(model, next(batches(1, 2)))
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    assert not any(parameter._backward_hooks for parameter in model.parameters())


class Operations(TorchDispatchMode):
    """Count the operations that torch dispatches. A multi-tensor call counts once."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(num_layers, momentum, passes, wrap):
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(num_layers)])
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum, foreach=True))
    for micro_batches in batches(3, passes, dtype=torch.float32):
        with Operations() as counter:
            optimizer.zero_grad()
            backward(model, micro_batches)
            optimizer.step()
    return counter.count


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("passes", "limit"), [(2, 40), (16, 60)])
def test_the_operations_of_a_step_do_not_grow_with_the_number_of_parameters(passes, limit, momentum):
    def wrap(sgd):
        return AdaScale(sgd, num_gradients_to_accumulate=passes)

    added = [
        operations(layers, momentum, passes, wrap) - operations(layers, momentum, passes, lambda sgd: sgd)
        for layers in (2, 50)
    ]
    assert added[0] == added[1] <= limit


REFUSED = {
    "one gradient": (lambda: given(scale=4.0), ValueError, "at least 2 gradients per step"),
    "no passes": (lambda: given(num_gradients_to_accumulate=0), ValueError, "num_gradients_to_accumulate=0"),
    "small scale": (lambda: accumulating(mlp(), scale=0.5), ValueError, "scale=0.5"),
    "scale of nan": (lambda: accumulating(mlp(), scale=math.nan), ValueError, "scale=nan"),
    "smoothing": (lambda: accumulating(mlp(), smoothing=1.0), ValueError, "smoothing=1.0"),
    "dividing twice": (
        lambda: accumulating(mlp()).scale_grad_by_num_grads_to_accum(), RuntimeError, "already divided",
    ),
}  # fmt: skip


def given(**arguments):
    return AdaScale(torch.optim.SGD(mlp().parameters(), lr=0.1), **arguments)


@pytest.mark.parametrize(("act", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused(act, error, message):
    with pytest.raises(error, match=message):
        act()
