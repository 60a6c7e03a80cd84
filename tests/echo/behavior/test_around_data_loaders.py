"""EchoLoader around a DataLoader: resumes, random numbers, samplers, fingerprints."""

import itertools
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

from adaecho import EchoLoader
from adaecho.echo.read.sequential import fingerprint
from tests.echo.others import plain
from tests.helpers import through_torch_save

ROWS, PASSES = 40, 3
Loader = data.DataLoader[Any]


class RandomRows(data.Dataset[Any]):
    """Rows with a random number from each global generator."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, float, float, float]:
        return row, random.random(), float(np.random.rand()), float(torch.rand(()))


class RandomStream(data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        rows = list(range(ROWS))
        random.shuffle(rows)
        return iter(rows)


WEIGHTS = torch.arange(1.0, ROWS + 1)
LOADERS: dict[str, Callable[..., Loader]] = {
    "shuffle": lambda **more: data.DataLoader(RandomRows(), 8, shuffle=True, **more),
    "seeded": lambda: data.DataLoader(
        RandomRows(), 8, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "batch_sampler": lambda: data.DataLoader(
        RandomRows(), batch_sampler=data.BatchSampler(data.RandomSampler(range(ROWS)), 8, drop_last=False)
    ),
    "no collation": lambda: data.DataLoader(
        torch.arange(ROWS), None, sampler=data.BatchSampler(data.RandomSampler(range(ROWS)), 8, True)
    ),
    "distributed": lambda: data.DataLoader(
        RandomRows(), 8, sampler=data.DistributedSampler(RandomRows(), 1, 0)
    ),
    "stream": lambda: data.DataLoader(RandomStream(), 8),
}
WITH_WORKERS: dict[str, Callable[..., Loader]] = {
    "2 workers": lambda: LOADERS["shuffle"](num_workers=2, in_order=False),
    "2 persistent workers": lambda: LOADERS["shuffle"](num_workers=2, persistent_workers=True),
}


def wrapped(loader: Loader, **arguments: Any) -> EchoLoader:
    common: dict[str, Any] = {"epochs": 1, "echo": "batch", "factor": 2, "batch_shuffle_buffer": 3}
    return EchoLoader(loader, None, **{**common, **arguments})


def take(loader: EchoLoader, number: int) -> list[Any]:
    """Take a number of batches over several epochs."""
    batches: list[Any] = []
    while len(batches) < number:
        batches += map(plain, islice(loader, number - len(batches)))
    return batches


@pytest.mark.parametrize(
    ("kind", "epochs"), [*itertools.product(LOADERS, (None, 1)), *((kind, None) for kind in WITH_WORKERS)]
)
def test_a_resume_equals_the_uninterrupted_stream(kind: str, epochs: int | None) -> None:
    steps = PASSES * 2 * ROWS // 8
    stream, states = [], []
    data_loader = (LOADERS | WITH_WORKERS)[kind]()  # shared by all EchoLoaders, which must not change it
    own = data_loader.generator and data_loader.generator.get_state()
    with wrapped(data_loader, epochs=epochs) as loader:
        while len(stream) < steps:
            for batch in islice(loader, steps - len(stream)):
                stream.append(plain(batch))
                states.append(loader.state_dict())
    for position in range(1, steps, 13 if "workers" in kind else 3):
        # Workers start slowly, so compare fewer batches
        end = steps if kind in LOADERS else min(position + 3, steps)
        torch.manual_seed(position)
        with wrapped(data_loader, epochs=epochs) as restored:
            restored.load_state_dict(through_torch_save(states[position - 1]))
            if kind != "stream":
                assert restored.reread_examples <= (3 + 2) * 8  # the buffer, and the repeats of one batch
            assert take(restored, end - position) == stream[position:end]
    if data_loader.generator is not None:
        assert torch.equal(data_loader.generator.get_state(), own)


def test_contents_do_not_depend_on_the_number_of_workers() -> None:
    streams = []
    for num_workers in (0, 2):
        with EchoLoader(LOADERS["shuffle"](num_workers=num_workers), None, epochs=1, seed=1) as loader:
            streams.append(plain(list(loader)))
    assert streams[0] == streams[1]


def test_the_global_generators_and_the_data_loader_do_not_change() -> None:
    data_loader = LOADERS["shuffle"]()
    sampler = data_loader.sampler

    def drawn(between: int) -> list[Any]:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(1)
        with EchoLoader(data_loader, None, epochs=2) as loader:
            assert len(list(islice(loader, between))) == between
        return plain(list(data_loader))

    assert drawn(10) == drawn(0)
    assert data_loader.sampler is sampler


class Unseeded:
    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(random.Random().sample(range(ROWS), ROWS))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (4, r"the first \d batches of this DataLoader would differ.*`generator`"),
        (1, r"differs from the example in .*sampler draws random numbers without a seed"),
    ],
)
def test_an_unseeded_sampler_is_refused_at_a_resume(batches: int, message: str) -> None:
    loader, other = (
        wrapped(data.DataLoader(torch.arange(ROWS), 8, sampler=Unseeded()))  # type: ignore[arg-type]
        for _ in range(2)
    )
    list(islice(loader, batches))
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(loader.state_dict())


class RecordsEpochs(data.Dataset[int]):
    """A sampler, or rows that hold the epoch. Records the arguments of set_epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, number: int) -> None:
        self.epochs.append(number)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(range(ROWS))

    def __getitem__(self, row: int) -> int:
        return self.epochs[-1]


@pytest.mark.parametrize("within", [False, True])
def test_set_epoch_reaches_the_sampler(within: bool) -> None:
    sampler: Any = RecordsEpochs()
    parts = {"batch_sampler": data.BatchSampler(sampler, 8, False)} if within else {"sampler": sampler}
    loader = EchoLoader(data.DataLoader(range(ROWS), **parts), None, epochs=1)  # type: ignore[arg-type]
    for _ in range(2):
        list(loader)
    loader.set_epoch(7)
    next(iter(loader))
    assert list(dict.fromkeys(sampler.epochs)) == [0, 1, 7]


def test_set_epoch_reaches_datasets_in_persistent_workers() -> None:
    data_loader: Loader = data.DataLoader(RecordsEpochs(), ROWS // 2, num_workers=1, persistent_workers=True)
    with EchoLoader(data_loader, None, epochs=1) as loader:
        for number in range(3):
            assert plain(list(loader)) == [[number] * (ROWS // 2)] * 2


class Wrapping(data.Sampler[int]):
    """A user's sampler around another sampler."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        return iter(self.inner)


@pytest.mark.parametrize(
    "inner",
    [
        data.RandomSampler(range(ROWS), generator=torch.Generator()),
        data.DistributedSampler(RandomRows(), 1, 0),
    ],
    ids=["random", "distributed"],
)
def test_nested_samplers_resume_exactly(inner: Any) -> None:
    uninterrupted, stopped, resumed = (
        wrapped(data.DataLoader(range(ROWS), 8, sampler=Wrapping(inner)))  # type: ignore[arg-type]
        for _ in range(3)
    )
    first, second = (plain(list(uninterrupted)) for _ in range(2))
    assert first != second
    take(stopped, len(first))
    resumed.load_state_dict(through_torch_save(stopped.state_dict()))
    assert plain(list(resumed)) == second


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(9), torch.arange(9).flip(0)),
        (np.zeros((3, 4)), np.zeros((4, 3))),
        ([1, 2, 3], [1, 3, 2]),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (b"abc", b"abd"),
        ("text", "test"),
        (torch.zeros(3, dtype=torch.float32), torch.zeros(3, dtype=torch.float64)),
        (torch.ones(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)),
    ],
)
def test_a_fingerprint_depends_on_the_content(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one) < 1 << 56
