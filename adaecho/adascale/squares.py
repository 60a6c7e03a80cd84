"""Sums of squares of gradients, in float32 or better whatever the gradients' type."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Longest stretch that one float32 accumulation runs over on a CPU: torch's own float32 norm of 2e7 normal
# numbers is off by 1e-3 there, and a difference of two such sums is what the variance is made of.
_CHUNK = 1 << 15


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares over all elements of ``tensors`` (one device, at least one): a float64 scalar.

    Half-precision inputs are widened to float32 before they are squared; partial sums are added in float64
    (float32 on a device without it). Nothing is read back by the host.
    """
    dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    partial = _cpu_squares(dense) if dense[0].device.type == "cpu" else _device_squares(dense)
    return partial.to(statistics_dtype(dense[0].device)).sum()


def statistics_dtype(device: torch.device) -> torch.dtype:
    """float64, except on Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def _cpu_squares(tensors: Sequence[Tensor]) -> Tensor:
    chunks = [chunk for tensor in tensors for chunk in torch.split(_flat(_widened(tensor)), _CHUNK)]
    return torch.stack([torch.dot(chunk, chunk) for chunk in chunks])


def _device_squares(tensors: Sequence[Tensor]) -> Tensor:
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norms = torch._foreach_norm(list(tensors), 2, dtype=wide)
    return torch.stack(norms).to(statistics_dtype(tensors[0].device)).square()


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _flat(tensor: Tensor) -> Tensor:
    # Elements in the order of memory: a view for channels_last and transposed gradients too.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)
