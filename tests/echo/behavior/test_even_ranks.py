"""Several ranks: the same number of steps on each rank, and a warning for unsharded batches."""

import warnings
from typing import Any

import pytest
import torch
from torch.utils import data

from adaecho import EchoLoader
from tests.echo.sources import IDS, VARIANTS, Dataset, Stream, arrays, labels


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("make", [Dataset, arrays])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_all_ranks_have_batches_of_the_same_sizes(variant: Any, make: Any, drop_last: bool) -> None:
    common: dict[str, Any] = {"epochs": 1, "shuffle_buffer": 3, "drop_last": drop_last, **variant}
    for world, length, batch_size in ((2, 29, 4), (3, 32, 5), (4, 7, 1)):
        loaders = [
            EchoLoader(make(length), batch_size, rank=rank, world_size=world, **common)
            for rank in range(world)
        ]
        for _ in range(3):  # a fractional factor differs between epochs
            expected = [len(loader) for loader in loaders]
            # Each rank has its own order of batches
            sizes = [sorted(len(batch) for batch in labels(loader)) for loader in loaders]
            assert sizes == [sizes[0]] * world
            assert expected == [len(sizes[0])] * world
            if drop_last:
                assert set(sizes[0]) <= {batch_size}


@pytest.mark.parametrize("factor", [1, 1.5, 2.25])
def test_all_ranks_have_as_many_batches_around_a_sharded_data_loader(factor: float) -> None:
    counts = []
    for rank in range(2):
        sampler: Any = data.DistributedSampler(range(129), num_replicas=2, rank=rank)  # type: ignore[arg-type]
        data_loader = data.DataLoader(range(129), batch_size=16, sampler=sampler)  # type: ignore[arg-type]
        common: dict[str, Any] = {"rank": rank, "world_size": 2, "factor": factor}
        loader = EchoLoader(data_loader, None, echo="batch", epochs=1, **common)
        counts.append([(len(loader), sum(1 for _ in loader)) for _ in range(3)])
    assert counts[0] == counts[1]
    assert all(announced == made for announced, made in counts[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": Stream(9)}, "epochs=1 with world_size=2: Stream is an iterable"),
        ({"echo": "batch", "factor": "auto"}, "factor='auto' with epochs=1 and world_size=2"),
        ({"max_bad_examples": 3}, "max_bad_examples=3 with epochs=1 and world_size=2"),
    ],
)
def test_settings_with_uneven_ranks_are_refused(arguments: Any, message: str) -> None:
    given: dict[str, Any] = {"source": Dataset(9), "batch_size": 2, "rank": 0, "world_size": 2, **arguments}
    with pytest.raises(ValueError, match=f"{message}.*islice"):
        EchoLoader(epochs=1, **given)
    EchoLoader(**given)


# Whole batches of a source that declares no sharding cause a warning

ROWS = 40
RANKS: dict[str, Any] = {"rank": 0, "world_size": 2}
ROWS_OF_ALL: Any = data.TensorDataset(torch.arange(ROWS))
BATCHES = list(torch.arange(ROWS).split(4))


def distributed(ranks: int) -> Any:
    return data.DistributedSampler(ROWS_OF_ALL, ranks, 0)


UNDECLARED: dict[str, Any] = {
    "shuffled": data.DataLoader(ROWS_OF_ALL, 4, shuffle=True),
    "sampler of one rank": data.DataLoader(ROWS_OF_ALL, 4, sampler=distributed(1)),
    "function": lambda: iter(BATCHES),
}
DECLARED: dict[str, Any] = {
    "sampler": data.DataLoader(ROWS_OF_ALL, 4, sampler=distributed(2)),
    "batch_sampler": data.DataLoader(
        ROWS_OF_ALL, batch_sampler=data.BatchSampler(distributed(2), 4, drop_last=False)
    ),
    "EchoLoader": EchoLoader(ROWS_OF_ALL, 4, epochs=1, **RANKS),
}


@pytest.mark.parametrize("source", UNDECLARED.values(), ids=UNDECLARED)
def test_batches_without_declared_sharding_warn(source: Any) -> None:
    message = r"each of 2 ranks reads all batches .*rank=0, world_size=1"
    with pytest.warns(UserWarning, match=message) as caught:
        next(iter(EchoLoader(source, None, **RANKS)))
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("kind", [*DECLARED, *UNDECLARED])
def test_batches_with_declared_sharding_do_not_warn(kind: str) -> None:
    ranks = RANKS if kind in DECLARED else {"rank": 0, "world_size": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(EchoLoader((DECLARED | UNDECLARED)[kind], None, **ranks)))
