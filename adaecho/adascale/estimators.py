"""AdaScale's estimators and their moving averages, as pure functions.

Notation of Johnson et al., "AdaScale SGD" (ICML 2020, arXiv 2007.05105), section 3 and appendix B.3:
``sigma^2`` is the trace of the covariance of one base-batch gradient, ``mu^2`` the squared norm of the
expected gradient, ``S`` the scale: how many base batches one step averages over.

Squared norms are summed on the device, in float64; what follows from them is plain numbers, one per parameter
group, in the units of the unscaled mean gradient.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

# Appendix B.3: estimates are clipped before they are averaged. Clipping mu^2 at 0 makes its average too large
# where noise dominates, and so the gain too small: by 3.5 % at S = 2, sigma^2 / mu^2 = 300 in 100 independent
# directions, by 1.1 % in 1000, by less in more (tests/adascale/test_estimators.py).
VARIANCE_FLOOR = 1e-6

# Elements. On a CPU a norm in float64 first copies its input to float64: in pieces that stay in the cache
# that takes half as long, and rounding adds up over less.
_PIECE = 1 << 14


def squares_by_group(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """The squared norm of each group's gradients together: [num_groups]; one tensor at least.

    A few multi-tensor calls, however many gradients there are. Accumulated in float64 (float32 on Apple's
    GPUs), for the variance is a small difference of large sums.
    """
    groups = [list(_pieces(group)) for group in gradients]
    norms = torch.stack(_norms(list(chain.from_iterable(groups))))
    return torch.stack(_norms(torch.split(norms, [len(group) for group in groups]))).square()


def _pieces(gradients: Iterable[Tensor]) -> Iterator[Tensor]:
    for gradient in gradients:
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if gradient.dtype.is_complex:
            gradient = torch.view_as_real(gradient)
        if gradient.is_cpu and gradient.numel() > _PIECE:
            yield from torch.split(gradient, max(_PIECE * len(gradient) // gradient.numel(), 1))
        else:
            yield gradient


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    wide = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    # One list for each type: on a GPU a mixed one takes a kernel for each tensor.
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    norms = {dtype: iter(torch._foreach_norm(alike, 2, wide)) for dtype, alike in by_type.items()}
    return [next(norms[tensor.dtype]) for tensor in tensors]


class Estimate(NamedTuple):
    """One step's clipped estimates: ``variance`` of sigma^2 (>= 1e-6) and ``square`` of mu^2 (>= 0)."""

    variance: float
    square: float


def estimate_across_gradients(
    sum_of_squares: float, square_of_mean: float, num_gradients: int, scale: float
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


def estimate_across_steps(square_of_difference: float, inner_product: float, scale: float) -> Estimate:
    """Estimate sigma^2 and mu^2 from the gradients a, b of two steps, where one step has one gradient only.

    Valid while the weights move little between the two and their batches are independent (fresh): then
    ``|a - b|^2 / 2`` is unbiased for the variance of a step's gradient, sigma^2 / S, and ``<a, b>`` for mu^2.

    Args:
        square_of_difference: |a - b|^2.
        inner_product: <a, b>.
        scale: S >= 1.
    """
    return _clipped(scale * square_of_difference / 2, inner_product)


def _clipped(variance: float, square: float) -> Estimate:
    return Estimate(max(variance, VARIANCE_FLOOR), max(square, 0.0))


def gain_ratio(variance: float, square: float, scale: float) -> float:
    """The gain r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2), in [1, S] (section 3.2).

    1 where nothing has been seen yet (both zero): r_0 := 1 in appendix B.3.
    """
    return (variance + square) / (variance / scale + square) if variance + square > 0 else 1.0


class Averages(NamedTuple):
    """One group's averaged sigma^2 and mu^2; zeros before the first sample.

    ``weight`` is what the next coefficient follows from: the sum of the exponential weights so far
    (debiased), or the number of samples (the paper's form).
    """

    variance: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    def updated(self, sample: Estimate, smoothing: float, debias: bool) -> "Averages":
        """Take in one sample.

        With theta = ``smoothing`` in [0, 1), the debiased form is ``m_t / (1 - theta^t)`` for
        ``m_t = theta m_{t-1} + (1 - theta) x_t``, written so that theta may change on the way. The paper's
        form (appendix B.3) is the plain mean of the first 1 / (1 - theta) samples, then an exponential
        average of it. Both are ``average += coefficient * (x - average)``.
        """
        if debias:
            weight = smoothing * self.weight + (1 - smoothing)
            coefficient = (1 - smoothing) / weight
        else:
            weight = self.weight + 1
            coefficient = max(1 / weight, 1 - smoothing)
        return Averages(
            self.variance + coefficient * (sample.variance - self.variance),
            self.square + coefficient * (sample.square - self.square),
            weight,
        )
