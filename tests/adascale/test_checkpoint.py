"""Checkpoints: ours, FairScale's, and what they must not disconnect."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from adaecho.adascale import AdaScale
from tests.adascale.helpers import assert_identical, batches, mlp, train, weights
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
    groups = [{"params": list(model.parameters())}]
    if kind == "groups":
        groups = [
            {"params": list(layer.parameters()), "lr": lr}
            for layer, lr in ((model[0], 0.05), (model[2], 0.01))
        ]
    sgd = torch.optim.SGD(groups, lr=torch.tensor(0.05) if fused else 0.05, momentum=0.9, fused=fused or None)
    optimizer = AdaScale(sgd, **KINDS[kind])
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


@pytest.mark.parametrize("kind", KINDS)
def test_resume_at_every_step_is_bit_identical(kind):
    steps = list(batches(6, KINDS[kind].get("num_gradients_to_accumulate", 1), dtype=torch.float32))
    model = mlp(torch.float32)
    optimizer, scheduler = build(kind, model)
    gains = train(model, optimizer, steps, scheduler)
    for cut in range(len(steps) + 1):
        first = mlp(torch.float32)
        before, before_scheduler = build(kind, first)
        head = train(first, before, steps[:cut], before_scheduler)
        state = through_torch_save([first.state_dict(), before.state_dict(), before_scheduler.state_dict()])
        second = mlp(torch.float32)
        second.load_state_dict(state[0])
        after, after_scheduler = build(kind, second)
        after.load_state_dict(state[1])
        after_scheduler.load_state_dict(state[2])
        assert head + train(second, after, steps[cut:], after_scheduler) == gains
        assert_identical(weights(second), weights(model))
        assert after.scale_invariant_steps == optimizer.scale_invariant_steps
        assert float(after.param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("num_gradients", [1, 2])
def test_a_checkpoint_goes_on_at_another_scale(num_gradients):
    model = mlp()
    arguments = {"num_gradients_to_accumulate": num_gradients, "smoothing": 0.9}
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), scale=4.0, **arguments)
    train(model, optimizer, batches(10, num_gradients))
    elastic = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), scale=8.0, **arguments)
    elastic.load_state_dict(through_torch_save(optimizer.state_dict()))
    variance, square = elastic.grad_var_avg(), elastic.grad_sqr_avg()
    assert (variance, square) == (optimizer.grad_var_avg(), optimizer.grad_sqr_avg())
    assert elastic.gain() == pytest.approx((variance + square) / (variance / 8 + square))
    assert elastic.scale_invariant_steps == optimizer.scale_invariant_steps


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copied):
    optimizer, _ = build("accumulation", mlp())
    with pytest.raises(TypeError, match="use state_dict"):
        copied(optimizer)


def test_a_scheduler_made_before_loading_stays_connected():
    model = mlp()
    optimizer, scheduler = build("accumulation", model)
    train(model, optimizer, batches(1, 3))
    optimizer.load_state_dict(optimizer.state_dict())
    before = optimizer.param_groups[0]["lr"]
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.97 * before)
    assert optimizer._optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_checkpoints_that_do_not_fit_are_refused():
    model = mlp()
    optimizer, _ = build("accumulation", model)
    train(model, optimizer, batches(2, 3))
    state = optimizer.state_dict()
    other = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=3, debias_ewma=False
    )
    with pytest.raises(ValueError, match="debias_ewma=True"):
        other.load_state_dict(state)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    two = AdaScale(torch.optim.SGD(groups, lr=0.1), num_gradients_to_accumulate=3)
    with pytest.raises(ValueError, match=r"statistics of 1 parameter group\(s\), the optimizer has 2"):
        two.load_state_dict(state)


def test_a_checkpoint_of_the_bare_optimizer_starts_new_averages():
    model = mlp()
    optimizer, _ = build("accumulation", model)
    train(model, optimizer, batches(2, 3))
    bare = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer.load_state_dict(bare.state_dict())
    assert optimizer.gain() == 1.0
    assert optimizer.scale_invariant_steps == 0.0
    assert optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("accumulation", [(6, 5), (5, 4), (4, 3)]),
        ("across_steps", [(6, 5), (5, 4), (4, 3)]),
        ("across_steps", [(7, 5), (5, 3)]),  # torch itself compares no shapes of a momentum
    ],
)
def test_a_refused_checkpoint_of_another_model_changes_nothing(kind, layers):
    other = torch.nn.Sequential(*(torch.nn.Linear(*sizes, dtype=torch.float64) for sizes in layers))
    foreign, _ = build(kind, other)
    for _ in range(6):
        other(torch.randn(4, layers[0][0], dtype=torch.float64)).square().sum().backward()
        if foreign._statistics.sample is not None:
            foreign.step()
            foreign.zero_grad()
    model = mlp()
    optimizer, _ = build(kind, model)
    train(model, optimizer, batches(3, KINDS[kind].get("num_gradients_to_accumulate", 1)))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"another model|size|parameter group"):
        optimizer.load_state_dict(foreign.state_dict())
    assert_identical(optimizer.state_dict(), before)


def test_the_bare_optimizer_reads_our_checkpoint():
    model = mlp()
    optimizer, _ = build("accumulation", model)
    train(model, optimizer, batches(2, 3))
    bare = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    bare.load_state_dict(optimizer.state_dict())
    weight = model[0].weight
    assert_identical(bare.state[weight]["momentum_buffer"], optimizer.state[weight]["momentum_buffer"])


def test_scale_invariant_steps_can_be_assigned():
    model = mlp()
    optimizer, _ = build("accumulation", model)
    optimizer.scale_invariant_steps = 41.5
    assert optimizer.schedule_increment() == 0
    gain = train(model, optimizer, batches(1, 3))[0]
    assert optimizer.scale_invariant_steps == pytest.approx(41.5 + gain)
    assert optimizer.schedule_increment() == int(41.5 + gain) - 41


@pytest.mark.parametrize("debias", [True, False])
def test_a_fairscale_checkpoint_of_before_the_first_step_is_of_either_kind(debias):
    optimizer = AdaScale(
        torch.optim.SGD(mlp().parameters(), lr=0.1), num_gradients_to_accumulate=3, debias_ewma=debias
    )
    state = optimizer._optimizer.state_dict()
    state["state"]["adascale"] = {"grad_sqr_avg": np.array([1.0]), "grad_var_avg": np.array([0.0])}
    with pytest.warns(UserWarning, match="no scale-invariant steps"):
        optimizer.load_state_dict(state)
    assert optimizer.gain() == 1.0


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("grad_sqr_avg", None), ("grad_var_avg", np.array([1j])), ("grad_sqr_avg_unbias", "a"), ("", None)],
)
def test_a_damaged_fairscale_checkpoint_is_refused(name, wrong):
    optimizer, _ = build("accumulation", mlp())
    state = optimizer._optimizer.state_dict()
    entries = {"grad_sqr_avg": np.array([2.0]), "grad_var_avg": np.array([6.0])}
    state["state"]["adascale"] = {**entries, name: wrong} if name else wrong
    with pytest.raises(ValueError, match=f"FairScale's part of the checkpoint is damaged: {name or 'grad'}"):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict()["adascale"]["weight"].tolist() == [0.0]


@pytest.mark.parametrize("debias", [True, False])
def test_fairscale_layout_is_accepted(debias):
    # The layout of FairScale 0.4.13, written by hand: "adascale" inside the optimizer's own state.
    entries = {"grad_sqr_avg": np.array([2.0]), "grad_var_avg": np.array([6.0])}
    for name in ("grad_sqr_avg", "grad_var_avg"):
        if debias:
            entries |= {f"{name}_biased": 0.271 * entries[name], f"{name}_unbias": np.array([0.271])}
        else:
            entries |= {f"{name}_count": np.array([3.0]), f"{name}_total": 3 * entries[name]}
    model = mlp()
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1),
        num_gradients_to_accumulate=3,
        smoothing=0.9,
        debias_ewma=debias,
    )
    state = optimizer._optimizer.state_dict()
    state["state"]["adascale"] = entries
    with pytest.warns(UserWarning, match="no scale-invariant steps"):
        optimizer.load_state_dict(state)
    assert optimizer.gain() == pytest.approx((6 + 2) / (6 / 3 + 2))
    train(model, optimizer, batches(1, 3))
    weight = 0.9 * 0.271 + 0.1 if debias else 4.0
    assert optimizer.state_dict()["adascale"]["weight"].tolist() == pytest.approx([weight])


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
def test_a_damaged_checkpoint_changes_nothing(damage, message):
    model = mlp()
    optimizer, _ = build("accumulation", model)
    train(model, optimizer, batches(2, 3))
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before) if damage is not None else {}
    if isinstance(damage, dict):
        state["adascale"] |= damage
    for lost in damage if isinstance(damage, list) else ():
        del state["adascale"][lost]
    if isinstance(damage, str):
        state[damage] = None
    with pytest.raises(ValueError, match=f"the checkpoint {message}"):
        optimizer.load_state_dict(state)
    assert_identical(optimizer.state_dict(), before)
