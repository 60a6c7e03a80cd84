"""AdaScale's part of a checkpoint, and what it reads of FairScale's."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from adaecho.adascale.scale_invariant_steps import ScaleInvariantSteps

KEY = "adascale"
_OWN = ("variance", "square", "weight", "debias_ewma", "gradient", "progress")


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Take a checkpoint apart: what the wrapped optimizer loads, and what AdaScale does.

    The second comes from an AdaScale or from FairScale's; of a bare optimizer's checkpoint it is None.

    Raises:
        ValueError: a part of it is missing.
    """
    optimizer_state = dict(state)
    lacks = [name for name in ("state", "param_groups") if name not in state]
    lacks += [name for name in _OWN if KEY in state and name not in state[KEY]]
    if lacks:
        raise ValueError(
            f"AdaScale: the checkpoint lacks {', '.join(lacks)}; give the whole of what state_dict() returned"
        )
    if KEY in state:
        return optimizer_state, optimizer_state.pop(KEY)
    if KEY not in state["state"]:
        return optimizer_state, None
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
    weight = entries.get("grad_sqr_avg_unbias", entries.get("grad_sqr_avg_count"))
    debias_ewma = None if weight is None else "grad_sqr_avg_unbias" in entries
    if weight is None:  # saved before the first step, with placeholders for averages: either kind
        square, weight = torch.zeros_like(square), torch.zeros_like(square)
    return {
        "variance": variance,
        "square": square,
        "weight": torch.as_tensor(weight).double().expand(len(square)).clone(),
        "debias_ewma": debias_ewma,
        "gradient": [],
        "progress": ScaleInvariantSteps().state_dict(),
    }
