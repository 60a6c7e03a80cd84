"""What a loader leaves of its source: objects unchanged, errors raised and bad rows counted once."""

import io
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from adaecho import EchoLoader
from tests.echo.sources import IDS, SOURCES, VARIANTS, Bad, Dataset, Stream, labels


def spoil(example: Any, _: Any = None) -> Any:
    if isinstance(example, np.ndarray):
        example += 1000
        return example
    for part in example["x"] if isinstance(example["x"], list) else [example["x"]]:
        part += 1000
    example["new"] = 1
    return example


KEPT: dict[str, Any] = {
    "arrays": lambda row: {"x": np.array([row]), "label": row},
    "ragged arrays": lambda row: {"x": np.full(row % 3 + 1, row), "label": row},
    "ragged tensors": lambda row: {"x": torch.full((row % 3 + 1,), row), "label": row},
    "nested": lambda row: {"x": [np.full(row % 3 + 1, row)], "label": "text"},
    "large": lambda row: {"x": np.full(20_000, row), "label": row},
    "bare": lambda row: np.full(row % 3 + 1, row),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("source", [Dataset, Stream])
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize(
    ("where", "variant"),
    [*(("augment", variant) for variant in VARIANTS[1::3]), ("decode", VARIANTS[1])],
    ids=str,
)
def test_writing_in_place_changes_no_dataset(
    where: str, variant: dict[str, Any], kind: str, source: Any, num_workers: int
) -> None:
    dataset = source(12, KEPT[kind])
    before = repr(dataset.examples)
    common: dict[str, Any] = {where: spoil, "collate": list, "shuffle_buffer": 4, **variant}
    with EchoLoader(dataset, 3, num_workers=num_workers, **common) as loader:
        for batch in islice(loader, 20):
            for one in batch:
                x = one if isinstance(one, np.ndarray) else one["x"]
                assert 1000 <= int(np.asarray(x).reshape(-1)[0]) < 1012
    assert repr(dataset.examples) == before


class OneBuffer:
    """Map-style or iterable: every example lies in the same memory, and the next overwrites it."""

    def __init__(self, *, in_a_view: bool) -> None:
        self._buffer, self._in_a_view = np.zeros(3, dtype=np.int64), in_a_view
        self._example = {"x": self._buffer}

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> Any:
        self._buffer[:] = row
        if not self._in_a_view:
            return self._example
        view = self._buffer[: row % 2 + 1]
        view.flags.writeable = False
        return {"x": view}


@pytest.mark.parametrize("in_a_view", [False, True])
@pytest.mark.parametrize("iterated", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_may_give_the_same_object_each_time(
    num_workers: int, iterated: bool, in_a_view: bool
) -> None:
    dataset = OneBuffer(in_a_view=in_a_view)
    source: Any = (lambda: map(dataset.__getitem__, range(12))) if iterated else dataset
    common: dict[str, Any] = {"order": "stored", "shuffle_buffer": 5, "collate": list, "epochs": 1}
    with EchoLoader(source, 4, num_workers=num_workers, **common) as loader:
        assert sorted(int(one["x"][0]) for batch in loader for one in batch) == list(range(12))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("source", [Dataset, Stream])
def test_bad_examples_of_a_pass_given_up_do_not_count(source: Any, num_workers: int) -> None:
    common: dict[str, Any] = {"decode": Bad(*range(0, 90, 3)), "max_bad_examples": 31, "epochs": 1}
    with EchoLoader(source(90), 2, order="stored", num_workers=num_workers, prefetch=8, **common) as loader:
        for _ in range(20):
            assert labels(loader, 1) == [[1, 2]]
            assert [bad["origin"].split()[1] for bad in loader.bad_examples] <= ["0"]
            assert len(loader.bad_examples) <= 1
        assert len(list(loader)) == 30
        assert {bad["row"] for bad in loader.bad_examples} == set(range(0, 90, 3))
        assert len(loader.bad_examples) <= 31


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("source", [Dataset, Stream])
def test_a_bad_row_counts_once_however_many_passes(source: Any, num_workers: int) -> None:
    common: dict[str, Any] = {"decode": Bad(0, 3, 6), "order": "stored", "num_workers": num_workers}
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
    [lambda: numbers(20), lambda: map(int, range(20)), lambda: io.StringIO("1\n2\n3\n4\n5\n6\n7\n8\n9\n"),
     lambda: iter(DataLoader(torch.arange(10), batch_size=None))],
    ids=["generator", "map", "file", "of a DataLoader"],
)  # fmt: skip
def test_an_iterator_is_never_resumed_silently(make: Any, num_workers: int) -> None:
    begun = make()
    next(begun)
    loader, other = (
        EchoLoader(source, 2, collate=list, num_workers=num_workers) for source in (make(), begun)
    )
    with loader, other:
        next(iter(loader))
        state = loader.state_dict()
        with pytest.raises(ValueError, match=r"can be iterated (only )?once"):
            loader.load_state_dict(state)
        with pytest.raises(ValueError, match=r"is an iterator, which can be|differs from the example in"):
            other.load_state_dict(state)


class Begun:
    """Its own iterator, which begins anew with every iter() or goes on where it was."""

    def __init__(self, *, anew: bool) -> None:
        self.anew, self.left = anew, iter(range(20))

    def __iter__(self) -> "Begun":
        self.left = iter(range(20)) if self.anew else self.left
        return self

    def __next__(self) -> int:
        return next(self.left)


@pytest.mark.parametrize("source", [Begun(anew=False), numbers(20), numbers(20).__iter__])
def test_an_iterator_left_in_the_middle_of_a_pass_is_not_taken_for_begun_anew(source: Any) -> None:
    loader = EchoLoader(source, 2, epochs=1)
    next(iter(loader))
    with pytest.raises(ValueError, match="is an iterator"):
        next(iter(loader))


@pytest.mark.parametrize(
    "make",
    [lambda: numbers(20), lambda: Begun(anew=True), lambda: lambda: numbers(20)],
    ids=["generator", "its own iterator", "function"],
)
def test_what_is_sure_to_begin_anew_is_resumed(make: Any) -> None:
    loader, resumed = (EchoLoader(make(), 2) for _ in range(2))
    iterator = iter(loader)
    next(iterator)
    resumed.load_state_dict(loader.state_dict())
    assert [one.tolist() for one in islice(resumed, 5)] == [one.tolist() for one in islice(iterator, 5)]
    begun = EchoLoader(Begun(anew=True), 2, epochs=1)
    assert [len(list(begun)) for _ in range(2)] == [10, 10], "after its end it may begin anew"


class Together(Dataset):
    """Reads many rows at once, in one of several wrong ways."""

    def __init__(self, how: str) -> None:
        super().__init__(12)
        self.how, self.asked = how, list[list[int]]()

    def __getitems__(self, rows: list[int]) -> list[Any]:
        self.asked.append(rows)
        if self.how == "out of range":
            raise IndexError("out of range of a cache")
        found = [self[row] for row in rows]
        return {"short": found[:-1], "long": [*found, found[0]]}.get(self.how, found)

    def __getitem__(self, row: int) -> Any:
        if self.how == "one is bad" and row == 1:
            raise IndexError("row 1 is missing")
        return super().__getitem__(row)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_read_together_must_be_what_was_asked_for(num_workers: int) -> None:
    common: dict[str, Any] = {"order": "stored", "num_workers": num_workers}
    for how, budget, error, message in (
        ("short", 12, ValueError, r"Together.__getitems__ returned \d+ examples for \d+ rows"),
        ("long", 12, ValueError, r"Together.__getitems__ returned \d+ examples for \d+ rows"),
        ("one is bad", 0, IndexError, "row 1 is missing"),
    ):
        loader = EchoLoader(Together(how), 4, max_bad_examples=budget, **common)
        with loader, pytest.raises(error, match=message):
            next(iter(loader))
    with EchoLoader(Together("out of range"), 4, **common) as loader:
        assert labels(loader, 1) == [[0, 1, 2, 3]], "one by one then"
    with EchoLoader(Together("one is bad"), 4, max_bad_examples=1, **common) as loader:
        assert labels(loader, 1) == [[0, 2, 3, 4]]
        assert num_workers or loader.dataset.asked == [[0, 1, 2, 3], [4]]
        assert [bad["row"] for bad in loader.bad_examples] == [1]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_writing_into_a_batch_changes_no_repeat(variant: dict[str, Any], kind: str, num_workers: int) -> None:
    make, augment, _, extra = SOURCES[kind]
    common: dict[str, Any] = {"shuffle_buffer": 4, **variant, **extra, "num_workers": num_workers}
    common["augment"] = augment if kind == "ragged" else None
    for collate in (None, lambda examples: dict(examples[0])):
        loaders = (EchoLoader(make(8), 3, collate=collate, **common) for _ in range(2))
        with next(loaders) as clean, next(loaders) as written:
            for one, other in zip(islice(clean, 20), written, strict=False):
                assert np.array_equal(one["x"], other["x"])
                other["x"][...] = -1
