"""Checkpoints: ours, FairScale's, and what they must not disconnect."""

import pytest
import torch

from adaecho.adascale import AdaScale
from tests.adascale.helpers import accumulating, assert_identical, batches, layers, mlp, train, weights
from tests.helpers import through_torch_save

KINDS = {
    "accumulation": {"num_gradients_to_accumulate": 3},
    "paper_average": {"num_gradients_to_accumulate": 3, "debias_ewma": False, "smoothing": 0.7},
    "across_steps": {"scale": 6.0},
    "fused": {"num_gradients_to_accumulate": 3},
    "groups": {"num_gradients_to_accumulate": 3},
}


def build(kind, model):
    fused = kind == "fused"
    groups = layers(model, 0.05, 0.01) if kind == "groups" else model.parameters()
    sgd = torch.optim.SGD(groups, lr=torch.tensor(0.05) if fused else 0.05, momentum=0.9, fused=fused or None)
    optimizer = AdaScale(sgd, **KINDS[kind])
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


@pytest.fixture
def model():
    return mlp()


@pytest.fixture
def optimizer(model):
    """Three micro-batches to a step, two steps on."""
    optimizer, _ = build("accumulation", model)
    train(model, optimizer, batches(2, 3))
    return optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_resume_at_every_step_is_bit_identical(kind):
    steps = list(batches(6, KINDS[kind].get("num_gradients_to_accumulate", 1), dtype=torch.float32))
    model = mlp(torch.float32)
    optimizer, scheduler = build(kind, model)
    gains = train(model, optimizer, steps, scheduler)
    for cut in range(len(steps) + 1):
        first, second = mlp(torch.float32), mlp(torch.float32)
        before, after = build(kind, first), build(kind, second)  # schedulers too
        head = train(first, before[0], steps[:cut], before[1])
        saved = through_torch_save([one.state_dict() for one in (first, *before)])
        for one, state in zip((second, *after), saved, strict=True):
            one.load_state_dict(state)
        assert head + train(second, after[0], steps[cut:], after[1]) == gains
        assert_identical(weights(second), weights(model))
        assert after[0].scale_invariant_steps == optimizer.scale_invariant_steps
        assert float(after[0].param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"scale": 4.0, "smoothing": 0.9}, {"scale": 8.0}),
        ({"scale": 4.0, "num_gradients": 2, "smoothing": 0.9}, {"scale": 8.0, "num_gradients": 2}),
        ({"num_gradients": 2, "smoothing": 0.99}, {"num_gradients": 4}),
    ],
    ids=["across steps", "same passes", "other passes"],
)
def test_a_checkpoint_goes_on_at_another_scale_with_the_same_base_batch(model, before, after):
    before, after = ({"num_gradients": 1, **one} for one in (before, after))
    optimizer = accumulating(model, momentum=0.0, **before)
    train(model, optimizer, batches(20, before["num_gradients"]))
    variance, square = optimizer.grad_var_avg(), optimizer.grad_sqr_avg()
    state, tau = through_torch_save(optimizer.state_dict()), optimizer.scale_invariant_steps
    optimizer.unhook()
    elastic = accumulating(model, momentum=0.0, **after)
    elastic.load_state_dict(state)
    assert (elastic.grad_var_avg(), elastic.grad_sqr_avg()) == (variance, square)
    scale = after.get("scale", 4)
    assert elastic.gain() == pytest.approx((variance + square) / (variance / scale + square))
    gains = train(model, elastic, batches(5, after["num_gradients"], seed=1))
    assert elastic.scale_invariant_steps == pytest.approx(tau + sum(gains))
    if "scale" not in after:  # of a base batch, however many there are: one number
        assert elastic.smoothing == 0.996
        assert elastic.grad_var_avg() == pytest.approx(variance, rel=0.3)


def test_checkpoints_that_do_not_fit_are_refused(model, optimizer):
    state = optimizer.state_dict()
    two, _ = build("groups", model)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        two.load_state_dict(state)


def test_the_bare_optimizer_reads_our_checkpoint_and_its_own_starts_new_averages(model, optimizer):
    bare = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    of_bare = bare.state_dict()
    bare.load_state_dict(optimizer.state_dict())
    weight = model[0].weight
    assert_identical(bare.state[weight]["momentum_buffer"], optimizer.state[weight]["momentum_buffer"])
    optimizer.load_state_dict(of_bare)
    assert (optimizer.gain(), optimizer.scale_invariant_steps) == (1.0, 0.0)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_scale_invariant_steps_can_be_assigned(model, optimizer):
    optimizer.scale_invariant_steps = 41.5
    assert optimizer.schedule_increment() == 0
    (gain,) = train(model, optimizer, batches(1, 3))
    assert optimizer.scale_invariant_steps == pytest.approx(41.5 + gain)
    assert optimizer.schedule_increment() == int(41.5 + gain) - 41


def test_the_last_gradient_of_another_scale_is_no_sample_beside_the_next():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def trained(optimizer, gradients):
        for gradient in gradients:
            optimizer.zero_grad()
            (parameter * gradient).sum().backward()
            optimizer.step()
        return optimizer

    before = trained(AdaScale(torch.optim.SGD([parameter], lr=0.0), scale=4.0), [1.0, 2.0, 1.0])
    before.unhook()
    after = AdaScale(torch.optim.SGD([parameter], lr=0.0), scale=16.0)
    after.load_state_dict(through_torch_save(before.state_dict()))
    assert trained(after, [5.0]).grad_var_avg() == before.grad_var_avg()
    assert trained(after, [5.0]).grad_var_avg() < before.grad_var_avg()
