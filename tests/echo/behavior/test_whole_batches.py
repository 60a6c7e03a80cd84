"""Sources of whole batches (``batch_size=None``): counts, states, and copies."""

from collections import Counter, OrderedDict, UserDict
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.batch.device import batch_length
from tests.helpers import through_torch_save

RAGGED = [torch.zeros(10 + row, 12, 3) for row in range(8)]
BATCHES: dict[str, Any] = {
    "tensor": torch.zeros(8, 5),
    "detection": (tuple(RAGGED), tuple({"boxes": torch.zeros(row, 4)} for row in range(8))),
    "dicts": [{"image": torch.zeros(3, 4, 4), "label": row} for row in range(8)],
    "UserDict": UserDict(input_ids=torch.zeros(8, 5), labels=torch.zeros(8)),
    "scalar first": {"epoch": 3, "x": torch.zeros(8, 5)},
    "0-d first": OrderedDict(loss=torch.zeros(()), x=np.zeros((8, 5))),
    "text first": ("train", torch.zeros(8, 5)),
    "default collate": [torch.zeros(8, 5), torch.zeros(8)],
    "two views": [[torch.zeros(8, 5), torch.zeros(8, 5)], torch.zeros(8)],
    "ragged": RAGGED,
    "nested": {"inputs": {"ids": torch.zeros(8, 5)}, "weights": None},
    "words": {"text": ["word"] * 8, "set": "train"},
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batch_length_counts_the_examples(kind: str) -> None:
    assert batch_length(BATCHES[kind]) == 8
    loader = EchoLoader([BATCHES[kind]] * 3, None, epochs=1)
    next(iter(loader))
    assert loader.fresh_examples == 8


@pytest.mark.parametrize("batch", ["text", {"epoch": 3}, torch.zeros(())])
def test_a_batch_without_a_visible_length_needs_batch_length(batch: Any) -> None:
    with pytest.raises(ValueError, match="pass batch_length="):
        next(iter(EchoLoader([batch], None)))
    loader = EchoLoader([batch], None, batch_length=lambda given: 7 if given is not None else 0)
    list(islice(loader, 2))
    assert loader.fresh_examples == 14


def batches(number: int) -> list[torch.Tensor]:
    return [torch.arange(8) + 100 * index for index in range(number)]


def test_examples_of_buffered_batches_are_counted_after_a_resume() -> None:
    def make(state: Any = None) -> EchoLoader:
        loader = EchoLoader(batches(9).__iter__, None, echo="batch", factor=3, batch_shuffle_buffer=4, seed=1)
        if state is not None:
            loader.load_state_dict(through_torch_save(state))
        return loader

    loader = make()
    iterator = iter(loader)
    for _ in range(12):
        next(iterator)
        held = loader.fresh_examples_in_buffer
        assert held % 8 == 0
        assert 8 <= held <= 4 * 8
        restored = make(loader.state_dict())
        assert restored.fresh_examples_in_buffer == held
        next(iter(restored))
        assert make(restored.state_dict()).fresh_examples_in_buffer == restored.fresh_examples_in_buffer
    whole = EchoLoader(batches(9), None, echo="batch", factor=3)
    next(iter(whole))
    assert whole.fresh_examples_in_buffer == 8


@pytest.mark.parametrize("echo", [{}, {"echo": "batch", "factor": 2}], ids=["none", "batch"])
def test_a_consumer_may_write_into_batches(echo: dict[str, Any]) -> None:
    source = batches(3)
    loader, restored = (EchoLoader(source, None, epochs=1, **echo) for _ in range(2))
    for batch in loader:
        assert int(batch.min()) >= 0
        batch.fill_(-1)
        restored.load_state_dict(loader.state_dict())
        for other in restored:
            other.fill_(-2)
    assert torch.equal(torch.stack(source), torch.stack(batches(3)))


def test_a_resume_after_a_bad_batch() -> None:
    def decode(row: int) -> torch.Tensor:
        return torch.full((4,), 12 // (row - 1))

    loader, restored = (
        EchoLoader(range(6), None, decode=decode, echo="batch", factor=2, max_bad_examples=1, shuffle=False)
        for _ in range(2)
    )
    assert [int(batch[0]) for batch in islice(loader, 3)] == [-12, -12, 12]
    restored.load_state_dict(loader.state_dict())
    assert [int(batch[0]) for batch in islice(restored, 3)] == [12, 6, 6]


def reused_tensor() -> Iterator[Any]:
    batch = {"x": torch.zeros(4)}
    for number in range(24):
        batch["x"].fill_(number)
        yield batch


def reused_list() -> Iterator[Any]:
    batch = [0] * 4
    for number in range(24):
        batch[:] = [number] * 4
        yield {"x": batch}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("source", [reused_tensor, reused_list])
def test_a_source_may_overwrite_the_batch_that_it_yielded(source: Any, num_workers: int) -> None:
    given: dict[str, Any] = {"echo": "batch", "factor": 2, "batch_shuffle_buffer": 5, "epochs": 1}
    with EchoLoader(source, None, num_workers=num_workers, batch_length=lambda _: 4, **given) as loader:
        found = Counter(float(batch["x"][0]) for batch in loader)
    assert found == Counter(dict.fromkeys(range(24), 2))
