"""The optimizer of a run, and how a batch becomes a step."""

from inspect import unwrap
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_map

from adaecho.adascale import AdaScale
from adaecho.config.schema import Config
from adaecho.errors import ConfigError

Group = dict[str, Any]


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


def make_optimizer(config: Config, model: nn.Module, world_size: int = 1) -> torch.optim.Optimizer:
    """The configured optimizer, with AdaScale around it under ``adascale=on``.

    Args:
        config: of the run.
        model: on its device, where a fused optimizer keeps its learning rate, so that no step waits for it.
        world_size: ranks whose gradients are averaged.
    """
    given = config.optimizer
    groups = parameter_groups(model, given.weight_decay, all_decay=given.decay_norms_and_biases)
    rate: Any = given.learning_rate
    device = groups[0]["params"][0].device
    if given.fused and device.type == "cuda":
        rate = torch.tensor(rate, device=device)
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
    """Continue from its ``state_dict()`` in a checkpoint; settings stay those of the config.

    Raises:
        ValueError: its groups of parameters are others.
    """
    groups = zip(state["param_groups"], optimizer.param_groups, strict=True)
    kept = [{**own, "params": saved["params"]} for saved, own in groups]
    optimizer.load_state_dict({**state, "param_groups": kept})


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of all groups; in place where it lies on a device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def parameter_groups(model: nn.Module, weight_decay: float, *, all_decay: bool) -> list[Group]:
    """Parameters with their weight decay: all alike, or none for norms and biases, which are vectors."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError("the task's model has nothing to train: no parameter with requires_grad=True")
    if all_decay or weight_decay == 0:
        return [{"params": parameters, "weight_decay": weight_decay}]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def average_of(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of the model that follows it: ``average = decay average + (1 - decay) weights`` after each step.

    The first step's weights begin it (B. Polyak and A. Juditsky 1992; torch's own). Running statistics of
    batch norm are averaged alike.
    """
    follow: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=follow, use_buffers=True)
    average.requires_grad_(False)
    return average.eval()


def deal(batch: Any, count: int, num_examples: int) -> list[Any]:
    """``batch`` dealt like cards to ``count`` micro-batches.

    So neighbours, among them the copies of one example where nothing is shuffled after the echo, end up on
    different micro-batches, where AdaScale's gain can see that they are alike.

    Args:
        batch: of tensors whose first axis is that of the examples, and lists of one item for each.
        count: of micro-batches; one is the batch as it is, whatever that looks like.
        num_examples: that the batch is of.

    Raises:
        ConfigError: a tensor or a list of another length, which would be cut across the examples.
    """
    return [batch] if count == 1 else [_every(batch, first, count, num_examples) for first in range(count)]


def _every(batch: Any, first: int, count: int, num_examples: int) -> Any:
    """Every ``count``-th example from ``first`` on; a list holds one item for each example."""

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, list) and not (isinstance(leaf, torch.Tensor) and leaf.dim()):
            return leaf
        if len(leaf) != num_examples:
            what = "a list" if isinstance(leaf, list) else f"a tensor {list(leaf.shape)}"
            raise ConfigError(
                f"adascale.num_gradients_to_accumulate={count}: a batch is dealt by its first axis, which is "
                f"to be that of its {num_examples} examples, and it holds {what} of length {len(leaf)}; have "
                "collate put examples first (batch_first=True), and what is no example's into the model"
            )
        return leaf[first::count]

    return tree_map(part, batch, is_leaf=lambda inner: isinstance(inner, list))
