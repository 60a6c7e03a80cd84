"""Numbers as they come out of NumPy, as arguments; and states of a source of another length."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from tests.echo.sources import Dataset, arrays
from tests.helpers import through_torch_save


def test_numpy_scalars_are_plain_numbers() -> None:
    numbers: dict[str, Any] = {
        "batch_size": 4, "factor": 1.5, "shuffle_buffer": 3, "epochs": 2, "seed": 3, "rank": 1,
        "world_size": 2, "max_factor": 8.0, "max_bad_examples": 0, "num_workers": 1, "prefetch": 1,
    }  # fmt: skip
    plain = EchoLoader(Dataset(20), echo="example_before_augmentation", **numbers)
    scalars = {name: np.asarray(number)[()] for name, number in numbers.items()}
    loader = EchoLoader(Dataset(20), echo="example_before_augmentation", **scalars)
    for one, other in zip(islice(loader, 3), islice(plain, 3), strict=True):
        assert torch.equal(one["x"], other["x"])
    state = through_torch_save(loader.state_dict())
    plain.load_state_dict(state)
    assert {type(value) for value in state["settings"].values()} <= {int, float, str, bool, type(None)}
    loader.close()
    plain.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 1.5}, "seed=1.5: must be a whole number$"),
        ({"batch_size": np.float64(2)}, r"batch_size=.*: must be a whole number, at least 1"),
        ({"batch_size": True}, "batch_size=True"),
        ({"epochs": np.int64(0)}, "epochs=.*at least 1"),
    ],
)
def test_what_is_no_whole_number_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EchoLoader(**{"source": arrays(9), "batch_size": 3, **arguments})


def test_seeds_of_any_size_differ() -> None:
    seeds = (-1, -2, 1 << 63, (1 << 63) + 1, 0)
    orders = {tuple(next(iter(EchoLoader(np.arange(50), 50, seed=seed))).tolist()) for seed in seeds}
    assert len(orders) == len(seeds)


@pytest.mark.parametrize("make", [arrays, Dataset])
def test_a_state_of_a_source_of_another_length_is_refused(make: Any) -> None:
    loader = EchoLoader(make(20), 4, shuffle_buffer=5)
    list(islice(loader, 2))
    state = loader.state_dict()
    other = EchoLoader(make(24), 4, shuffle_buffer=5)
    expected = [batch["label"].tolist() for batch in islice(EchoLoader(make(24), 4, shuffle_buffer=5), 2)]
    assert next(iter(other))["label"].tolist() == expected[0]
    with pytest.raises(ValueError, match="source had 20 examples and has 24 examples now"):
        other.load_state_dict(state)
    assert next(iter(other))["label"].tolist() == expected[1]
    EchoLoader(make(20), 4, shuffle_buffer=5).load_state_dict(state)
