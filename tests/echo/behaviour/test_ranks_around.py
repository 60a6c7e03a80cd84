"""Several ranks around another loader's batches: warned, unless it is declared who shares out."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

from adaecho import EchoLoader

ROWS = 40
RANKS: dict[str, Any] = {"rank": 0, "world_size": 2}
ROWS_OF_ALL: Any = TensorDataset(torch.arange(ROWS))
BATCHES = list(torch.arange(ROWS).split(4))


class OfRank(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(0, ROWS, 2))


def distributed(ranks: int) -> Any:
    return DistributedSampler(ROWS_OF_ALL, ranks, 0)


UNDECLARED: dict[str, Any] = {
    "shuffled": DataLoader(ROWS_OF_ALL, 4, shuffle=True),
    "a sampler of one rank": DataLoader(ROWS_OF_ALL, 4, sampler=distributed(1)),
    "a subset by rank": DataLoader(Subset(ROWS_OF_ALL, range(0, ROWS, 2)), 4),
    "rows by rank": DataLoader(range(ROWS)[0::2], 4),  # type: ignore[arg-type]
    "batches by rank": BATCHES[0::2],
    "a stream's part": DataLoader(OfRank(), 4),
    "a function": lambda: iter(BATCHES),
}
DECLARED: dict[str, Any] = {
    "sampler": DataLoader(ROWS_OF_ALL, 4, sampler=distributed(2)),
    "batch_sampler": DataLoader(ROWS_OF_ALL, batch_sampler=BatchSampler(distributed(2), 4, drop_last=False)),
    "an EchoLoader": EchoLoader(ROWS_OF_ALL, 4, epochs=1, **RANKS),
}


@pytest.mark.parametrize("source", UNDECLARED.values(), ids=UNDECLARED)
def test_batches_whose_part_nobody_declares_are_warned_of_once(source: Any) -> None:
    message = r"each of 2 ranks takes all batches .*rank=0, world_size=1"
    with pytest.warns(UserWarning, match=message) as caught:
        next(iter(EchoLoader(source, None, **RANKS)))
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("kind", [*DECLARED, *UNDECLARED])
def test_what_is_declared_is_not_warned_of(kind: str) -> None:
    ranks = RANKS if kind in DECLARED else {"rank": 0, "world_size": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(EchoLoader((DECLARED | UNDECLARED)[kind], None, **ranks)))
