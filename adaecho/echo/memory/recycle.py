"""Memory for batches that is used again once nothing refers to it.

A large array that is freed goes back to the operating system, and each page of the next one costs a fault:
for batches of small images several times what filling them costs.
"""

import math
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LEAST_BYTES = 1 << 16  # the allocator keeps smaller ones itself
_SPARE_BLOCKS = 8  # of one size
_MAX_SIZES = 32

# Free memory by size in bytes. Appending to and popping from a deque needs no lock.
_spare: dict[int, deque[NDArray[np.uint8]]] = {}


class _Lease:
    """Base of every array that looks at a block, which lives as long as the last of them."""

    def __init__(self, block: NDArray[np.uint8], spare: deque[NDArray[np.uint8]]) -> None:
        self._block, self._spare = block, spare
        self.__array_interface__ = block.__array_interface__  # how np.asarray looks at it without a copy

    def __del__(self) -> None:
        self._spare.append(self._block)


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """``np.empty``, of memory that comes back here when the array and all views of it are gone."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_BYTES:
        return np.empty(shape, dtype)
    if num_bytes not in _spare and len(_spare) >= _MAX_SIZES:
        _spare.clear()
    spare = _spare.setdefault(num_bytes, deque(maxlen=_SPARE_BLOCKS))
    try:
        block = spare.pop()
    except IndexError:
        block = np.empty(num_bytes, np.uint8)  # [num_bytes]
    return np.asarray(_Lease(block, spare)).view(dtype).reshape(shape)


def take(array: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
    """A copy of some rows, all of which exist, in recycled memory."""
    selected = empty((len(rows), *array.shape[1:]), array.dtype)
    if not array.flags.c_contiguous:  # np.take would first make a contiguous copy of the whole array
        selected[...] = array[rows]
        return selected
    # Any mode but "raise" writes without a second buffer.
    return np.take(array, rows, axis=0, out=selected, mode="clip")
