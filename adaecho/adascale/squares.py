"""Sums of squares of gradients, in float32 or better whatever the gradients' type.

A sum is taken in two moves, so that a hook on a parameter does little: ``pieces`` of a tensor when it is
there, ``sum_of_pieces`` later. Nothing is read back by the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Longest stretch that one float32 accumulation runs over on a CPU: torch's own float32 norm of 2e7 normal
# numbers is off by 1e-3 there, and a difference of two such sums is what the variance is made of. Squares of
# bfloat16 numbers round with a bias: 1e-6 at this length, four times that at four times the length.
_CHUNK = 1 << 15
_WIDE = (torch.float32, torch.float64)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares over all elements of ``tensors`` (one device, at least one): a float64 scalar.

    Half-precision inputs are widened to float32 before they are squared; partial sums are added in float64
    (float32 on a device without it).
    """
    if tensors[0].device.type == "cpu":
        return sum_of_pieces([piece for tensor in tensors for piece in pieces(tensor)])
    dense = [_dense(tensor) for tensor in tensors]
    return sum_of_pieces(torch._foreach_norm(dense, 2, dtype=_wide(dense[0])))


def pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Scalars that ``sum_of_pieces`` makes the sum of squares of: dot products on a CPU, else a norm."""
    tensor = _dense(tensor)
    if tensor.is_cpu:
        # A model has hundreds of small gradients, each with a hook: what is not needed is not called.
        wide = tensor if tensor.dtype in _WIDE else tensor.float()
        flat = _flat(wide)
        if len(flat) <= _CHUNK:
            return (torch.dot(flat, flat),)
        return [torch.dot(chunk, chunk) for chunk in torch.split(flat, _CHUNK)]
    return [torch.linalg.vector_norm(tensor, dtype=_wide(tensor))]


def sum_of_pieces(scalars: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all tensors whose ``pieces`` these are."""
    stacked = torch.stack(tuple(scalars)).to(statistics_dtype(scalars[0].device))
    return stacked.sum() if stacked.device.type == "cpu" else stacked.square().sum()


def statistics_dtype(device: torch.device) -> torch.dtype:
    """float64, except on Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _dense(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _flat(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)
    # Elements in the order of memory: a view for channels_last and transposed gradients too.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)
