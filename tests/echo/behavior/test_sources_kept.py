"""Sources: in-place changes, bad examples, and iterators that can be read once."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from adaecho import EchoLoader
from tests.echo.sources import VARIANTS, Bad, Dataset, Stream, labels


def add_in_place(example: Any, _: Any = None) -> Any:
    for part in example["x"] if isinstance(example["x"], list) else [example["x"]]:
        part += 1000
    example["new"] = 1
    return example


EXAMPLES: dict[str, Any] = {
    "ragged arrays": lambda row: {"x": np.full(row % 3 + 1, row), "label": row},
    "ragged tensors": lambda row: {"x": torch.full((row % 3 + 1,), row), "label": row},
    "nested": lambda row: {"x": [np.full(row % 3 + 1, row)], "label": "text"},
    "large": lambda row: {"x": np.full(20_000, row), "label": row},
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("source", [Dataset, Stream])
@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.parametrize(
    ("where", "variant"),
    [*(("augment", variant) for variant in (VARIANTS[2], VARIANTS[4], VARIANTS[7])), ("decode", VARIANTS[1])],
    ids=str,
)
def test_augment_and_decode_may_write_in_place(
    where: str, variant: dict[str, Any], kind: str, source: Any, num_workers: int
) -> None:
    dataset = source(12, EXAMPLES[kind])
    before = repr(dataset.examples)
    common: dict[str, Any] = {where: add_in_place, "collate": list, "shuffle_buffer": 4, **variant}
    with EchoLoader(dataset, 3, num_workers=num_workers, **common) as loader:
        for batch in islice(loader, 20):
            for one in batch:
                assert 1000 <= int(np.asarray(one["x"]).reshape(-1)[0]) < 1012
    assert repr(dataset.examples) == before


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("source", [Dataset, Stream])
def test_bad_examples_of_an_abandoned_epoch_do_not_count(source: Any, num_workers: int) -> None:
    common: dict[str, Any] = {"decode": Bad(*range(0, 90, 3)), "max_bad_examples": 31, "epochs": 1}
    with EchoLoader(
        source(90), 2, order="sequential", num_workers=num_workers, prefetch=8, **common
    ) as loader:
        for _ in range(20):
            assert labels(loader, 1) == [[1, 2]]
            assert [bad["origin"].split()[1] for bad in loader.bad_examples] <= ["0"]
            assert len(loader.bad_examples) <= 1
        assert len(list(loader)) == 30
        assert {bad["row"] for bad in loader.bad_examples} == set(range(0, 90, 3))
        assert len(loader.bad_examples) <= 31


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("source", [Dataset, Stream])
def test_a_bad_row_counts_once_in_all_epochs(source: Any, num_workers: int) -> None:
    common: dict[str, Any] = {"decode": Bad(0, 3, 6), "order": "sequential", "num_workers": num_workers}
    with EchoLoader(source(9), 2, max_bad_examples=3, **common) as loader:
        assert len(labels(loader, 40)) == 40
        assert [bad["row"] for bad in loader.bad_examples] == [0, 3, 6]
        assert loader.bad_examples[1]["origin"].startswith("example 3 ")
        assert loader.bad_examples[1]["error"] == "ValueError: cannot decode 3"
    with (
        EchoLoader(source(9), 2, max_bad_examples=2, **common) as loader,
        pytest.raises(ValueError, match="cannot decode 6") as caught,
    ):
        labels(loader, 10)
    assert "max_bad_examples=2" in caught.value.__notes__[0]


def numbers(length: int) -> Iterator[int]:
    yield from range(length)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "make",
    [lambda: numbers(20), lambda: map(int, range(20)), lambda: iter(DataLoader(torch.arange(10), None))],
    ids=["generator", "map", "DataLoader"],
)
def test_an_iterator_is_refused_at_a_resume(make: Any, num_workers: int) -> None:
    started = make()
    next(started)
    loader, other = (
        EchoLoader(source, 2, collate=list, num_workers=num_workers) for source in (make(), started)
    )
    with loader, other:
        next(iter(loader))
        state = loader.state_dict()
        with pytest.raises(ValueError, match=r"can be iterated (only )?once"):
            loader.load_state_dict(state)
        with pytest.raises(ValueError, match=r"is an iterator, which can be|differs from the example in"):
            other.load_state_dict(state)


class OwnIterator:
    """Its own iterator, which ``iter()`` restarts or leaves where it is."""

    def __init__(self, *, restarts: bool) -> None:
        self.restarts, self.left = restarts, iter(range(20))

    def __iter__(self) -> "OwnIterator":
        self.left = iter(range(20)) if self.restarts else self.left
        return self

    def __next__(self) -> int:
        return next(self.left)


@pytest.mark.parametrize("source", [OwnIterator(restarts=False), numbers(20), numbers(20).__iter__])
def test_an_abandoned_iterator_is_refused_in_the_next_epoch(source: Any) -> None:
    loader = EchoLoader(source, 2, epochs=1)
    next(iter(loader))
    with pytest.raises(ValueError, match="is an iterator"):
        next(iter(loader))


@pytest.mark.parametrize(
    "make",
    [lambda: numbers(20), lambda: OwnIterator(restarts=True), lambda: lambda: numbers(20)],
    ids=["generator", "its own iterator", "function"],
)
def test_an_iterable_that_restarts_is_resumed(make: Any) -> None:
    loader, resumed = (EchoLoader(make(), 2) for _ in range(2))
    iterator = iter(loader)
    next(iterator)
    resumed.load_state_dict(loader.state_dict())
    assert [one.tolist() for one in islice(resumed, 5)] == [one.tolist() for one in islice(iterator, 5)]
    started = EchoLoader(OwnIterator(restarts=True), 2, epochs=1)
    assert [len(list(started)) for _ in range(2)] == [10, 10]
