"""Stacks of examples against NumPy's; recycled memory: never two owners, the same again after the first."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaecho.echo.memory import pytree
from adaecho.echo.memory.pytree import collate, stack

STACKED: dict[str, list[Any]] = {
    "images": [np.full((2, 3, 3), value, np.uint8) for value in range(4)],
    "channels last": [
        np.zeros((3, 4, 2), np.uint8).transpose(2, 0, 1) + np.uint8(value) for value in range(4)
    ],
    "backwards": [np.arange(5)[::-1] + value for value in range(4)],
    "of another byte order": [np.arange(3, dtype=">i4") + value for value in range(4)],
    "no rows": [np.empty((0, 3), np.float16) for _ in range(4)],
    "no shape": [np.array(value, np.complex64) for value in range(4)],
    "scalars": [np.float16(value) for value in range(4)],
    "truths": [np.bool_(value % 2) for value in range(4)],
    "long": [np.longdouble(value) / 3 for value in range(4)],
    "numbers": [0.5, 1.5, -2.0, 1e300],
    "tensors": [torch.arange(3) + value for value in range(4)],
}
MIXED: dict[str, list[Any]] = {
    "shapes": [np.zeros(2), np.zeros(3)],
    "types": [np.zeros(2), np.zeros(2, np.float32)],
    "scalars of two types": [np.int64(1), np.int32(1)],
    "scalars and arrays": [np.int64(1), np.array(1)],
    "arrays and scalars": [np.array(1), np.int64(1)],
    "arrays and tensors": [np.zeros(2), torch.zeros(2)],
    "numbers and scalars": [1.0, np.float64(1)],
    "numbers of two types": [1, 1.0],
    "objects after numbers": [np.zeros(1), np.array([None])],
    "subclasses": [np.zeros(2), np.ma.zeros(2)],
    "texts": [np.str_("a"), np.str_("b")],
}


@pytest.mark.parametrize("kind", STACKED)
def test_a_stack_holds_what_numpy_stacks(kind: str) -> None:
    values = STACKED[kind]
    stacked = stack([{"field": value, "other": 1} for value in values])
    assert stacked is not None
    expected = np.stack([np.asarray(value) for value in values])
    assert stacked.arrays[0].dtype == expected.dtype
    assert stacked.arrays[0].strides == expected.strides
    np.testing.assert_array_equal(stacked.arrays[0], expected)
    for example, value in zip(stacked.examples(), values, strict=True):
        assert type(example["field"]) is type(value)


@pytest.mark.parametrize("kind", MIXED)
def test_what_has_no_common_form_is_not_stacked(kind: str) -> None:
    assert stack(MIXED[kind]) is None


def test_rows_of_a_memory_map_are_arrays(tmp_path: Path) -> None:
    rows = np.memmap(tmp_path / "rows", np.int16, "w+", shape=(3, 2))
    rows[:] = np.arange(6).reshape(3, 2)
    stacked = stack([rows[0], np.array(rows[1]), rows[2]])
    assert stacked is not None
    assert type(stacked.arrays[0]) is np.ndarray
    np.testing.assert_array_equal(stacked.arrays[0], rows)


SHAPE = (64, 64, 64)  # large enough to be recycled


def test_memory_in_use_is_not_handed_out() -> None:
    kept = [pytree.empty(SHAPE, np.uint8) for _ in range(12)]
    for number, array in enumerate(kept):
        array[...] = number
    assert [(int(array.min()), int(array.max())) for array in kept] == [(one, one) for one in range(12)]


def test_a_view_or_a_tensor_keeps_the_memory() -> None:
    tensor = torch.from_numpy(pytree.empty(SHAPE, np.uint8)[3:5])
    tensor.fill_(7)
    gc.collect()
    for _ in range(12):
        pytree.empty(SHAPE, np.uint8)[...] = 1
    assert bool((tensor == 7).all())


def test_memory_comes_back() -> None:
    def address() -> int:
        return pytree.empty(SHAPE, np.float32).ctypes.data

    first = address()
    gc.collect()
    assert {address() for _ in range(5)} == {first}


def test_shapes_types_and_small_arrays() -> None:
    for shape in ((2, 3), SHAPE, (0, 5)):
        array = pytree.empty(shape, np.int16)
        assert (array.shape, array.dtype) == (shape, np.int16)
        assert array.flags.c_contiguous
        assert array.flags.writeable


def test_takes_rows_also_of_a_view_without_copying_all_of_it() -> None:
    array = np.random.default_rng(0).integers(0, 256, (50, 40, 40), dtype=np.uint8)
    rows = np.array([49, 0, 7, 7] * 20)
    np.testing.assert_array_equal(pytree.take_rows(array, rows), array[rows])
    broadcast = np.broadcast_to(np.arange(1000, dtype=np.int32), (10**11, 1000))  # whole, 400 TB
    np.testing.assert_array_equal(pytree.take_rows(broadcast, np.array([10**11 - 1, 0, 5])), broadcast[:3])


def test_an_array_and_a_list_make_no_batch() -> None:
    with pytest.raises(ValueError, match="examples of one batch have different shapes"):
        collate([np.arange(3), [1, 2, 3]])
