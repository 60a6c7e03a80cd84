"""What sources and examples of less common kinds become: the same values, types and counts as they hold."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from adaecho import EchoLoader


class Transformed(TensorDataset):
    """A common subclass: transforms on access."""

    def __getitem__(self, row: int) -> Any:
        return tuple(tensor[row] + 100 for tensor in self.tensors)


class WithTensors:
    """The same without the base class."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], transform: Callable[[Any], Any]) -> None:
        self.tensors, self.transform = tensors, transform

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, row: int) -> Any:
        return self.transform(self.tensors[0][row]), self.tensors[1][row]


def test_a_dataset_that_keeps_tensors_gives_its_own_items() -> None:
    tensors = torch.zeros(8, 2), torch.arange(8)
    first = next(iter(EchoLoader(WithTensors(tensors, lambda x: x + 100), 4)))
    assert first[0].tolist() == [[100, 100]] * 4
    x, y = next(iter(EchoLoader(Transformed(*tensors), 4, order="stored")))
    assert x.tolist() == [[100, 100]] * 4
    assert y.tolist() == [100, 101, 102, 103]


def test_a_plain_tensor_dataset_may_be_of_a_type_without_arrays() -> None:
    source = TensorDataset(torch.arange(8).to(torch.bfloat16), torch.arange(8))
    x, y = next(iter(EchoLoader(source, 4, order="stored")))
    assert x.dtype == torch.bfloat16
    assert x.tolist() == y.tolist() == [0, 1, 2, 3]


def test_an_iterable_dataset_with_a_length_is_iterated() -> None:
    class Ten(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

        def __len__(self) -> int:
            return 10

    assert next(iter(EchoLoader(Ten(), 4))).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_tensor_of_a_type_that_numpy_lacks(dtype: torch.dtype) -> None:
    batch = next(iter(EchoLoader(torch.arange(6).reshape(3, 2).to(dtype), 3, order="stored")))
    assert batch.dtype == dtype
    assert batch.float().tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("size", [3, 100_000])
def test_numpy_scalars_keep_their_type_through_an_augmentation(size: int) -> None:
    examples = [{"x": np.zeros(size, np.uint8), "y": np.float32(0.1), "n": 3, "f": 0.1}] * 4
    expected = next(iter(DataLoader(examples, 2)))  # type: ignore[arg-type]
    seen = []

    def same(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:  # noqa: ARG001
        seen.append({name: type(value) for name, value in example.items()})
        return example

    batch = next(iter(EchoLoader(examples, 2, augment=same)))
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        name: tensor.dtype for name, tensor in expected.items()
    }
    assert seen[0] == {"x": np.ndarray, "y": np.float32, "n": int, "f": float}
