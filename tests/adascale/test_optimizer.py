"""AdaScale on one process: gains, steps, and everything between backward and step."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adaecho import AdaScale
from tests.adascale.helpers import assert_identical, backward, batches, mlp, train, weights
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


def micro_gradients(model, groups, micro_batches):
    """Each micro-batch's gradient by group, computed apart from the optimizer and its hooks."""
    parameters = [p for group in groups for p in group]
    for x, y in micro_batches:
        loss = nn.functional.cross_entropy(model(x), y)
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


def accumulating(model, num_gradients=2, momentum=0.9, **arguments):
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    return AdaScale(sgd, num_gradients_to_accumulate=num_gradients, **arguments)


def test_clipping_changes_the_step_and_not_the_gain():
    clipped, free = mlp(), mlp()
    optimizers = [accumulating(model, momentum=0.0) for model in (clipped, free)]
    for micro_batches in batches(5, 2):
        before = weights(clipped)
        for model, optimizer in zip((clipped, free), optimizers, strict=True):
            model.load_state_dict(clipped.state_dict())
            optimizer.zero_grad()
            backward(model, micro_batches)
        for parameter in clipped.parameters():
            parameter.grad *= 0.1
        assert optimizers[0].gain() == optimizers[1].gain()
        gain = optimizers[0].gain()
        for optimizer in optimizers:
            optimizer.step()
        for old, new, other in zip(before, weights(clipped), free.parameters(), strict=True):
            torch.testing.assert_close(new, old - 0.05 * gain * 0.1 * other.grad)


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_leaves_no_trace(bad):
    model, clean = mlp(), mlp()
    optimizer, expected = accumulating(model), accumulating(clean)
    steps = list(batches(6, 2))
    train(clean, expected, steps)
    for number, micro_batches in enumerate(steps):
        if number in (0, 3):
            (x, y), other = micro_batches
            optimizer.zero_grad()
            backward(model, [(x * bad, y), other])
            optimizer.step()
        train(model, optimizer, [micro_batches])
    assert optimizer.skipped_steps == 2
    assert_identical(weights(model), weights(clean))
    assert optimizer.scale_invariant_steps == expected.scale_invariant_steps
    assert optimizer.gain() == expected.gain()


class Branches(nn.Module):
    """An MLP, a layer beside it that adds 0 at first, and an unused one."""

    def __init__(self):
        super().__init__()
        self.trunk, self.never = mlp(), nn.Linear(5, 3).double()
        self.extra = nn.Linear(5, 3).double()
        nn.init.zeros_(self.extra.weight)
        nn.init.zeros_(self.extra.bias)

    def forward(self, x):
        return self.trunk(x) + self.extra(x)


def test_unused_and_frozen_parameters_do_not_count():
    model, trunk = Branches(), mlp()
    model.extra.requires_grad_(False)
    gains = train(model, accumulating(model), batches(5, 2))
    assert gains == pytest.approx(train(trunk, accumulating(trunk), batches(5, 2)), rel=1e-12)
    assert_identical(weights(model.trunk), weights(trunk))


def test_a_parameter_used_by_one_micro_batch_has_zero_gradient_in_the_other():
    model = Branches()
    optimizer = accumulating(model, smoothing=0.0)
    micro_batches = next(batches(1, 2))
    groups = [[*model.trunk.parameters(), *model.extra.parameters()]]
    with_both = list(micro_gradients(model, groups, micro_batches))
    with_both[1][0][-2:] = [torch.zeros_like(p) for p in model.extra.parameters()]
    expected = SlowAdaScale(groups, [0.0], 2, 0.0).step(with_both)
    (x, y), (x2, y2) = micro_batches
    (nn.functional.cross_entropy(model(x), y) / 2).backward()
    (nn.functional.cross_entropy(model.trunk(x2), y2) / 2).backward()
    assert optimizer.gain() == pytest.approx(expected)


def test_unfrozen_parameters_count_from_the_next_step():
    model = Branches()
    model.extra.requires_grad_(False)
    optimizer = accumulating(model, smoothing=0.0)
    steps = list(batches(2, 2))
    train(model, optimizer, steps[:1])
    model.extra.requires_grad_(True)
    groups = [[*model.trunk.parameters(), *model.extra.parameters()]]
    expected = SlowAdaScale(groups, [0.0], 2, 0.0).step(list(micro_gradients(model, groups, steps[1])))
    assert train(model, optimizer, steps[1:]) == [pytest.approx(expected)]


def test_passes_and_steps_in_the_wrong_order():
    model = mlp()
    optimizer = accumulating(model, num_gradients=3)
    micro_batches = next(batches(1, 3))
    backward(model, micro_batches[:2])
    for refused in (optimizer.step, optimizer.state_dict, lambda: optimizer.set_scale(4)):
        with pytest.raises(RuntimeError, match="after 2 of num_gradients_to_accumulate=3"):
            refused()
    backward(model, micro_batches[2:])
    with pytest.raises(RuntimeError, match="backward pass 4 of a step"):
        backward(model, micro_batches[:1])
    optimizer.zero_grad()
    train(model, optimizer, [micro_batches])


def test_a_step_given_up_is_forgotten():
    model, expected = mlp(), mlp()
    optimizer, other = accumulating(model), accumulating(expected)
    steps = list(batches(3, 2))
    backward(model, steps[0])
    model.zero_grad()  # not the optimizer's: it learns from the next backward pass
    train(model, optimizer, steps[1:])
    train(expected, other, steps[1:])
    assert_identical(weights(model), weights(expected))
    assert optimizer.scale_invariant_steps == other.scale_invariant_steps


def test_step_without_gradients_does_nothing_and_hand_made_gradients_are_refused():
    model = mlp()
    optimizer = accumulating(model)
    optimizer.step()
    assert optimizer.scale_invariant_steps == 0
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(RuntimeError, match="no backward pass brought"):
        optimizer.step()


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


def test_scale_changes_between_steps_keep_the_base_batch():
    # Two micro-batches of one base batch, then four, then two: the variance of a base batch is one number.
    model = mlp()
    optimizer = accumulating(model, num_gradients=2, smoothing=0.99)
    train(model, optimizer, batches(20, 2))
    variance, square = optimizer.grad_var_avg(), optimizer.grad_sqr_avg()
    optimizer.set_num_gradients_to_accumulate(4)
    optimizer.set_scale(4.0)
    assert optimizer.smoothing == 0.996
    assert (optimizer.grad_var_avg(), optimizer.grad_sqr_avg()) == (variance, square)
    assert optimizer.gain() == pytest.approx((variance + square) / (variance / 4 + square))
    tau = optimizer.scale_invariant_steps
    gains = train(model, optimizer, batches(5, 4, seed=1))
    optimizer.set_num_gradients_to_accumulate(2, update_smoothing=False)
    optimizer.set_scale(2.0)
    assert optimizer.smoothing == 0.996
    gains += train(model, optimizer, batches(5, 2, seed=2))
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
    with pytest.raises(AttributeError, match="no_such"):
        _ = optimizer.no_such


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    model, expected = mlp(), mlp()
    optimizer, plain = accumulating(model), accumulating(expected)
    for micro_batches in batches(3, 2):
        optimizer.zero_grad()
        for x, y in micro_batches:
            hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=reentrant)
            output = checkpoint(model[2], torch.tanh(hidden), use_reentrant=reentrant)
            (nn.functional.cross_entropy(output, y) / 2).backward()
        gain = optimizer.gain()
        optimizer.step()
        assert train(expected, plain, [[(x.detach(), y) for x, y in micro_batches]]) == [
            pytest.approx(gain, rel=1e-12)
        ]
    torch.testing.assert_close(weights(model), weights(expected))


# torch.compile says so on that one release.
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_compiled_model():
    model, expected = mlp(), mlp()
    compiled = torch.compile(model, backend="aot_eager")
    gains = train(compiled, accumulating(model), batches(3, 2))
    assert gains == pytest.approx(train(expected, accumulating(expected), batches(3, 2)))


def test_gradients_changed_inside_backward_still_count_as_they_came():
    model, expected = mlp(), mlp()

    def clear(parameter):
        parameter.grad.zero_()

    model[0].weight.register_post_accumulate_grad_hook(clear)
    optimizer, plain = accumulating(model), accumulating(expected)
    micro_batches = next(batches(1, 2))
    backward(model, micro_batches)
    backward(expected, micro_batches)
    local = optimizer._statistics.collector.sums_of_squares()
    assert_identical(local, plain._statistics.collector.sums_of_squares())


def test_a_backward_pass_that_failed_is_forgotten_by_zero_grad():
    model, expected = mlp(), mlp()
    optimizer = accumulating(model)
    steps = list(batches(2, 2))
    ((x, y), _) = steps[0]
    hidden = model[0](x)
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        nn.functional.cross_entropy(model[2](torch.tanh(hidden)), y).backward()
    train(model, optimizer, steps)
    train(expected, accumulating(expected), steps)
    assert_identical(weights(model), weights(expected))
