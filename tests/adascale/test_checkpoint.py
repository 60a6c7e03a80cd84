"""Checkpoints through torch.save."""

import pytest
import torch

from adaecho.adascale import AdaScale
from tests.adascale.helpers import accumulating, assert_identical, batches, layers, mlp, train, weights
from tests.helpers import through_torch_save

KINDS = {
    "accumulation": {"num_gradients_to_accumulate": 3},
    "paper_average": {"num_gradients_to_accumulate": 3, "debias_ewma": False, "smoothing": 0.7},
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
    """AdaScale with three micro-batches per step, after two steps."""
    optimizer, _ = build("accumulation", model)
    train(model, optimizer, batches(2, 3))
    return optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_resume_at_every_step_is_bit_identical(kind):
    steps = list(batches(6, 3, dtype=torch.float32))
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
        ({"scale": 4.0, "num_gradients": 2, "smoothing": 0.9}, {"scale": 8.0, "num_gradients": 2}),
        ({"num_gradients": 2, "smoothing": 0.99}, {"num_gradients": 4}),
    ],
    ids=["same passes", "other passes"],
)
def test_a_checkpoint_continues_at_another_scale_with_the_same_base_batch(model, before, after):
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
    if "scale" not in after:  # sigma^2 is of a base batch, for any number of them
        assert elastic.smoothing == 0.996
        assert elastic.grad_var_avg() == pytest.approx(variance, rel=0.3)


def test_a_checkpoint_with_other_groups_is_refused(model, optimizer):
    state = optimizer.state_dict()
    two, _ = build("groups", model)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        two.load_state_dict(state)


def test_states_of_the_wrapped_optimizer_and_of_adascale_are_exchangeable(model, optimizer):
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
