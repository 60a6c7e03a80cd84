"""Checkpoints: ours, FairScale's, and what they must not disconnect."""

import copy
import math
import pickle

import numpy as np
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


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copied, optimizer):
    with pytest.raises(TypeError, match="use state_dict"):
        copied(optimizer)


def test_checkpoints_that_do_not_fit_are_refused(model, optimizer):
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="debias_ewma=True"):
        accumulating(model, 3, debias_ewma=False).load_state_dict(state)
    two, _ = build("groups", model)
    with pytest.raises(ValueError, match=r"statistics of 1 parameter group\(s\), the optimizer has 2"):
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


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("accumulation", [(6, 5), (5, 4), (4, 3)]),
        ("across_steps", [(6, 5), (5, 4), (4, 3)]),
        ("across_steps", [(7, 5), (5, 3)]),  # torch itself compares no shapes of a momentum
    ],
)
def test_a_refused_checkpoint_of_another_model_changes_nothing(model, kind, sizes):
    other = torch.nn.Sequential(*(torch.nn.Linear(*one, dtype=torch.float64) for one in sizes))
    foreign, _ = build(kind, other)
    for _ in range(6):
        other(torch.randn(4, sizes[0][0], dtype=torch.float64)).square().sum().backward()
        if foreign._statistics.sample is not None:
            foreign.step()
            foreign.zero_grad()
    optimizer, _ = build(kind, model)
    train(model, optimizer, batches(3, KINDS[kind].get("num_gradients_to_accumulate", 1)))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"another model|size|parameter group"):
        optimizer.load_state_dict(foreign.state_dict())
    assert_identical(optimizer.state_dict(), before)


def test_scale_invariant_steps_can_be_assigned(model, optimizer):
    optimizer.scale_invariant_steps = 41.5
    assert optimizer.schedule_increment() == 0
    (gain,) = train(model, optimizer, batches(1, 3))
    assert optimizer.scale_invariant_steps == pytest.approx(41.5 + gain)
    assert optimizer.schedule_increment() == int(41.5 + gain) - 41


def with_fairscales(optimizer, entries):
    """A checkpoint in the layout of FairScale 0.4.13: "adascale" inside the optimizer's own state."""
    state = optimizer._optimizer.state_dict()
    state["state"]["adascale"] = entries
    return state


AVERAGES = {"grad_sqr_avg": np.array([2.0]), "grad_var_avg": np.array([6.0])}


@pytest.mark.parametrize("debias", [True, False])
def test_a_fairscale_checkpoint_of_before_the_first_step_is_of_either_kind(model, debias):
    optimizer = accumulating(model, 3, debias_ewma=debias)
    with pytest.warns(UserWarning, match="no scale-invariant steps"):
        optimizer.load_state_dict(with_fairscales(optimizer, AVERAGES))
    assert (optimizer.gain(), optimizer.grad_sqr_avg()) == (3.0, 0.0)
    train(model, optimizer, batches(1, 3))
    assert optimizer.state_dict()["adascale"]["weight"].tolist() == pytest.approx([0.003 if debias else 1])
    other = {**AVERAGES, f"grad_sqr_avg_{'count' if debias else 'unbias'}": np.array([1.0])}
    with (
        pytest.warns(UserWarning, match="no scale-invariant steps"),
        pytest.raises(ValueError, match=f"debias_ewma={not debias}"),
    ):
        optimizer.load_state_dict(with_fairscales(optimizer, other))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("grad_sqr_avg", None), ("grad_var_avg", np.array([1j])), ("grad_sqr_avg_unbias", "a"), ("", None)],
)
def test_a_damaged_fairscale_checkpoint_is_refused(model, name, wrong):
    optimizer = accumulating(model, 3)
    damaged = {**AVERAGES, name: wrong} if name else wrong
    with pytest.raises(ValueError, match=f"FairScale's part of the checkpoint is damaged: {name or 'grad'}"):
        optimizer.load_state_dict(with_fairscales(optimizer, damaged))
    assert optimizer.state_dict()["adascale"]["weight"].tolist() == [0.0]


COMPLEX, HALVES = torch.tensor([1j]), torch.tensor([0.5]).to_sparse()
WRONG = [None, "a", [1.0], 1.0, math.nan, COMPLEX, HALVES, torch.tensor(0.5), torch.tensor([math.inf])]
DAMAGE = {
    **{
        f"{name} of {number}": ({name: wrong}, f"is damaged: {name} is ")
        for name in ("variance", "square", "weight")
        for number, wrong in enumerate([*WRONG, *map(torch.tensor, ([-1.0], [math.nan], [1]))])
    },
    "too many": ({"square": torch.tensor([1.0, 1.0])}, "is damaged: square is "),
    "beyond all weights": ({"weight": torch.tensor([5.0])}, "is damaged: weight is "),
    **{
        f"{name} of {wrong}": ({name: wrong}, f"is damaged: {name} is ")
        for name in ("debias_ewma", "gradient", "progress")
        for wrong in ("a", 1.5, [COMPLEX], [1])
    },
    "no gradient": ({"gradient": None}, "is damaged: gradient is None"),
    "no progress within": ({"progress": {}}, "is damaged"),
    "progress of none": ({"progress": None}, "is damaged"),
    "steps of none": ({"progress": {"scale_invariant_steps": math.nan, "skipped_steps": 0}}, "is damaged"),
    "steps beyond numbers": ({"progress": {"scale_invariant_steps": 10**400}}, "is damaged: scale_inv"),
    # What is left is none of the bare optimizer.
    "without progress": (["progress"], "lacks progress"),
    "without variance": (["variance"], "lacks variance"),
    "without anything": (None, "lacks state, param_groups"),
    "nothing": ("adascale", "lacks debias_ewma, weight"),
    "state of none": ("state", "is damaged: state is None"),
    "groups of none": ("param_groups", "is damaged: param_groups is None"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_changes_nothing(optimizer, damage, message):
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before) if damage is not None else {}
    if isinstance(damage, dict):
        state["adascale"] |= damage
    elif isinstance(damage, list):
        del state["adascale"][damage[0]]
    elif isinstance(damage, str):
        state[damage] = None
    with pytest.raises(ValueError, match=f"the checkpoint {message}"):
        optimizer.load_state_dict(state)
    assert_identical(optimizer.state_dict(), before)


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


def received(fused, **forged):
    """A model's optimizer, and another's checkpoint of two steps with other settings and numbers in it."""
    model, sgd = mlp(torch.float32), {"lr": 0.05, "momentum": 0.9}
    trained = AdaScale(torch.optim.SGD(model.parameters(), **sgd, fused=True), num_gradients_to_accumulate=3)
    train(model, trained, batches(2, 3, dtype=torch.float32))
    state = trained.state_dict()
    state["state"][0] |= forged
    fresh = mlp(torch.float32)
    own = torch.optim.SGD(fresh.parameters(), **sgd, fused=fused)
    return fresh, AdaScale(own, num_gradients_to_accumulate=3), state


@pytest.mark.parametrize(
    "forged", [torch.ones(2), torch.ones(()), torch.ones(7, 6), torch.ones(7, 5, dtype=torch.int64)]
)
def test_a_fused_kernel_has_as_many_numbers_as_its_parameter(forged):
    """It would go on beyond the end of what is shorter."""
    _, optimizer, state = received(True, momentum_buffer=forged)
    with pytest.raises(ValueError, match=r"its optimizer has \[.* of a parameter of \[7, 5\]"):
        optimizer.load_state_dict(state)
    assert (optimizer.scale_invariant_steps, len(optimizer.state)) == (0, 0)


def test_numbers_for_a_fused_kernel_are_laid_out_as_its_parameter():
    fresh, optimizer, state = received(True, momentum_buffer=torch.ones(1).expand(7, 5))
    optimizer.load_state_dict(state)
    assert optimizer.state[fresh[0].weight]["momentum_buffer"].stride() == (5, 1)


@pytest.mark.parametrize("fused", [None, False, True])
def test_the_kernel_is_the_constructed_optimizers_whatever_the_checkpoint_says(fused):
    fresh, optimizer, state = received(fused)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["fused"] is fused
    assert optimizer.param_groups[0]["lr"] == 0.05
    train(fresh, optimizer, batches(1, 3, dtype=torch.float32))
