"""AdaScale's part of a checkpoint, and what it reads of FairScale's."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adaecho.adascale.estimators import Averages
from adaecho.adascale.scale_invariant_steps import ScaleInvariantSteps

KEY = "adascale"


def packed(
    averages: Averages, debias_ewma: bool, gradient: Mapping[Tensor, Tensor], parameters: Sequence[Tensor]
) -> dict[str, Any]:
    """Pack averages and the last gradient, in the order of ``parameters``, as tensors and plain numbers."""
    return {
        "variance": averages.variance,
        "square": averages.square,
        "weight": averages.weight,
        "debias_ewma": debias_ewma,
        "gradient": [gradient.get(parameter) for parameter in parameters] if gradient else [],
    }


def unpacked_averages(state: Mapping[str, Any], num_groups: int, debias_ewma: bool) -> Averages:
    """Unpack the averages of ``packed``: float64 [num_groups] each, on the CPU.

    Raises:
        ValueError: of another number of groups, or averaged in the other way.
    """
    averages = Averages(*(state[name].to("cpu", torch.float64) for name in Averages._fields))
    if len(averages.weight) != num_groups:
        raise ValueError(
            f"AdaScale: the checkpoint has statistics of {len(averages.weight)} parameter group(s), the "
            f"optimizer has {num_groups}; build the same groups before loading"
        )
    if state["debias_ewma"] != debias_ewma:
        raise ValueError(
            f"AdaScale: the checkpoint was averaged with debias_ewma={state['debias_ewma']}, the optimizer "
            f"has debias_ewma={debias_ewma}; use the checkpoint's"
        )
    return averages


def unpacked_gradient(state: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Unpack the last gradient of ``packed`` onto the parameters' devices; empty where there was none."""
    if not state["gradient"]:
        return {}
    pairs = zip(parameters, state["gradient"], strict=True)
    return {parameter: copy.to(parameter.device) for parameter, copy in pairs if copy is not None}


def split(
    state: Mapping[str, Any], num_groups: int, debias_ewma: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take a checkpoint apart: what the wrapped optimizer loads, and what AdaScale does.

    The second comes from an AdaScale or from FairScale's; of a bare optimizer's checkpoint it is empty.
    """
    optimizer_state = dict(state)
    if KEY in state:
        return optimizer_state, optimizer_state.pop(KEY)
    if KEY not in state["state"]:
        empty = Averages.empty(num_groups, torch.device("cpu"))
        return optimizer_state, {
            **packed(empty, debias_ewma, {}, []),
            "progress": ScaleInvariantSteps().state_dict(),
        }
    entries = dict(state["state"])
    own = _from_fairscale(entries.pop(KEY))
    return {**optimizer_state, "state": entries}, own


def _from_fairscale(entries: Mapping[str, Any]) -> dict[str, Any]:
    # Its estimators are the same and its averages in the same units: numpy float [num_groups] each, and the
    # count of the paper's form [1], since it keeps one for all groups.
    warnings.warn(
        "AdaScale: a FairScale checkpoint holds no scale-invariant steps; assign the sum of the gains so "
        "far to optimizer.scale_invariant_steps, else they count from 0",
        stacklevel=4,
    )
    square, variance = (torch.as_tensor(entries[name]).double() for name in ("grad_sqr_avg", "grad_var_avg"))
    debias_ewma = "grad_sqr_avg_count" not in entries
    weight = entries.get("grad_sqr_avg_unbias" if debias_ewma else "grad_sqr_avg_count")
    if weight is None:  # saved before the first step, with placeholders for averages
        square, weight = torch.zeros_like(square), torch.zeros_like(square)
    return {
        "variance": variance,
        "square": square,
        "weight": torch.as_tensor(weight).double().expand(len(square)).clone(),
        "debias_ewma": debias_ewma,
        "gradient": [],
        "progress": ScaleInvariantSteps().state_dict(),
    }
