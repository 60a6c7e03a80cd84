"""Build the optimizer of a run, average the model's weights, and split batches into micro-batches."""

from inspect import unwrap
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_map

from adaecho.adascale import AdaScale
from adaecho.config.schema import Config
from adaecho.errors import ConfigError


class EagerSGD(torch.optim.SGD):
    """torch's SGD without support for ``torch.compile``. It computes exactly the same weights."""

    # When first called, torch's decorators import the compiler, which takes as long as importing torch.
    step = torch.no_grad()(unwrap(torch.optim.SGD.step))
    zero_grad = unwrap(torch.optim.SGD.zero_grad)
    add_param_group = unwrap(torch.optim.SGD.add_param_group)
    state_dict = unwrap(torch.optim.SGD.state_dict)
    load_state_dict = unwrap(torch.optim.SGD.load_state_dict)


def make_optimizer(config: Config, model: nn.Module, world_size: int = 1) -> torch.optim.Optimizer:
    """Build the configured optimizer, and wrap it in AdaScale if that is enabled.

    Args:
        model: the model, already on its device.
    """
    given = config.optimizer
    groups = parameter_groups(model, given.weight_decay, all_decay=given.decay_norms_and_biases)
    rate: Any = given.learning_rate
    device = groups[0]["params"][0].device
    if given.fused and device.type == "cuda":
        rate = torch.tensor(rate, device=device)  # so that no step waits for the rate to be copied there
    kind: type[torch.optim.Optimizer] = EagerSGD
    arguments: dict[str, Any] = {"momentum": given.momentum, "nesterov": given.nesterov}
    if given.name != "sgd":
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[given.name]
        arguments = {"betas": (given.beta1, given.beta2), "eps": given.epsilon}
    if given.fused:
        arguments["fused"] = True
    if given.zero_redundancy and world_size > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(groups, kind, lr=rate, **arguments)
    else:
        optimizer = kind(groups, lr=rate, **arguments)  # type: ignore[call-arg]
    if not config.adascale.enabled:
        return optimizer
    return AdaScale(
        optimizer,
        world_size=world_size,
        num_gradients_to_accumulate=config.adascale.num_gradients_to_accumulate,
        scale=config.adascale.scale,
        smoothing=config.adascale.smoothing,
        debias_ewma=config.adascale.debias_ewma,
        rule=config.adascale.rule,
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the optimizer's state from a checkpoint, but keep the settings of the current config."""
    groups = zip(state["param_groups"], optimizer.param_groups, strict=True)
    # The saved groups also contain AdaScale's numbers, which the optimizer's own groups lack.
    kept = [{**saved, **own, "params": saved["params"]} for saved, own in groups]
    optimizer.load_state_dict({**state, "param_groups": kept})


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def parameter_groups(model: nn.Module, weight_decay: float, *, all_decay: bool) -> list[dict[str, Any]]:
    """Split the model's trainable parameters into groups with and without weight decay.

    Args:
        all_decay: whether biases and the parameters of norms decay too.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError("the task's model has nothing to train: no parameter has requires_grad=True")
    if all_decay or weight_decay == 0:
        return [{"params": parameters, "weight_decay": weight_decay}]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def average_of(model: nn.Module, decay: float) -> AveragedModel:
    """Return an exponential moving average (EMA) of the model's weights and buffers, in eval mode.

    Call ``update_parameters`` of the result after each step. It computes
    ``average = decay * average + (1 - decay) * weights``, starting from the weights after the first step.

    Source: B. Polyak and A. Juditsky 1992.
    """
    follow: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=follow, use_buffers=True)
    average.requires_grad_(False)
    return average.eval()


def split_batch(batch: Any, count: int, num_examples: int) -> list[Any]:
    """Split a batch into ``count`` micro-batches, each with every ``count``-th example."""
    # With count=2, one micro-batch has the examples 0, 2, 4, ..., and the other has 1, 3, 5, ...
    # Adjacent copies of an echoed example go to different micro-batches, so AdaScale's gain reflects that
    # their gradients are similar.
    return [batch] if count == 1 else [_every(batch, first, count, num_examples) for first in range(count)]


def _every(batch: Any, first: int, count: int, num_examples: int) -> Any:
    """Return every ``count``-th example of a batch, starting with ``first``."""
    # Tensors have the examples along their first axis, and lists have one item per example.

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, list) and not (isinstance(leaf, torch.Tensor) and leaf.dim()):
            return leaf
        if len(leaf) != num_examples:
            kind = "a list" if isinstance(leaf, list) else f"a tensor {list(leaf.shape)}"
            raise ConfigError(
                f"adascale.num_gradients_to_accumulate={count}: the first axis of a batch must hold its "
                f"{num_examples} examples, but collate returned {kind} of length {len(leaf)}; put examples "
                "first in collate (batch_first=True), and move other tensors into the model"
            )
        return leaf[first::count]

    return tree_map(part, batch, is_leaf=lambda inner: isinstance(inner, list))
