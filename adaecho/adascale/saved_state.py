"""AdaScale's part of a checkpoint, and what it reads of FairScale's."""

import reprlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaecho.adascale.scale_invariant_steps import ScaleInvariantSteps

KEY = "adascale"
# How a step is computed, and no part of what it computes.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")

Check = Callable[[Mapping[str, Any]], bool]
"""Whether one part of a checkpoint can be, given those that were looked at before it."""


def _is_real(found: Any) -> bool:
    """Whether it is a plain tensor of floating point numbers."""
    is_plain = isinstance(found, Tensor) and found.layout == torch.strided and not found.is_meta
    return is_plain and found.is_floating_point()


def _are_averages(own: Mapping[str, Any], name: str, most: float = sys.float_info.max) -> bool:
    """Whether it is a number from 0 to ``most`` for each group, as many as of ``weight``."""
    found = own[name]
    if not _is_real(found) or found.dim() != 1 or found.shape != own["weight"].shape:
        return False
    return bool(((found.double() >= 0) & (found.double() <= most)).all())


_OF_ANY: dict[str, Check] = {
    "state": lambda whole: isinstance(whole["state"], dict),
    "param_groups": lambda whole: (
        isinstance(whole["param_groups"], list)
        and all(
            isinstance(one, dict) and isinstance(one.get("params"), list) for one in whole["param_groups"]
        )
    ),
}
_OWN: dict[str, Check] = {
    "debias_ewma": lambda own: own["debias_ewma"] is None or isinstance(own["debias_ewma"], bool),
    # A sum of exponential weights, which rounding may take beyond 1; or a count.
    "weight": lambda own: _are_averages(own, "weight", *[1 + 1e-6] * bool(own["debias_ewma"])),
    "variance": lambda own: _are_averages(own, "variance"),
    "square": lambda own: _are_averages(own, "square"),
    "gradient": lambda own: (
        isinstance(own["gradient"], list) and all(copy is None or _is_real(copy) for copy in own["gradient"])
    ),
    "progress": lambda own: isinstance(own["progress"], dict),
}


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Take a checkpoint apart: what the wrapped optimizer loads, and what AdaScale does.

    The second comes from an AdaScale or from FairScale's; of a bare optimizer's checkpoint it is None.

    Raises:
        ValueError: a part of it is missing, or can't be.
    """
    _check(state, _OF_ANY)
    optimizer_state = dict(state)
    if KEY in state:
        own = optimizer_state.pop(KEY)
    elif KEY in state["state"]:
        optimizer_state["state"] = dict(state["state"])
        own = _from_fairscale(optimizer_state["state"].pop(KEY))
    else:
        return optimizer_state, None
    _check(own, _OWN)
    return optimizer_state, own


def _check(parts: Any, sound: Mapping[str, Check]) -> None:
    lacks = [name for name in sound if not isinstance(parts, Mapping) or name not in parts]
    if lacks:
        raise ValueError(
            f"AdaScale: the checkpoint lacks {', '.join(lacks)}; give the whole of what state_dict() returned"
        )
    for name, is_sound in sound.items():
        if not is_sound(parts):
            raise ValueError(f"AdaScale: the checkpoint is damaged: {name} is {reprlib.repr(parts[name])}")


def as_constructed(state: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the wrapped optimizer loads, under the implementation that it was constructed with.

    Its fused kernels take as many numbers as a parameter has, whatever a checkpoint holds: for these each
    tensor is laid out as its parameter.

    Args:
        state: of the wrapped optimizer, taken from a checkpoint.
        groups: the wrapped optimizer's.

    Raises:
        ValueError: a fused kernel's tensor is not of its parameter's shape.
    """
    saved = state["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        return state  # which torch refuses
    state = {**state, "param_groups": [
        {**group, **{key: own[key] for key in _IMPLEMENTATION if key in own}}
        for group, own in zip(saved, groups, strict=True)
    ]}  # fmt: skip
    if not any(group.get("fused") for group in groups):
        return state
    numbers, parameters = (chain.from_iterable(one["params"] for one in of) for of in (saved, groups))
    of_number = dict(zip(numbers, parameters, strict=True))
    return {**state, "state": {
        number: {name: laid_out(name, value, of_number[number]) for name, value in of_one.items()}
        if number in of_number and isinstance(of_one, Mapping) else of_one
        for number, of_one in state["state"].items()
    }}  # fmt: skip


def laid_out(name: str, value: Any, parameter: Tensor) -> Any:
    """A tensor of an optimizer's state in the layout of its parameter; anything else as it is.

    Raises:
        ValueError: its shape is another than the parameter's (a count of steps has none), or its numbers
            are not floating point ones.
    """
    if not isinstance(value, Tensor):
        return value
    if not _is_real(value) or value.shape not in (parameter.shape, *[()] * (name == "step")):
        raise ValueError(f"its optimizer has {list(value.shape)} of a parameter of {list(parameter.shape)}")
    like = parameter if value.shape == parameter.shape else torch.empty(())
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def _from_fairscale(entries: Any) -> dict[str, Any]:
    # Its estimators are the same and its averages in the same units: numpy float [num_groups] each, and the
    # count of the paper's form [1], since it keeps one for all groups.
    square, variance = (_numbers(entries, name) for name in ("grad_sqr_avg", "grad_var_avg"))
    of_weight = [name for name in ("grad_sqr_avg_unbias", "grad_sqr_avg_count") if name in entries]
    if not of_weight:  # saved before the first step, with placeholders for averages: either kind
        square = torch.zeros_like(square)
    weight = _numbers(entries, of_weight[0]) if of_weight else torch.zeros_like(square)
    warnings.warn(
        "AdaScale: a FairScale checkpoint holds no scale-invariant steps; assign the sum of the gains so "
        "far to optimizer.scale_invariant_steps, else they count from 0",
        stacklevel=4,
    )
    return {
        "variance": variance,
        "square": square,
        "weight": weight.repeat(len(square)) if len(weight) == 1 else weight,
        "debias_ewma": of_weight[0].endswith("unbias") if of_weight else None,
        "gradient": [],
        "progress": ScaleInvariantSteps().state_dict(),
    }


def _numbers(entries: Any, name: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(entries[name]).astype(np.float64, casting="same_kind").reshape(-1))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"AdaScale: FairScale's part of the checkpoint is damaged: {name}: {error}"
        ) from error
