"""The gradient of an earlier step, for one process that takes a single gradient a step."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from adaecho.adascale.estimators import Estimate, estimate_across_steps
from adaecho.adascale.squares import statistics_dtype, sum_of_squares

StepGradient = Mapping[Tensor, Tensor]  # parameter: its gradient, unscaled, float32 or better


def copied(groups: Sequence[Sequence[Tensor]], unit: Tensor | float) -> StepGradient:
    """``.grad * unit`` of every parameter in ``groups``."""
    return {
        parameter: _widened(parameter.grad) * unit
        for group in groups
        for parameter in group
        if parameter.grad is not None
    }


def estimate(
    before: StepGradient, now: StepGradient, groups: Sequence[Sequence[Tensor]], scale: float
) -> Estimate:
    """sigma^2 and mu^2 per group from the gradients of two steps; a parameter without one counts as zero."""
    rows = [_difference_and_inner_product(before, now, group) for group in groups]
    difference, inner_product = torch.stack(rows).unbind(dim=1)
    return estimate_across_steps(difference, inner_product, scale)


def _difference_and_inner_product(before: StepGradient, now: StepGradient, group: Sequence[Tensor]) -> Tensor:
    both = [p for p in group if p in before and p in now]
    alone = [before[p] for p in group if p in before and p not in now]
    alone += [now[p] for p in group if p in now and p not in before]
    differences = torch._foreach_sub([now[p] for p in both], [before[p] for p in both]) if both else ()
    difference = _square([*differences, *alone], group)
    square_before = _square([before[p] for p in group if p in before], group)
    square_now = _square([now[p] for p in group if p in now], group)
    return torch.stack([difference, (square_before + square_now - difference) / 2])


def _square(gradients: Sequence[Tensor], group: Sequence[Tensor]) -> Tensor:
    if gradients:
        return sum_of_squares(gradients)
    return torch.zeros((), dtype=statistics_dtype(group[0].device), device=group[0].device)


def _widened(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense if dense.dtype == torch.float64 else dense.float()
