"""Around a loader one already has, the automatic factor, sources of other kinds, wrong arguments."""

import random
import time
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from adaecho import EchoLoader
from adaecho.echo.order import keyed
from adaecho.echo.order.factor import AutoFactor
from adaecho.echo.variants import MAX_FACTOR
from tests.echo.sources import Dataset, arrays


def data_loader(length: int = 20) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(length), torch.zeros(length)), batch_size=4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_read_ahead_of_an_abandoned_pass_count_nothing(num_workers: int) -> None:
    common: dict[str, Any] = {"batch_size": None, "epochs": 1, "num_workers": num_workers}
    loader = EchoLoader(data_loader(20), echo="batch", factor=2, **common)
    next(iter(loader))
    assert loader.fresh_examples == 4
    assert len(list(loader)) == 10
    assert loader.fresh_examples == 24


class Slow(Dataset):
    def __getitem__(self, row: int) -> dict[str, Any]:
        time.sleep(0.002)
        return super().__getitem__(row)


@pytest.mark.parametrize("echo", ["batch", "example_before_augmentation"])
def test_the_automatic_factor_follows_a_slow_source(echo: str) -> None:
    def make() -> EchoLoader:
        return EchoLoader(
            Slow(50), 4, echo=echo, factor="auto", max_factor=3, shuffle_buffer=4, num_workers=1
        )

    with make() as loader:
        assert loader.factor == 1
        iterator = iter(loader)
        # No step at all downstream: R is far beyond the bound.
        for _ in range(400):
            next(iterator)
            if loader.factor == 3:
                break
        assert loader.factor == 3
        assert loader.R is not None
        assert loader.R > 1
        assert loader.factor_changes[-1][1] == 3
        state = loader.state_dict()
        expected = [next(iterator)["label"].tolist() for _ in range(4)]
    with make() as restored:
        restored.load_state_dict(state)
        assert restored.factor == 3
        level = "batches" if echo == "batch" else "examples"
        assert restored.factor_changes == [tuple(change) for change in state["factors"][level][1:]]
        assert [batch["label"].tolist() for batch in islice(restored, 4)] == expected


def test_the_automatic_factor_is_bounded_and_ignores_noise() -> None:
    loader = EchoLoader(arrays(9), 3, echo="example_before_augmentation", factor="auto")
    factor = loader._pipeline.streams.factor
    asked: list[float] = []
    factor.change = asked.append  # type: ignore[method-assign]
    auto = AutoFactor(max_factor=4)
    for ratio in (None, 0.3, 1.04, 2.5, 9.0):
        for _ in range(20):
            if auto.due():
                auto.follow(ratio, factor)
    assert asked == [2.5, 4]


def test_an_augment_of_one_argument_is_seeded_for_each_example_and_leaves_the_generators_alone() -> None:
    def augment(_: dict[str, Any]) -> dict[str, Any]:
        return {"x": torch.rand(()), "y": random.random(), "z": np.random.rand()}

    common: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "augment": augment}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = next(iter(EchoLoader(Dataset(9), 6, **common)))
    assert torch.equal(torch.get_rng_state(), before)
    other = next(iter(EchoLoader(Dataset(9), 6, **common)))
    assert torch.equal(one["x"], other["x"])
    assert len({*one["x"].tolist()}) == len({*one["y"].tolist()}) == len({*one["z"].tolist()}) == 6


def test_an_endless_loader_has_no_length() -> None:
    with pytest.raises(TypeError, match="needs epochs="):
        len(EchoLoader(arrays(9), 3))


def test_the_largest_factor_is_what_an_items_echo_index_can_count() -> None:
    assert MAX_FACTOR == keyed.MAX_ECHOES


@pytest.mark.parametrize("factor", [None, True, "2", 0.5, float("nan"), float("inf"), MAX_FACTOR, [2]])
def test_what_is_no_factor_is_refused_by_name(factor: Any) -> None:
    with pytest.raises(ValueError, match=r"^factor=.*: must be "):
        EchoLoader(arrays(20), 4, echo="batch", factor=factor)
