"""Augmentations of one argument, exact with any number of workers, and of two parts around an echo."""

import multiprocessing
import os
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.batch.augment import Functions
from tests.echo.global_augments import draw, draw_again, fail
from tests.echo.sources import Dataset, arrays


def times(one: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**one, "x": one["x"] * rng.random()}


def test_the_first_part_works_once_for_each_fresh_example() -> None:
    calls = {"once": 0, "each_time": 0}

    def counting(name: str) -> Any:
        def count(one: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:  # noqa: ARG001
            calls[name] += 1
            return one

        return count

    loader = EchoLoader(
        Dataset(40), 5, augment=(counting("once"), counting("each_time")), factor=4,
        echo="example_before_augmentation", shuffle_buffer=8, epochs=1,
    )  # fmt: skip
    batches = list(loader)
    assert len(batches) == 32
    assert calls == {"once": 40, "each_time": 160}


def test_parts_that_draw_from_the_global_generators_have_a_process_each() -> None:
    common: dict[str, Any] = {
        "augment": (draw, draw_again), "echo": "example_before_augmentation", "factor": 2,
        "shuffle_buffer": 7,
    }  # fmt: skip
    expected = list(islice(EchoLoader(Dataset(20), 6, **common), 8))
    with EchoLoader(Dataset(20), 6, num_workers=2, **common) as loader:
        for batch, other in zip(islice(loader, 8), expected, strict=True):
            assert torch.equal(batch["drawn"], other["drawn"])
            assert torch.equal(batch["drawn again"], other["drawn again"])
            assert not torch.equal(batch["drawn"], batch["drawn again"])


def test_the_parts_draw_independently() -> None:
    def draw_as(name: str) -> Any:
        return lambda one, rng: {**one, name: rng.random()}

    loader = EchoLoader(
        arrays(2000), 2000, augment=(draw_as("once"), draw_as("each_time")), factor=2,
        echo="example_before_augmentation",
    )  # fmt: skip
    batch = next(iter(loader))
    once, each_time = batch["once"].numpy(), batch["each_time"].numpy()  # [2000], an example's two in a row
    assert np.array_equal(once[::2], once[1::2])
    assert not np.isclose(each_time[::2], each_time[1::2]).any()
    assert abs(np.corrcoef(once, each_time)[0, 1]) < 0.1


def test_what_is_augmented_before_the_buffer_is_decoded_there() -> None:
    common: dict[str, Any] = {
        "augment": (times, times), "decode": dict, "factor": 2, "echo": "example_before_augmentation",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"place='encoded' with .*and augment=\(once, each_time\)"):
        EchoLoader(Dataset(9), 3, place="encoded", **common)
    settings = EchoLoader(Dataset(9), 3, shuffle_buffer=4, **common).settings
    assert Functions(dict, (times, times), None, None, settings, "auto").choose_place(None) == "decoded"


def test_the_same_for_any_number_of_workers_and_the_consumers_own_draws_are_left_alone() -> None:
    common: dict[str, Any] = {
        "echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 7, "augment": draw,
    }  # fmt: skip
    torch.manual_seed(1)
    own = torch.rand(8)
    torch.manual_seed(1)
    expected = list(islice(EchoLoader(Dataset(20), 6, **common), 8))
    drawn = []
    with EchoLoader(Dataset(20), 6, num_workers=2, **common) as loader:
        for batch, other in zip(islice(loader, 8), expected, strict=True):
            drawn.append(torch.rand(()))
            assert torch.equal(batch["drawn"], other["drawn"])
            assert torch.equal(batch["label"], other["label"])
            assert os.getpid() not in batch["pid"].tolist()
    assert torch.equal(torch.stack(drawn), own)
    assert multiprocessing.active_children() == []


def test_its_errors_reach_the_caller() -> None:
    with EchoLoader(Dataset(9), 3, num_workers=1, augment=fail, order="stored") as loader:
        assert next(iter(loader))["label"].tolist() == [0, 1, 2]
        with pytest.raises(KeyError, match="no five") as caught:
            next(iter(loader))
    assert "in fail" in caught.value.__notes__[-1]
    assert multiprocessing.active_children() == []
