"""AdaScale's estimators and moving averages, as pure functions.

Notation of Johnson et al., "AdaScale SGD" (ICML 2020, arXiv 2007.05105), section 3 and appendix B.3:
``sigma^2`` is the trace of the covariance of a base-batch gradient, ``mu^2`` is the squared norm of the
expected gradient, and the scale ``S`` is the number of base batches that one step averages.

Squared norms are summed on the device in float64. The rest is Python floats, one per parameter group.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

# Appendix B.3: estimates are clipped before they are averaged. Clipping mu^2 at 0 biases its average upwards
# where noise dominates, and the gain downwards: by 3.5 % for S = 2 and sigma^2 / mu^2 = 300 in 100
# independent directions, by 1.1 % in 1,000 (tests/adascale/test_estimators.py).
VARIANCE_FLOOR = 1e-6

# Elements. On a CPU, a float64 norm first copies its input to float64. Pieces that fit in the cache take half
# the time.
_PIECE = 1 << 14


def norms_by_group(gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Norms of each group's gradients: float64 scalars (float32 on MPS), one or more per gradient.

    One multi-tensor call per dtype, for any number of gradients. The variance is a small difference of large
    sums, hence float64.
    """
    groups = [list(_pieces(group)) for group in gradients]
    # A mixed list would launch one kernel per tensor on a GPU.
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for piece in chain.from_iterable(groups):
        by_dtype.setdefault(piece.dtype, []).append(piece)
    norms = {dtype: iter(_norms(pieces)) for dtype, pieces in by_dtype.items()}
    return [[next(norms[piece.dtype]) for piece in group] for group in groups]


def total_squares(norms: Sequence[Sequence[Tensor]]) -> Tensor:
    """Sum of the squares of each group's norms: [num_groups]. At least one group has a norm."""
    stacked = torch.stack(list(chain.from_iterable(norms)))
    return torch.stack(_norms(torch.split(stacked, [len(group) for group in norms]))).square()


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


def _norms(tensors: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
    dtype = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    return list(torch._foreach_norm(tensors, 2, dtype))


class Estimate(NamedTuple):
    """Clipped estimates of one step: ``variance`` of sigma^2 (>= 1e-6) and ``square`` of mu^2 (>= 0)."""

    variance: float
    square: float


def estimate(sum_of_squares: float, square_of_mean: float, num_gradients: int, scale: float) -> Estimate:
    """Estimate sigma^2 and mu^2 from the gradients that one step averages.

    With n gradients g_i, each of a micro-batch of S/n base batches, and their mean G::

        v       = (sum |g_i|^2 - n |G|^2) / (n - 1)    unbiased variance of a micro-batch gradient
        sigma^2 = (S / n) v                            of a base-batch gradient
        mu^2    = |G|^2 - v / n                        unbiased

    For n = S these are the estimators of appendix B.3.

    Args:
        sum_of_squares: sum over all ranks and micro-batches of |g_i|^2.
        square_of_mean: |G|^2.
        num_gradients: n >= 2, micro-batches of one step over all ranks.
        scale: S >= 1.
    """
    excess = sum_of_squares - num_gradients * square_of_mean
    variance_of_mean = excess / (num_gradients * (num_gradients - 1))
    return Estimate(
        max(scale * variance_of_mean, VARIANCE_FLOOR), max(square_of_mean - variance_of_mean, 0.0)
    )


def gain_ratio(variance: float, square: float, scale: float) -> float:
    """The gain r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2), in [1, S] (section 3.2).

    1 before the first sample, when both are zero (appendix B.3: r_0 := 1).
    """
    return (variance + square) / (variance / scale + square) if variance + square > 0 else 1.0


class Averages(NamedTuple):
    """Averages of sigma^2 and mu^2 of one group; zeros before the first sample.

    ``weight`` determines the next coefficient. It is the sum of the exponential weights so far (debiased), or
    the number of samples (the paper's form).
    """

    variance: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    def updated(self, sample: Estimate, smoothing: float, debias: bool) -> "Averages":
        """Return the averages after one more sample.

        With theta = ``smoothing`` in [0, 1), the debiased form is ``m_t / (1 - theta^t)``, where
        ``m_t = theta m_{t-1} + (1 - theta) x_t``. The paper's form (appendix B.3) is the mean of the first
        1 / (1 - theta) samples, then an exponential average. Both are
        ``average += coefficient * (x - average)``.
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
