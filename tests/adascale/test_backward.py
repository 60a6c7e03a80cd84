"""Gradients during and after backward: unused, frozen, clipped, not finite, out of order."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
)  # fmt: skip
from tests.adascale.slow import SlowAdaScale


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


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(fused, bad):
    def made():
        model, rate = mlp(), torch.tensor(0.05) if fused else 0.05
        sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=fused)
        return model, AdaScale(sgd, num_gradients_to_accumulate=2)

    (model, optimizer), (clean, expected), steps = made(), made(), list(batches(6, 2))
    train(clean, expected, steps)
    for number, micro_batches in enumerate(steps):
        if number in (0, 3):
            (x, y), *others = micro_batches
            train(model, optimizer, [[(x * bad, y), *others]])
        train(model, optimizer, [micro_batches])
    assert optimizer.skipped_steps == 2
    assert_identical(weights(model), weights(clean))
    assert optimizer.scale_invariant_steps == expected.scale_invariant_steps
    assert optimizer.gain() == expected.gain()


class Branches(nn.Module):
    """An MLP, a second branch that adds 0 at first, and an unused layer."""

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
    backward_in_turn([model, model.trunk], micro_batches)
    assert optimizer.gain() == pytest.approx(expected)


def gradients_in_turn(heads, micro_batches):
    """Gradients for the slow version, with zeros for the other head."""
    for number, (x, y) in enumerate(micro_batches):
        (own,) = next(micro_gradients(heads[number], [list(heads[number].parameters())], [(x, y)]))
        zeros = [torch.zeros_like(p) for p in heads[1 - number].parameters()]
        yield [[*zeros, *own] if number else [*own, *zeros]]


def backward_in_turn(heads, micro_batches, run=lambda head, x: head(x)):
    for head, (x, y) in zip(heads, micro_batches, strict=True):
        (nn.functional.cross_entropy(run(head, x), y) / 2).backward()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_heads_trained_in_turn_share_no_parameter(checkpointed):
    heads, twins = [mlp(), mlp()], [mlp(), mlp()]
    for model in (heads, twins):
        nn.init.constant_(model[1][0].weight, 0.1)
    optimizer = accumulating(nn.ModuleList(heads), momentum=0.0, smoothing=0.5)
    groups = [[p.detach() for twin in twins for p in twin.parameters()]]
    slow = SlowAdaScale(groups, [0.05], 2, 0.5)

    def run(head, x):
        if not checkpointed:
            return head(x)
        hidden = checkpoint(head[0], x, use_reentrant=False)
        return head[2](torch.tanh(hidden))

    for micro_batches in batches(6, 2):
        optimizer.zero_grad()
        expected = slow.step(list(gradients_in_turn(twins, micro_batches)))
        backward_in_turn(heads, micro_batches, run)
        assert optimizer.gain() == pytest.approx(expected, rel=1e-9)
        optimizer.step()
    assert optimizer.scale_invariant_steps == pytest.approx(slow.tau, rel=1e-9)
    ours, theirs = (weights(nn.ModuleList(models)) for models in (heads, twins))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)


def test_a_reentrant_checkpoint_is_refused():
    model = mlp()
    optimizer = accumulating(model)

    def run(x, y):
        output = checkpoint(model[2], torch.tanh(model[0](x)), use_reentrant=True)
        nn.functional.cross_entropy(output, y).backward()

    (x, y), other = next(batches(1, 2))
    run(x, y)  # counts as two passes
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        run(*other)
    optimizer.zero_grad()


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
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="after 2 of num_gradients_to_accumulate=3"):
            refused()
    backward(model, micro_batches[2:])
    with pytest.raises(RuntimeError, match="backward pass 4 with num_gradients_to_accumulate=3"):
        backward(model, micro_batches[:1])
    optimizer.zero_grad()
    train(model, optimizer, [micro_batches])


@pytest.mark.parametrize("how", ["abandoned", "failed"])
def test_a_step_that_was_not_taken_is_discarded(how):
    model, expected = mlp(), mlp()
    optimizer, other = accumulating(model), accumulating(expected)
    steps = list(batches(3, 2))
    if how == "abandoned":
        backward(model, steps[0])
        model.zero_grad()  # not the optimizer's zero_grad: AdaScale notices at the next backward pass
    else:
        ((x, y), _) = steps[0]
        hidden = model[0](x)
        hidden.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            nn.functional.cross_entropy(model[2](torch.tanh(hidden)), y).backward()
    train(model, optimizer, steps[1:])
    train(expected, other, steps[1:])
    assert_identical(weights(model), weights(expected))
    assert optimizer.scale_invariant_steps == other.scale_invariant_steps


def test_step_without_backward():
    model = mlp()
    optimizer = accumulating(model)
    optimizer.step()
    assert optimizer.scale_invariant_steps == 0
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(RuntimeError, match="did not come from backward"):
        optimizer.step()


# torch.compile warns on that release.
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_compiled_model():
    model, expected = mlp(), mlp()
    compiled = torch.compile(model, backend="aot_eager")
    gains = train(compiled, accumulating(model), batches(3, 2))
    assert gains == pytest.approx(train(expected, accumulating(expected), batches(3, 2)))


def test_gradients_count_before_a_post_accumulate_hook_changes_them():
    model, expected = mlp(), mlp()

    def clear(parameter):
        parameter.grad.zero_()

    model[0].weight.register_post_accumulate_grad_hook(clear)
    sums = []
    for one in (model, expected):
        optimizer = accumulating(one)
        backward(one, next(batches(1, 2)))
        sums.append(optimizer._statistics._readings[0])
    assert_identical(*sums)


def readings(model, hooks=None):
    optimizer = accumulating(model)
    for parameter in model.parameters() if hooks else ():
        parameter.register_post_accumulate_grad_hook(hooks)
    backward(model, next(batches(1, 2)))
    return optimizer._statistics._readings


def test_large_gradients_are_released_within_the_pass(monkeypatch):
    expected = readings(mlp())
    monkeypatch.setattr("adaecho.adascale.gradient_statistics._MAX_HELD_BYTES", 100)
    torch.testing.assert_close(readings(mlp()), expected, rtol=1e-14, atol=0)  # other summation order
    torch.testing.assert_close(readings(mlp(), lambda _: None), expected, rtol=1e-14, atol=0)
