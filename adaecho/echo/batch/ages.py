"""What ``ages=True`` tells of each example in a batch."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Ages(NamedTuple):
    """How often the examples of a batch have been used before, and when they were read.

    Attributes:
        echo_index: 0 where the example (under batch echoing the batch) is used for the first time, 1 at its
            second use, and so on, in the order of the batches; int64 [batch].
        fresh_number: how many fresh examples this rank had read before this one, in the units of
            ``EchoLoader.fresh_examples``; of whole batches (``batch_size=None``) how many batches.
            int64 [batch].
    """

    echo_index: torch.Tensor
    fresh_number: torch.Tensor

    @staticmethod
    def of(echo_index: NDArray[np.int64] | int, fresh_number: NDArray[np.int64], length: int) -> "Ages":
        """From one number for each example, or one for all."""
        both = [np.broadcast_to(numbers, length).copy() for numbers in (echo_index, fresh_number)]
        return Ages(*map(torch.from_numpy, both))
