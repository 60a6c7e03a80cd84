"""Moving averages of the estimates, per parameter group."""

from typing import NamedTuple

import torch
from torch import Tensor

from adaecho.adascale.estimators import Estimate


class Averages(NamedTuple):
    """Averaged sigma^2 and mu^2, each float64 [num_groups]; zeros before the first sample.

    ``weight`` [num_groups] is what the next coefficient follows from: the sum of the exponential weights so
    far (debiased), or the number of samples (the paper's form).
    """

    variance: Tensor
    square: Tensor
    weight: Tensor

    @staticmethod
    def empty(num_groups: int, device: torch.device, dtype: torch.dtype = torch.float64) -> "Averages":
        """No samples yet."""
        return Averages(*(torch.zeros(num_groups, device=device, dtype=dtype) for _ in range(3)))

    def to(self, device: torch.device) -> "Averages":
        """The same averages on ``device``."""
        return Averages(*(tensor.to(device) for tensor in self))

    def with_group(self) -> "Averages":
        """One more group, without samples."""
        return Averages(*(torch.cat([tensor, tensor.new_zeros(1)]) for tensor in self))


def updated(averages: Averages, sample: Estimate, smoothing: float, debias: bool) -> Averages:
    """Take in one sample; a sample that is not finite in any group changes nothing, decided on the device.

    With theta = ``smoothing`` in [0, 1), the debiased form is ``m_t / (1 - theta^t)`` for
    ``m_t = theta m_{t-1} + (1 - theta) x_t``, written so that theta may change on the way. The paper's form
    (appendix B.3) is the plain mean of the first 1 / (1 - theta) samples, then an exponential average of it.
    Both are ``average += coefficient * (x - average)``.
    """
    if debias:
        weight = smoothing * averages.weight + (1 - smoothing)
        coefficient = (1 - smoothing) / weight
    else:
        weight = averages.weight + 1
        coefficient = (1 / weight).clamp(min=1 - smoothing)
    finite = torch.isfinite(sample.variance + sample.square).all()
    new = Averages(
        averages.variance + coefficient * (sample.variance - averages.variance),
        averages.square + coefficient * (sample.square - averages.square),
        weight,
    )
    return Averages(
        *(torch.where(finite, after, before) for after, before in zip(new, averages, strict=True))
    )
