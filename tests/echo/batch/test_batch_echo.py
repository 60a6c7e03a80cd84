"""Batch echo of batches of all forms and sizes."""

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.memory.tree import duplicate
from tests.helpers import through_torch_save


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sparse_tensors_are_repeated(num_workers: int) -> None:
    def source() -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.ones(3), "edges": torch.eye(3).to_sparse() * number} for number in (1, 2)]

    with EchoLoader(source, None, echo="batch", factor=2, epochs=1, num_workers=num_workers) as loader:
        assert [int(batch["edges"].to_dense()[0, 0]) for batch in loader] == [1, 1, 2, 2]


def batches_of_all_sizes() -> list[torch.Tensor]:
    return [
        torch.arange(number, number + length) for number, length in enumerate([2, 3, 90, 4, 70, 1, 5, 80])
    ]


@pytest.mark.parametrize("buffer", [0, 3])
@pytest.mark.parametrize("factor", [1.5, 3])
def test_batches_of_all_sizes(factor: float, buffer: int) -> None:
    common: dict[str, Any] = {"batch_size": None, "echo": "batch", "factor": factor, "epochs": 2}
    common["batch_shuffle_buffer"] = buffer
    expected = list(EchoLoader(batches_of_all_sizes, **common))
    with EchoLoader(batches_of_all_sizes, num_workers=1, **common) as loader:
        states = []
        for batch, one in zip(loader, expected, strict=True):
            assert torch.equal(batch, one)
            batch.fill_(-1)
            states.append(loader.state_dict())
        for position, state in enumerate(states[:-1]):
            loader.load_state_dict(through_torch_save(state))
            for batch, one in zip(islice(loader, 4), expected[position + 1 :], strict=False):
                assert torch.equal(batch, one)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


FORMS: dict[str, Callable[[int], Any]] = {
    "tensors": lambda n: torch.arange(n * 6).reshape(n, 6).float(),
    "nested": lambda n: {"x": (torch.ones(n, 3), [torch.zeros(n, dtype=torch.int8)]), "n": n},
    "named": lambda n: Pair(torch.ones(n, 2), torch.zeros(n)),
    "ragged": lambda n: torch.ones(n, n),
    "numpy": lambda n: {"x": np.ones((n, 2)), "y": torch.ones(n, dtype=torch.float64)},
    "sparse": lambda n: torch.eye(n).to_sparse(),
    "scalars": lambda n: torch.tensor(float(n)),
    "empty": lambda n: {"x": torch.ones(n), "nothing": [[], {}, ()]},
    "keys": lambda n: {"x": torch.ones(n), **({"mask": torch.zeros(n)} if n == 3 else {})},
    "lengths": lambda n: [torch.ones(2) for _ in range(n)],
    "types": lambda n: torch.ones(n) if n == 4 else [torch.ones(n)],
    "gradients": lambda n: torch.ones(n, 2, requires_grad=True),
    "recycled": lambda n: torch.arange(n << 16).reshape(n, -1),
    "no elements": lambda n: torch.ones(n, 0, dtype=torch.bfloat16),
    "bfloat16": lambda n: torch.arange(n << 16, dtype=torch.bfloat16).reshape(n, -1),
    "channels last": lambda n: torch.ones(n, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "conjugated": lambda n: torch.full((n, 2), 1 + 2j).conj(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_is_of_the_same_form_and_shares_nothing(form: str) -> None:
    batch, expected = FORMS[form](3), FORMS[form](3)
    copied = duplicate(batch)
    assert type(copied) is type(batch)
    torch.testing.assert_close(copied, expected)
    for one in leaves(copied):
        assert not one.requires_grad
        if one.layout == torch.strided:
            one += 1  # into the copy, not into what it was made of
    torch.testing.assert_close(batch, expected)


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    return [value] if isinstance(value, torch.Tensor) else []
