"""The optimizer of a run, and how a batch becomes a step."""

from inspect import unwrap

import torch
from torch import nn

from adaecho.adascale import AdaScale
from adaecho.config.schema import Config

Batch = dict[str, torch.Tensor]


class EagerSGD(torch.optim.SGD):
    """torch's SGD without its decorators for ``torch.compile``.

    At their first call these import the whole compiler, which takes as long as importing torch itself, and
    nothing is compiled here. A test holds the weights equal to torch's, bit for bit.
    """

    step = torch.no_grad()(unwrap(torch.optim.SGD.step))
    zero_grad = unwrap(torch.optim.SGD.zero_grad)
    add_param_group = unwrap(torch.optim.SGD.add_param_group)
    state_dict = unwrap(torch.optim.SGD.state_dict)
    load_state_dict = unwrap(torch.optim.SGD.load_state_dict)


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.SGD | AdaScale:
    """SGD as configured, with AdaScale around it under ``adascale=on``."""
    sgd = EagerSGD(
        model.parameters(),
        lr=config.optimizer.learning_rate,
        momentum=config.optimizer.momentum,
        nesterov=config.optimizer.nesterov,
        weight_decay=config.optimizer.weight_decay,
    )
    if not config.adascale.enabled:
        return sgd
    return AdaScale(
        sgd,
        num_gradients_to_accumulate=config.adascale.num_gradients_to_accumulate,
        scale=config.adascale.scale,
        smoothing=config.adascale.smoothing,
        debias_ewma=config.adascale.debias_ewma,
    )


def deal(batch: Batch, count: int) -> list[Batch]:
    """``batch`` dealt like cards to ``count`` micro-batches.

    So neighbours, among them the copies of one example where nothing is shuffled after the echo, end up on
    different micro-batches, where AdaScale's gain can see that they are alike.
    """
    if count == 1:
        return [batch]
    return [{key: value[first::count] for key, value in batch.items()} for first in range(count)]
