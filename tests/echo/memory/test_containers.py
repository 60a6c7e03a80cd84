"""Batches whose list, dict or object is filled again are kept as they were; pictures stay their source's."""

import io
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
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


def test_what_decode_writes_into_a_picture_stays_out_of_the_source() -> None:
    photos = [{"image": Image.fromarray(np.full((8, 8, 3), row, np.uint8))} for row in range(8)]

    def decode(example: dict[str, Any]) -> Any:
        example["image"].thumbnail((4, 4))
        return np.asarray(example["image"])

    echo: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 8}
    for batch in EchoLoader(photos, 4, epochs=1, decode=decode, **echo):
        assert batch.shape == (4, 4, 4, 3)
    assert {photo["image"].size for photo in photos} == {(8, 8)}


KINDS: dict[str, tuple[Callable[[int], Any], Callable[[Any], int]]] = {
    "bytes": (lambda row: io.BytesIO(bytes([row])), lambda stream: int.from_bytes(stream.read())),
    "text": (lambda row: io.StringIO(str(row)), lambda stream: int(stream.read() or -1)),
    "set": (lambda row: {row}, lambda rows: rows.pop()),
    "deque": (lambda row: deque([row]), lambda rows: rows.popleft()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["decode", "augment"])
def test_what_is_changed_as_it_is_read_is_read_by_each_use(kind: str, stage: str) -> None:
    make, read = KINDS[kind]
    source = [{"row": make(row)} for row in range(8)]
    echo: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 8}
    functions: dict[str, Any] = {stage: lambda example, _=None: read(example["row"])}
    with EchoLoader(source, 4, epochs=1, **functions, **echo) as loader:
        for _ in range(2):
            found = Counter(row for batch in loader for row in batch.tolist())
            assert found == dict.fromkeys(range(8), 2)


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
