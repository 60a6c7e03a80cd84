"""AdaScale's estimators and their moving averages, as pure functions.

Notation of Johnson et al., "AdaScale SGD" (ICML 2020, arXiv 2007.05105), section 3 and appendix B.3:
``sigma^2`` is the trace of the covariance of one base-batch gradient, ``mu^2`` the squared norm of the
expected gradient, ``S`` the scale: how many base batches one step averages over.

Every tensor that is no gradient is float64 of shape [num_groups] or a scalar, in the units of the unscaled
mean gradient.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adaecho.adascale.squares import statistics_dtype, sum_of_squares

# Appendix B.3: estimates are clipped before they are averaged. Clipping mu^2 at 0 makes its average too large
# where noise dominates, and so the gain too small: by 3.5 % at S = 2, sigma^2 / mu^2 = 300 in 100 independent
# directions, by 1.1 % in 1000, by less in more (tests/adascale/test_estimators.py).
VARIANCE_FLOOR = 1e-6

StepGradient = Mapping[Tensor, Tensor]  # parameter: its gradient, unscaled, float32 or better


class Estimate(NamedTuple):
    """One step's clipped estimates: ``variance`` of sigma^2 (>= 1e-6) and ``square`` of mu^2 (>= 0)."""

    variance: Tensor
    square: Tensor


def estimate_across_gradients(
    sum_of_squares: Tensor, square_of_mean: Tensor, num_gradients: int, scale: float
) -> Estimate:
    """Estimate sigma^2 and mu^2 from the ``num_gradients`` gradients that one step averages.

    With n gradients g_i, each of a micro-batch of S/n base batches, and their mean G::

        v       = (sum |g_i|^2 - n |G|^2) / (n - 1)    unbiased variance of one micro-batch gradient
        sigma^2 = (S / n) v                            of one base-batch gradient
        mu^2    = |G|^2 - v / n                        unbiased

    which are the estimators of appendix B.3 where n = S.

    Args:
        sum_of_squares: sum over all ranks and micro-batches of |g_i|^2.
        square_of_mean: |G|^2.
        num_gradients: n >= 2, micro-batches of one step over all ranks.
        scale: S >= 1.
    """
    excess = sum_of_squares - num_gradients * square_of_mean
    variance_of_mean = excess / (num_gradients * (num_gradients - 1))
    return _clipped(scale * variance_of_mean, square_of_mean - variance_of_mean)


def estimate_across_steps(square_of_difference: Tensor, inner_product: Tensor, scale: float) -> Estimate:
    """Estimate sigma^2 and mu^2 from the gradients a, b of two steps, where one step has one gradient only.

    Valid while the weights move little between the two and their batches are independent (fresh): then
    ``|a - b|^2 / 2`` is unbiased for the variance of a step's gradient, sigma^2 / S, and ``<a, b>`` for mu^2.

    Args:
        square_of_difference: |a - b|^2.
        inner_product: <a, b>.
        scale: S >= 1.
    """
    return _clipped(scale * square_of_difference / 2, inner_product)


def step_gradient(groups: Sequence[Sequence[Tensor]], unit: Tensor | float) -> StepGradient:
    """Return ``.grad * unit`` of every parameter in ``groups`` that is trained, dense, float32 or float64.

    That of one which the step did not reach is zero.
    """
    return {
        parameter: _widened(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad) * unit
        for group in groups
        for parameter in group
        if parameter.requires_grad
    }


def estimate_between_steps(
    before: StepGradient, now: StepGradient, groups: Sequence[Sequence[Tensor]], scale: float
) -> tuple[Estimate, Tensor]:
    """Estimate sigma^2 and mu^2 of each group from the gradients of two steps.

    A parameter that was trained in one of them alone, since it is new or has been frozen or unfrozen, is left
    out: its missing gradient is not zero but unknown. The second result, bool [num_groups], says which groups
    have a sample.
    """
    device = next(iter(before)).device
    rows = [_difference_and_inner_product(before, now, group, device) for group in groups]  # [3] each
    difference, inner_product, has_sample = torch.stack(rows).unbind(dim=1)  # [num_groups] each
    return estimate_across_steps(difference, inner_product, scale), has_sample > 0


def _difference_and_inner_product(
    before: StepGradient, now: StepGradient, group: Sequence[Tensor], device: torch.device
) -> Tensor:
    zero = torch.zeros((), dtype=statistics_dtype(device), device=device)  # []
    in_both = [p for p in group if p in before and p in now]
    if not in_both:
        return torch.stack([zero, zero, zero])
    a, b = [before[p] for p in in_both], [now[p] for p in in_both]
    difference = sum_of_squares(torch._foreach_sub(b, a))
    # |a - b|^2 = |a|^2 + |b|^2 - 2 <a, b>: no kernel multiplies lists of tensors and adds up.
    inner_product = (sum_of_squares(a) + sum_of_squares(b) - difference) / 2
    return torch.stack([difference, inner_product, zero + 1])  # [3]; made on the device, so nothing waits


def _widened(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense if dense.dtype == torch.float64 else dense.float()


def gain_ratio(variance: Tensor, square: Tensor, scale: float) -> Tensor:
    """The gain r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2), in [1, S] (section 3.2).

    1 where nothing has been seen yet (both zero): r_0 := 1 in appendix B.3.
    """
    seen = variance + square > 0
    return torch.where(seen, (variance + square) / torch.where(seen, variance / scale + square, 1.0), 1.0)


def _clipped(variance: Tensor, square: Tensor) -> Estimate:
    return Estimate(variance.clamp(min=VARIANCE_FLOOR), square.clamp(min=0.0))


class Averages(NamedTuple):
    """Averaged sigma^2 and mu^2, each float64 [num_groups]; zeros before the first sample.

    ``weight`` [num_groups] is what the next coefficient follows from: the sum of the exponential weights so
    far (debiased), or the number of samples (the paper's form).
    """

    variance: Tensor
    square: Tensor
    weight: Tensor

    @staticmethod
    def empty(num_groups: int) -> "Averages":
        """Return averages of no samples yet, on the CPU."""
        return Averages(*(torch.zeros(num_groups, dtype=torch.float64) for _ in range(3)))

    def to(self, device: torch.device) -> "Averages":
        """Return the same averages on ``device``."""
        return Averages(*(tensor.to(device) for tensor in self))

    def with_groups(self, num_groups: int) -> "Averages":
        """Return averages of ``num_groups``, of which those that are new have no samples."""
        new = num_groups - len(self.weight)
        return Averages(*(torch.cat([tensor, tensor.new_zeros(new)]) for tensor in self)) if new else self


def updated(
    averages: Averages, sample: Estimate, smoothing: float, debias: bool, has_sample: Tensor
) -> Averages:
    """Take in one sample, of the groups that have one: bool [num_groups].

    A sample that is not finite in any group changes nothing, decided on the device.

    With theta = ``smoothing`` in [0, 1), the debiased form is ``m_t / (1 - theta^t)`` for
    ``m_t = theta m_{t-1} + (1 - theta) x_t``, written so that theta may change on the way. The paper's form
    (appendix B.3) is the plain mean of the first 1 / (1 - theta) samples, then an exponential average of it.
    Both are ``average += coefficient * (x - average)``.
    """
    # weight and coefficient: [num_groups], since a group that was added later has seen fewer samples.
    if debias:
        weight = smoothing * averages.weight + (1 - smoothing)
        coefficient = (1 - smoothing) / weight
    else:
        weight = averages.weight + 1
        coefficient = (1 / weight).clamp(min=1 - smoothing)
    # One verdict for all groups: the step that brought the sample is skipped as a whole.
    finite = torch.isfinite(sample.variance + sample.square).all()
    taken = finite & has_sample
    new = Averages(
        averages.variance + coefficient * (sample.variance - averages.variance),
        averages.square + coefficient * (sample.square - averages.square),
        weight,
    )
    return Averages(*(torch.where(taken, after, before) for after, before in zip(new, averages, strict=True)))
