"""The optimizer of a run: torch's own numbers, without torch's compiler."""

import pytest
import torch

from adaecho.training.optimizer import EagerSGD

SETTINGS = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
]


def trained(make, settings, steps=5):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = make(model.parameters(), **settings)
    for _ in range(steps):
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([one.detach().flatten() for one in model.parameters()]), optimizer.state_dict()


@pytest.mark.parametrize("settings", SETTINGS)
def test_weights_and_state_equal_torchs_bit_for_bit(settings):
    ours, our_state = trained(EagerSGD, settings)
    theirs, their_state = trained(torch.optim.SGD, settings)
    assert torch.equal(ours, theirs)
    assert our_state["param_groups"] == their_state["param_groups"]
    for key, state in their_state["state"].items():
        for name, value in state.items():
            assert value is our_state["state"][key][name] is None or torch.equal(
                our_state["state"][key][name], value
            )


def test_a_step_records_no_graph():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = EagerSGD([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    assert weight.grad_fn is None
    assert torch.is_grad_enabled()
