"""Sums of squares of gradients, in float32 or better whatever the gradients' type.

Nothing is read back by the host.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

# Longest stretch that one float32 accumulation runs over on a CPU: torch's own float32 norm of 2e7 normal
# numbers is off by 1e-3 there, and a difference of two such sums is what the variance is made of. Squares of
# bfloat16 numbers round with a bias: 1e-6 at this length, four times that at four times the length.
_CHUNK = 1 << 13
# Rows of a weight serve as such stretches, whatever its memory format. Those of fewer elements, as an
# embedding's, would make more results than are worth keeping.
_LEAST_ROW = 256


class Slots:
    """Room for the norms of parts of each of many tensors, allocated once.

    A hook that kept a small result of its own among the large buffers of a backward pass would make the
    allocator give those back to the operating system and fault them in again.

    Args:
        groups: the numbers of the tensors in each group.
        like: tensors by number, of the shape and type of those to come (one device, at least one).
    """

    def __init__(self, groups: Sequence[Sequence[int]], like: Sequence[Tensor]) -> None:
        self._wide = _wide(like)
        lengths = [_num_parts(tensor) for tensor in like]
        self._shapes = [tensor.shape for tensor in like]
        self._group_lengths = [sum(lengths[number] for number in group) for group in groups]
        with torch.inference_mode(False):  # also within inference mode; backward passes write into it
            # [parts of all tensors], those of a group together: sums() splits there.
            self._room = torch.zeros(sum(lengths), dtype=self._wide, device=like[0].device)
        self._slots = [self._room[:0]] * len(like)
        end = 0
        for number in chain.from_iterable(groups):  # a view for each tensor: [] or [parts]
            begin, end = end, end + lengths[number]
            self._slots[number] = self._room[begin] if lengths[number] == 1 else self._room[begin:end]
        self._full: set[int] = set()  # numbers of tensors that have been put in

    def fit(self, number: int, tensor: Tensor) -> bool:
        """Whether a tensor is of the shape, type and device that this was made for."""
        return (
            tensor.shape == self._shapes[number]
            and tensor.device == self._room.device
            and (tensor.dtype != torch.float64 or self._wide == torch.float64)
        )

    @property
    def empty(self) -> bool:
        """Whether nothing has been put in."""
        return not self._full

    def taken(self, number: int) -> bool:
        """Whether a tensor has been put in."""
        return number in self._full

    def put(self, number: int, tensor: Tensor) -> None:
        """Write the norms of a tensor's parts."""
        self._full.add(number)
        slots, dense = self._slots[number], _dense(tensor)
        # A model has hundreds of small gradients, each with a hook: one call of torch for each.
        if not slots.dim():
            torch.linalg.vector_norm(dense, dtype=self._wide, out=slots)
        elif dense is tensor and _in_rows(tensor):
            rows = tuple(range(1, tensor.dim()))  # [rows, ...] to [rows]
            torch.linalg.vector_norm(tensor, dim=rows, dtype=self._wide, out=slots)
        else:
            flat = _flat(dense)  # [elements] to [full] of _CHUNK each, and [1] of the rest
            full = len(flat) // _CHUNK
            chunks, rest = flat[: full * _CHUNK].view(full, _CHUNK), flat[full * _CHUNK :]
            torch.linalg.vector_norm(chunks, dim=1, dtype=self._wide, out=slots[:full])
            if len(rest):
                torch.linalg.vector_norm(rest, dtype=self._wide, out=slots[full])

    def sums(self) -> Tensor:
        """The sum of squares of each group, [num_groups] in float64 (float32 where there is none)."""
        squares = self._room.to(statistics_dtype(self._room.device)).square()
        return torch.stack([group.sum() for group in torch.split(squares, self._group_lengths)])

    def clear(self) -> None:
        """Empty all slots."""
        if self._full:
            self._full.clear()
            self._room.zero_()


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares over all elements of ``tensors`` (one device, at least one): a float64 scalar.

    Half-precision inputs are widened to float32 before they are squared; partial sums are added in float64
    (float32 on a device without it).
    """
    if tensors[0].is_cpu:
        slots = Slots([range(len(tensors))], tensors)
        for number, tensor in enumerate(tensors):
            slots.put(number, tensor)
        return slots.sums()[0]
    dense = [_dense(tensor) for tensor in tensors]
    norms = torch.stack(torch._foreach_norm(dense, 2, dtype=_wide(dense)))  # [tensors]
    return norms.to(statistics_dtype(norms.device)).square().sum()


def statistics_dtype(device: torch.device) -> torch.dtype:
    """float64, except on Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def _wide(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _num_parts(tensor: Tensor) -> int:
    if not tensor.is_cpu or tensor.numel() <= _CHUNK:
        return 1
    return len(tensor) if _in_rows(tensor) else -(-tensor.numel() // _CHUNK)


def _in_rows(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and _LEAST_ROW * len(tensor) <= tensor.numel() <= _CHUNK * len(tensor)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _flat(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)
    # Elements in the order of memory: a view for channels_last and transposed gradients too.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)
