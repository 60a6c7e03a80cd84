"""An ``augment`` of one argument draws from the global generators: exact with any number of workers."""

import multiprocessing
import os
from itertools import islice
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from tests.echo.global_augments import die, draw, fail
from tests.echo.sources import Dataset


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
    with (
        EchoLoader(Dataset(9), 3, num_workers=1, augment=die) as loader,
        pytest.raises(RuntimeError, match="ended with exit code 3"),
    ):
        next(iter(loader))
    assert multiprocessing.active_children() == []
