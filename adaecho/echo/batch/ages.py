"""What ``ages=True`` tells of each example in a batch."""

from typing import TypedDict

import torch


class Ages(TypedDict):
    """How often the examples of a batch have been used before, and when they were read.

    A plain dict: every trainer moves one to its device (that of Hugging Face can't move a named tuple).

    Attributes:
        echo_index: 0 where the example (under batch echoing the batch) is used for the first time, 1 at its
            second use, and so on, in the order of the batches; int64 [batch].
        fresh_number: how many fresh examples this rank had read before this one, in the units of
            ``EchoLoader.fresh_examples``; of whole batches (``batch_size=None``) how many batches.
            int64 [batch].
    """

    echo_index: torch.Tensor
    fresh_number: torch.Tensor
