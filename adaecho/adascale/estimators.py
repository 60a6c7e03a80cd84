"""Pure functions that estimate AdaScale's gradient statistics and average them over steps.

The notation follows Johnson et al., "AdaScale SGD" (ICML 2020, arXiv 2007.05105), section 3 and appendix B.3.
A base batch is the batch for which the learning rate was tuned. A step averages the gradients of S base
batches. ``sigma^2`` is the trace of the covariance of a base batch's gradient, ``mu^2`` the squared norm of
the expected gradient.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

# Appendix B.3 clips the estimates before they are averaged. Where noise dominates, clipping mu^2 at 0 biases
# its average upwards, and so the gain downwards. For S = 2 and sigma^2 / mu^2 = 300, the gain is 3.5% too
# small with 100 independent directions, and 1.1% with 1,000 (tests/adascale/test_estimators.py).
VARIANCE_FLOOR = 1e-6

# Elements per piece. On a CPU, a float64 norm first copies its input to float64. This takes half as long if
# gradients are split into pieces that fit in the cache.
_PIECE = 1 << 14


def norms_by_group(gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return the norms of the gradients in each parameter group, as scalars on the gradients' device."""
    # A large gradient on a CPU is split into pieces, with one norm each. Norms are float64 (float32 on MPS).
    groups = [list(_pieces(group)) for group in gradients]
    # Group by dtype, because on a GPU a list of mixed dtypes would launch one kernel per tensor.
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for piece in chain.from_iterable(groups):
        by_dtype.setdefault(piece.dtype, []).append(piece)
    norms = {dtype: iter(_norms(pieces)) for dtype, pieces in by_dtype.items()}
    return [[next(norms[piece.dtype]) for piece in group] for group in groups]


def total_squares(norms: Sequence[Sequence[Tensor]]) -> Tensor:
    """Sum the squares of each group's norms: float [num_groups]. At least one group must have a norm."""
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
    # float64, because the variance is a small difference of two large sums of squares.
    dtype = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    return list(torch._foreach_norm(tensors, 2, dtype))


class Estimate(NamedTuple):
    """The variance and the squared mean of a gradient, estimated from one step."""

    variance: float  # sigma^2 (see the module), at least VARIANCE_FLOOR
    square: float  # mu^2, at least 0


def estimate(sum_of_squares: float, square_of_mean: float, num_gradients: int, scale: float) -> Estimate:
    """Estimate a gradient's variance and squared mean from the micro-batches of one step."""
    # A step averages S base batches (scale). They are split into n >= 2 equal micro-batches (num_gradients),
    # over all ranks. Let g_i be the gradient of micro-batch i, and G the mean of these n gradients.
    # sum_of_squares is sum |g_i|^2, and square_of_mean is |G|^2. Then:
    #
    #     v       = (sum |g_i|^2 - n |G|^2) / (n - 1)    variance of a micro-batch gradient
    #     sigma^2 = (S / n) v                            variance of a base-batch gradient
    #     mu^2    = |G|^2 - v / n                        squared norm of the expected gradient
    #
    # For n = S, these are the estimates of appendix B.3. Estimates that are too small are clipped.
    excess = sum_of_squares - num_gradients * square_of_mean
    variance_of_mean = excess / (num_gradients * (num_gradients - 1))
    return Estimate(
        max(scale * variance_of_mean, VARIANCE_FLOOR), max(square_of_mean - variance_of_mean, 0.0)
    )


def gain_ratio(variance: float, square: float, scale: float) -> float:
    """Return AdaScale's gain, (variance + square) / (variance / scale + square), between 1 and ``scale``.

    The formula is in section 3.2 of the paper. If variance and square are 0, the gain is 1 (appendix B.3).
    """
    return (variance + square) / (variance / scale + square) if variance + square > 0 else 1.0


class Averages(NamedTuple):
    """Moving averages of the variance and the squared mean of one parameter group's gradient."""

    variance: float = 0.0  # average of sigma^2 (see the module)
    square: float = 0.0  # average of mu^2
    weight: float = 0.0  # sum of the exponential weights of the samples; without debiasing, their number

    def updated(self, sample: Estimate, smoothing: float, debias: bool) -> "Averages":
        """Return the averages after one more sample."""
        # Let theta be the smoothing, in [0, 1), and x_t the t-th sample, for t = 1, 2, ...
        if debias:
            # The average is m_t / (1 - theta^t), with m_t = theta m_{t-1} + (1 - theta) x_t and m_0 = 0.
            weight = smoothing * self.weight + (1 - smoothing)
            coefficient = (1 - smoothing) / weight
        else:
            # The paper averages the first 1 / (1 - theta) samples equally, then exponentially (appendix B.3).
            weight = self.weight + 1
            coefficient = max(1 / weight, 1 - smoothing)
        return Averages(
            self.variance + coefficient * (sample.variance - self.variance),
            self.square + coefficient * (sample.square - self.square),
            weight,
        )
