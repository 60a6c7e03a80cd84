"""AdaScale's estimators, as pure functions of sums of squares.

Notation of Johnson et al., "AdaScale SGD" (ICML 2020, arXiv 2007.05105), section 3 and appendix B.3:
``sigma^2`` is the trace of the covariance of one base-batch gradient, ``mu^2`` the squared norm of the
expected gradient, ``S`` the scale: how many base batches one step averages over.

Every tensor here is float64 of shape [num_groups] or a scalar, in the units of the unscaled mean gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Appendix B.3: estimates are clipped before they are averaged. Clipping mu^2 at 0 makes its average too large
# where noise dominates, and so the gain too small: by 3.5 % at S = 2, sigma^2 / mu^2 = 300 in 100 independent
# directions, by 1.1 % in 1000, by less in more (tests/adascale/test_estimators.py).
VARIANCE_FLOOR = 1e-6


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


def gain_ratio(variance: Tensor, square: Tensor, scale: float) -> Tensor:
    """The gain r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2), in [1, S] (section 3.2).

    1 where nothing has been seen yet (both zero): r_0 := 1 in appendix B.3.
    """
    seen = variance + square > 0
    return torch.where(seen, (variance + square) / torch.where(seen, variance / scale + square, 1.0), 1.0)


def _clipped(variance: Tensor, square: Tensor) -> Estimate:
    return Estimate(variance.clamp(min=VARIANCE_FLOOR), square.clamp(min=0.0))
