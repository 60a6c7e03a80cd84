"""Recycled memory: never two owners, and the same memory again once the first is gone."""

import gc

import numpy as np
import torch

from adaecho.echo.memory import recycle

SHAPE = (64, 64, 64)  # large enough to be recycled


def test_memory_in_use_is_not_handed_out() -> None:
    kept = [recycle.empty(SHAPE, np.uint8) for _ in range(12)]
    for number, array in enumerate(kept):
        array[...] = number
    assert [(int(array.min()), int(array.max())) for array in kept] == [(one, one) for one in range(12)]


def test_a_view_or_a_tensor_keeps_the_memory() -> None:
    tensor = torch.from_numpy(recycle.empty(SHAPE, np.uint8)[3:5])
    tensor.fill_(7)
    gc.collect()
    for _ in range(12):
        recycle.empty(SHAPE, np.uint8)[...] = 1
    assert bool((tensor == 7).all())


def test_memory_comes_back() -> None:
    def address() -> int:
        return recycle.empty(SHAPE, np.float32).ctypes.data

    first = address()
    gc.collect()
    assert {address() for _ in range(5)} == {first}


def test_shapes_types_and_small_arrays() -> None:
    for shape in ((2, 3), SHAPE, (0, 5)):
        array = recycle.empty(shape, np.int16)
        assert (array.shape, array.dtype) == (shape, np.int16)
        assert array.flags.c_contiguous
        assert array.flags.writeable


def test_takes_rows_also_of_a_view_without_copying_all_of_it() -> None:
    array = np.random.default_rng(0).integers(0, 256, (50, 40, 40), dtype=np.uint8)
    rows = np.array([49, 0, 7, 7] * 20)
    np.testing.assert_array_equal(recycle.take(array, rows), array[rows])
    broadcast = np.broadcast_to(np.arange(1000, dtype=np.int32), (10**11, 1000))  # whole, 400 TB
    np.testing.assert_array_equal(recycle.take(broadcast, np.array([10**11 - 1, 0, 5])), broadcast[:3])
