"""Memory: limits of the buffers, stacked examples, reused arrays."""

import gc
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.memory import pool as budget
from adaecho.echo.memory import pytree
from adaecho.echo.memory.pool import ResidentPool
from adaecho.echo.memory.pytree import Columns, TreeSpec, stack
from adaecho.echo.order.stage import EchoStage, FreshBlock
from adaecho.echo.order.stream import Factor, Stream
from tests.echo import sources
from tests.echo.sources import Dataset, arrays


@pytest.mark.parametrize("make", [Dataset, sources.Stream, arrays])
def test_a_buffer_larger_than_memory_is_refused_before_any_read(make: Any) -> None:
    source = make(9)
    with pytest.raises(ValueError, match=r"needs 14,901\.2 GiB, .* reduce shuffle_buffer"):
        EchoLoader(source, 3, shuffle_buffer=10**12, epochs=1)
    assert getattr(source, "reads", 0) == 0
    with pytest.raises(ValueError, match=r"^batch_shuffle_buffer: needs .* reduce batch_shuffle"):
        EchoLoader(source, 3, echo="batch", factor=2, batch_shuffle_buffer=10**12, epochs=1)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("batch_size", "buffer"),
    [
        (3, {"shuffle_buffer": 100}),
        *((size, {"echo": "batch", "batch_shuffle_buffer": 120}) for size in (3, None)),
    ],
    ids=["examples", "batches", "whole batches"],
)
def test_a_buffer_that_does_not_fit_is_refused_at_the_first_example(
    batch_size: int | None, buffer: dict[str, Any], num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda: 2000)
    source = Dataset(50, lambda _: np.zeros(10))
    name = list(buffer)[-1]
    with (
        EchoLoader(source, batch_size, num_workers=num_workers, **buffer) as loader,
        pytest.raises(ValueError, match=f"^{name}: .* reduce {name}"),
    ):
        next(iter(loader))
    assert num_workers or source.reads <= 103


def test_the_buffer_keeps_no_views_of_chunks() -> None:
    def ragged() -> Iterator[Any]:
        yield np.zeros(999, np.uint8)
        while True:
            yield np.zeros(4096, np.uint8)

    iterator = iter(loader := EchoLoader(ragged, 64, shuffle_buffer=300, collate=list))
    list(islice(iterator, 50))
    buffered = [one for one in loader._pipeline.run._batches._pool._singles if one is not None]  # type: ignore[union-attr]
    assert len(buffered) >= 300
    assert all(example.base is None for example in buffered)


def test_row_numbers_exceed_32_bits() -> None:
    first = (1 << 31) - 2
    source = np.broadcast_to(np.zeros(1, np.uint8), (first + 50,))
    numbers = np.arange(50)
    fresh = iter([FreshBlock(numbers, first + numbers, 50)])
    pool = ResidentPool(Columns(TreeSpec("array"), [source]))
    stream = Stream(0, 8, Factor(0, 1), rank=0, world=1, begin=0, bad=[])
    stage = EchoStage(lambda _: next(fresh, None), pool, stream)
    assert sorted(stage.take(50).rows) == list(range(first, first + 50))


STACKED: dict[str, list[Any]] = {
    "images": [np.full((2, 3, 3), value, np.uint8) for value in range(4)],
    "channels last": [
        np.zeros((3, 4, 2), np.uint8).transpose(2, 0, 1) + np.uint8(value) for value in range(4)
    ],
    "negative strides": [np.arange(5)[::-1] + value for value in range(4)],
    "big-endian": [np.arange(3, dtype=">i4") + value for value in range(4)],
    "0-dimensional": [np.array(value, np.complex64) for value in range(4)],
    "scalars": [np.float16(value) for value in range(4)],
    "numbers": [0.5, 1.5, -2.0, 1e300],
    "tensors": [torch.arange(3) + value for value in range(4)],
}
MIXED: dict[str, list[Any]] = {
    "shapes": [np.zeros(2), np.zeros(3)],
    "types": [np.zeros(2), np.zeros(2, np.float32)],
    "arrays and scalars": [np.array(1), np.int64(1)],
    "arrays and tensors": [np.zeros(2), torch.zeros(2)],
    "numbers of two types": [1, 1.0],
    "subclasses": [np.zeros(2), np.ma.zeros(2)],
}


@pytest.mark.parametrize("kind", STACKED)
def test_stack_equals_numpy_stack(kind: str) -> None:
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
def test_values_of_different_types_or_shapes_are_not_stacked(kind: str) -> None:
    assert stack(MIXED[kind]) is None


SHAPE = (64, 64, 64)  # large enough for the pool to reuse the memory


def test_memory_in_use_is_not_reused() -> None:
    kept = [pytree.empty(SHAPE, np.uint8) for _ in range(12)]
    for number, array in enumerate(kept):
        array[...] = number
    assert [(int(array.min()), int(array.max())) for array in kept] == [(one, one) for one in range(12)]


def test_a_tensor_keeps_its_memory_from_reuse() -> None:
    tensor = torch.from_numpy(pytree.empty(SHAPE, np.uint8)[3:5])
    tensor.fill_(7)
    gc.collect()
    for _ in range(12):
        pytree.empty(SHAPE, np.uint8)[...] = 1
    assert bool((tensor == 7).all())


def test_take_rows_does_not_copy_the_whole_array() -> None:
    array = np.random.default_rng(0).integers(0, 256, (50, 40, 40), dtype=np.uint8)
    rows = np.array([49, 0, 7, 7] * 20)
    np.testing.assert_array_equal(pytree.take_rows(array, rows), array[rows])
    broadcast = np.broadcast_to(np.arange(1000, dtype=np.int32), (10**11, 1000))  # 400 TB if copied
    np.testing.assert_array_equal(pytree.take_rows(broadcast, np.array([10**11 - 1, 0, 5])), broadcast[:3])
