"""Around a loader one already has, the automatic factor, sources of other kinds, wrong arguments."""

import time
from itertools import islice
from typing import Any

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
def test_wraps_a_data_loader(num_workers: int) -> None:
    with EchoLoader(
        data_loader(18), batch_size=None, echo="batch", factor=2, num_workers=num_workers
    ) as loader:
        firsts, counts = [], []
        for x, _ in islice(loader, 12):
            firsts.append(int(x[0]))
            counts.append(loader.fresh_examples)
            x.fill_(-1)  # the next repeat must not see it
    assert firsts == [0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 0, 0]
    assert counts == [4, 4, 8, 8, 12, 12, 16, 16, 18, 18, 22, 22]


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


def test_the_largest_factor_is_what_an_items_echo_index_can_count() -> None:
    assert MAX_FACTOR == 1 << keyed.ECHO_BITS
