"""States for torch.distributed.checkpoint: flat, and loaded into a new loader."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from adaecho import EchoLoader
from tests.echo.others import plain, stateful_data_loader
from tests.echo.sources import Bad, Dataset, arrays

Given = dict[str, Any]


def of_arrays() -> Given:
    return {"source": arrays(60), "batch_size": 4, "epochs": 5}


def of_bad_examples() -> Given:
    return {"source": Dataset(60), "batch_size": 4, "decode": Bad(*range(0, 60, 7)), "max_bad_examples": 20}


def of_a_stateful_data_loader() -> Given:
    dataset = torch.utils.data.TensorDataset(torch.arange(60))
    return {"source": stateful_data_loader(dataset, 4, shuffle=True), "batch_size": None}


def of_all_ranks() -> Given:
    return {"source": arrays(60), "batch_size": 4, "state_of_all_ranks": True}


@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("taken", [0, 9])
@pytest.mark.parametrize("make", [of_arrays, of_bad_examples, of_a_stateful_data_loader, of_all_ranks])
def test_a_checkpoint_of_torch_resumes_a_new_loader(make: Any, taken: int, tmp_path: Path) -> None:
    """The names are those of a new loader, which torch asks for before it loads."""
    loader, restored = (EchoLoader(**make(), echo="batch", factor=2, batch_shuffle_buffer=3) for _ in "12")
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    state = loader.state_dict()
    assert all(isinstance(value, int | float | str | list) for value in state.values())
    numbers = [number for value in state.values() if isinstance(value, list) for number in value]
    assert {type(number) for number in numbers} <= {int, float}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it works in one process
        dcp.save({"loader": loader}, checkpoint_id=tmp_path)
        dcp.load({"loader": restored}, checkpoint_id=tmp_path)
    assert restored.bad_examples == loader.bad_examples
    for _, batch, again in zip(range(12), batches, restored, strict=False):
        assert plain(again) == plain(batch)
    assert restored.fresh_examples == loader.fresh_examples
