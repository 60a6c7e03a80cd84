"""Small models and one way to run a step, for every AdaScale test."""

import torch
from torch import nn

from adaecho import AdaScale


def mlp(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batches(num_steps, num_micro_batches, seed=0, dtype=torch.float64, batch_size=4):
    """Steps of ``num_micro_batches`` (inputs, labels)."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        x = torch.randn(num_micro_batches, batch_size, 5, generator=generator, dtype=dtype)
        y = torch.randint(3, (num_micro_batches, batch_size), generator=generator)
        yield list(zip(x, y, strict=True))


def accumulating(model, num_gradients=2, momentum=0.9, **arguments):
    """AdaScale around SGD, one process."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    return AdaScale(sgd, num_gradients_to_accumulate=num_gradients, **arguments)


def layers(model, *rates):
    """The parameters of both layers apart; as groups, where rates are given."""
    apart = [list(model[0].parameters()), list(model[2].parameters())]
    return [{"params": one, "lr": rate} for one, rate in zip(apart, rates, strict=True)] if rates else apart


def micro_gradients(model, groups, micro_batches):
    """Each micro-batch's gradient by group, computed apart from the optimizer and its hooks."""
    parameters = [p for group in groups for p in group]
    for x, y in micro_batches:
        loss = nn.functional.cross_entropy(model(x), y)
        flat = list(torch.autograd.grad(loss, parameters))
        yield [[flat.pop(0) for _ in group] for group in groups]


def backward(model, micro_batches, factor=1.0):
    """Every micro-batch's backward pass, its loss divided by their number (and multiplied by ``factor``)."""
    for x, y in micro_batches:
        (factor * nn.functional.cross_entropy(model(x), y) / len(micro_batches)).backward()


def train(model, optimizer, steps, scheduler=None):
    """The plain loop; returns the gain of each step."""
    gains = []
    for micro_batches in steps:
        optimizer.zero_grad()
        backward(model, micro_batches)
        gains.append(optimizer.gain())
        optimizer.step()
        if scheduler is not None:
            for _ in range(optimizer.schedule_increment()):
                scheduler.step()
    return gains


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_identical(one, other):
    """Bit for bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)
