"""Batches whose list, dict or object is filled again are kept as they were."""

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from adaecho import EchoLoader

BATCHES, SIZE = 40, 4


def lists() -> Iterator[Any]:
    batch = list[str]()
    for number in range(BATCHES * SIZE):
        batch.append(str(number))
        if len(batch) == SIZE:
            yield batch
            batch.clear()


def nested() -> Iterator[Any]:
    batch = {"ids": [0] * SIZE}
    for number in range(BATCHES):
        batch["ids"][:] = range(number * SIZE, (number + 1) * SIZE)
        yield batch


def dicts() -> Iterator[Any]:
    batch = dict[str, torch.Tensor]()
    for number in range(BATCHES):
        batch["ids"] = torch.arange(number * SIZE, (number + 1) * SIZE)
        yield batch


def objects() -> Iterator[Any]:
    batch = SimpleNamespace()
    for number in range(BATCHES):
        batch.ids = torch.arange(number * SIZE, (number + 1) * SIZE)
        yield batch


def numbers(batch: Any) -> list[int]:
    values = batch if isinstance(batch, list) else batch["ids"] if isinstance(batch, dict) else batch.ids
    return [int(value) for value in values]


@pytest.mark.parametrize("source", [lists, nested, dicts, objects])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_a_batch_that_is_filled_again_is_kept_as_it_was(
    source: Callable[[], Iterator[Any]], options: dict[str, Any]
) -> None:
    echo: dict[str, Any] = {"echo": "batch", "factor": 2, "batch_shuffle_buffer": 8}
    with EchoLoader(source, None, epochs=1, batch_length=lambda _: SIZE, **echo, **options) as loader:
        found = Counter(number for batch in loader for number in numbers(batch))
    assert found == dict.fromkeys(range(BATCHES * SIZE), 2)


SOURCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda batches: batches,
    "iterated": lambda batches: lambda: iter(batches),
    "data_loader": lambda batches: DataLoader(batches, batch_size=None),
    "in_threads": lambda batches: batches,
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.filterwarnings("ignore:echo='batch' with factor=1")
def test_what_decode_writes_into_whole_batches_is_written_once(name: str, factor: int) -> None:
    """Also into those that are read again at a resume, and into what the source keeps for its next pass."""
    batches = [{"x": torch.full((2,), 255.0)} for _ in range(12)]

    def decode(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch["x"] /= 255
        return batch

    def make() -> EchoLoader:
        options: dict[str, Any] = {
            "echo": "batch",
            "factor": factor,
            "num_workers": int(name == "in_threads"),
        }
        return EchoLoader(SOURCES[name](batches), None, epochs=1, decode=decode, **options)

    with make() as loader:
        for _ in range(3):
            for taken, batch in enumerate(loader):
                assert batch["x"].tolist() == [1, 1]
                if taken % 4 == 0:
                    with make() as resumed:
                        resumed.load_state_dict(loader.state_dict())
                        rest = [batch["x"].tolist() for batch in resumed]
                    assert rest == [[1, 1]] * (12 * factor - 1 - taken)
