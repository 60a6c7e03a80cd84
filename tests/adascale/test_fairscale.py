"""Comparison with the fairscale package, if it is installed."""

import importlib.util
import warnings

import pytest
import torch

from adaecho.adascale import AdaScale
from tests.adascale.helpers import backward, batches, layers, mlp, weights
from tests.needs import needs

pytestmark = needs(
    "fairscale", present=importlib.util.find_spec("fairscale") is not None, remedy="see CONTRIBUTING.md"
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it imports modules that torch has deprecated
    fairscale = pytest.importorskip("fairscale.optim", reason="no fairscale; see CONTRIBUTING.md")


def sgd(model, num_groups):
    groups = layers(model, 0.01, 0.004) if num_groups == 2 else model.parameters()
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


def step(model, optimizer, micro_batches, is_scaled_loss=True):
    model.zero_grad(set_to_none=False)  # FairScale needs every .grad to be a tensor
    if isinstance(optimizer, AdaScale):
        optimizer.zero_grad()
    backward(model, micro_batches, factor=1.0 if is_scaled_loss else len(micro_batches))
    gains = [optimizer.gain(), *(optimizer.gain(g) for g in range(len(optimizer.param_groups)))]
    if not is_scaled_loss:
        optimizer.scale_grad_by_num_grads_to_accum()
    optimizer.step()
    return gains


def assert_equal_steps(ours, theirs, steps, is_scaled_loss=True):
    """Each a model and its optimizer; their gains."""
    gains = []
    for micro_batches in steps:
        expected = step(*theirs, micro_batches, is_scaled_loss)
        assert step(*ours, micro_batches, is_scaled_loss) == pytest.approx(expected, rel=1e-5)
        gains.append(expected[0])
    torch.testing.assert_close(weights(ours[0]), weights(theirs[0]), rtol=1e-5, atol=1e-5)
    return gains


@pytest.mark.parametrize(
    ("num_gradients", "num_groups", "arguments"),
    [
        (2, 1, {}),
        (4, 2, {}),
        (2, 2, {"smoothing": 0.5}),
        (2, 1, {"scale": 8.0}),
        (4, 2, {"scale": 1.5, "debias_ewma": False}),
        (4, 1, {"debias_ewma": False, "smoothing": 0.9}),
        (16, 2, {"debias_ewma": False, "scale": 4.0}),
        (4, 2, {"is_scaled_loss": False}),
    ],
)
def test_gains_and_weights_equal_over_100_steps(num_gradients, num_groups, arguments):
    ours, theirs = mlp(torch.float32), mlp(torch.float32)
    arguments = {"num_gradients_to_accumulate": num_gradients, **arguments}
    optimizer = AdaScale(sgd(ours, num_groups), **arguments)
    reference = fairscale.AdaScale(sgd(theirs, num_groups), **arguments)
    assert (optimizer.scale, optimizer.smoothing) == (reference.scale, reference.smoothing)
    steps = batches(100, num_gradients, dtype=torch.float32)
    scaled = arguments.get("is_scaled_loss", True)
    assert_equal_steps((ours, optimizer), (theirs, reference), steps, scaled)


def with_a_group_added_at_step_10(kind, debias):
    """The optimizer after 20 steps."""
    model = mlp(torch.float32)
    arguments = {"num_gradients_to_accumulate": 2, "smoothing": 0.99, "debias_ewma": debias}
    first, second = layers(model, 0.0, 0.0)
    optimizer = kind(torch.optim.SGD([first], lr=0.0), **arguments)
    for number, micro_batches in enumerate(batches(20, 2, dtype=torch.float32)):
        if number == 10:
            optimizer.add_param_group(second)
        step(model, optimizer, micro_batches)
    return optimizer


@pytest.mark.parametrize("debias", [True, False])
def test_the_mean_of_a_group_added_later_is_over_its_own_steps_where_its_is_over_all(debias):
    ours, theirs = (with_a_group_added_at_step_10(kind, debias) for kind in (AdaScale, fairscale.AdaScale))
    assert ours.grad_var_avg(0) == pytest.approx(theirs._grad_var_avg(0), rel=1e-5)
    share = 1 if debias else 10 / 20
    assert theirs._grad_var_avg(1) == pytest.approx(share * ours.grad_var_avg(1), rel=1e-5)
    assert theirs._grad_sqr_avg(1) == pytest.approx(share * ours.grad_sqr_avg(1), rel=1e-5)


def test_names_and_public_methods_cover_its():
    public = [name for name in vars(fairscale.AdaScale) if not name.startswith("_")]
    missing = [name for name in public if not hasattr(AdaScale, name)]
    # A new AdaScale that loads the state of the one before does both.
    assert missing == ["set_scale", "set_num_gradients_to_accumulate"]
