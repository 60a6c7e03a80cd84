"""What sources and examples of less common kinds become: the same values, types and counts as they hold."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from adaecho import EchoLoader


@pytest.mark.parametrize("base", [TensorDataset, object])
def test_a_dataset_that_keeps_tensors_gives_its_own_items(base: type) -> None:
    class Transformed(base):  # type: ignore[misc]
        def __init__(self, *tensors: torch.Tensor) -> None:
            self.tensors = tensors

        def __len__(self) -> int:
            return len(self.tensors[0])

        def __getitem__(self, row: int) -> Any:
            return tuple(tensor[row] + 100 for tensor in self.tensors)

    x, y = next(iter(EchoLoader(Transformed(torch.zeros(8, 2), torch.arange(8)), 4, order="stored")))
    assert x.tolist() == [[100, 100]] * 4
    assert y.tolist() == [100, 101, 102, 103]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_may_be_of_a_type_that_numpy_lacks(dtype: torch.dtype) -> None:
    rows = torch.arange(6).reshape(3, 2)
    for source in (rows.to(dtype), TensorDataset(rows.to(dtype), torch.arange(3))):
        batch = next(iter(EchoLoader(source, 3, order="stored")))
        found = batch if isinstance(batch, torch.Tensor) else batch[0]
        assert found.dtype == dtype
        assert found.float().tolist() == rows.tolist()


@pytest.mark.parametrize("size", [3, 100_000])
def test_numpy_scalars_keep_their_type_through_an_augmentation(size: int) -> None:
    examples = [{"x": np.zeros(size, np.uint8), "y": np.float32(0.1), "n": 3, "f": 0.1}] * 4
    seen = []

    def same(example: dict[str, Any], _: Any) -> dict[str, Any]:
        seen.append({name: type(value) for name, value in example.items()})
        return example

    batch, expected = next(iter(EchoLoader(examples, 2, augment=same))), next(iter(DataLoader(examples, 2)))  # type: ignore[arg-type]
    assert {name: part.dtype for name, part in batch.items()} == {
        name: part.dtype for name, part in expected.items()
    }
    assert seen[0] == {"x": np.ndarray, "y": np.float32, "n": int, "f": float}
