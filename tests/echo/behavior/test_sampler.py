"""Samplers: the order depends on seed and epoch, and resumes are exact."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

from adaecho import EchoLoader
from tests.echo.sources import Dataset, arrays, labels

LENGTH = 23
SAMPLERS: dict[str, Any] = {
    "weighted": lambda: data.WeightedRandomSampler([1.0 + row % 5 for row in range(LENGTH)], 17),
    "with replacement": lambda: data.RandomSampler(range(LENGTH), replacement=True, num_samples=30),
    "random": lambda: data.RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(3)),
    "list": lambda: [5, 3, 3, 1],
    "distributed": lambda: data.DistributedSampler(range(LENGTH), num_replicas=2, rank=1),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_sets_the_order_and_leaves_the_global_generator_alone(name: str, num_workers: int) -> None:
    torch.manual_seed(num_workers)
    before = torch.get_rng_state()
    sampler = SAMPLERS[name]()
    own = getattr(sampler, "generator", None)
    with EchoLoader(Dataset(LENGTH), 4, sampler=sampler, epochs=1, num_workers=num_workers) as loader:
        passes = [labels(loader) for _ in range(3)]
        assert [len(one) for one in passes] == [len(loader)] * 3
    again = EchoLoader(arrays(LENGTH), 4, sampler=SAMPLERS[name](), epochs=1)
    assert [labels(again) for _ in range(3)] == passes
    assert torch.equal(torch.get_rng_state(), before)
    assert getattr(sampler, "generator", None) is own
    rows = [label for batch in passes[0] for label in batch]
    assert len(rows) == len(sampler)
    if name == "list":
        assert passes == [[[5, 3, 3, 1]]] * 3
    else:
        assert passes[0] != passes[1] != passes[2]
    if name == "random":
        assert sorted(rows) == list(range(LENGTH))


class Yielding:
    """Yields these rows, or random rows without a seed, and has a length."""

    def __init__(self, length: int, rows: list[Any] | None) -> None:
        self.length, self.rows = length, rows

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(np.random.permutation(self.length).tolist() if self.rows is None else self.rows)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (Yielding(LENGTH, None), "sampler=Yielding: the sampler drew two orders for one pass.*generator"),
        (Yielding(3, [1, 2]), "sampler=Yielding: must yield as many rows as its length, 3"),
        (Yielding(2, [1, 23]), r"Yielding: .* each an integer in \[0, 23\)"),
        (
            data.BatchSampler(data.SequentialSampler(range(9)), 3, False),
            r"for a BatchSampler pass its sampler, batch",
        ),
        (SAMPLERS["distributed"](), r"=DistributedSampler with world_size=2.*leave out the sampler"),
    ],
)
def test_an_invalid_sampler_is_refused(sampler: Any, message: str) -> None:
    ranks = {"rank": 1, "world_size": 2} if isinstance(sampler, data.DistributedSampler) else {}
    with pytest.raises(ValueError, match=message):
        EchoLoader(arrays(LENGTH), 4, sampler=sampler, **ranks)  # type: ignore[arg-type]


class Sharded(Dataset):
    def __init__(self, lengths: list[int]) -> None:
        super().__init__(sum(lengths))
        self.shard_lengths = lengths


def sharded(lengths: list[int]) -> dict[str, Any]:
    return {"source": Sharded(lengths), "order": "shards"}


def sampled(rows: range) -> dict[str, Any]:
    return {"source": Dataset(40), "sampler": data.SubsetRandomSampler(rows)}


ORDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shards": (sharded([10] * 4), sharded([20] * 2)),
    "sampler": (sampled(range(15)), sampled(range(20, 35))),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_a_resume_with_another_order_is_refused(kind: str) -> None:
    def make(options: dict[str, Any]) -> EchoLoader:
        echo: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2}
        return EchoLoader(batch_size=5, epochs=1, shuffle_buffer=20, **echo, **options)

    first, (same, other) = make(ORDERS[kind][0]), ORDERS[kind]
    for batches in range(len(first) - 1):
        state = first.state_dict()
        if batches:
            with pytest.raises(ValueError, match="the order of this epoch differs from the saved"):
                make(other).load_state_dict(state)
        make(same).load_state_dict(state)
        labels(first, 1) if batches else next(iter(first))
    labels(first)
    make(other).load_state_dict(first.state_dict())  # between passes


@pytest.mark.parametrize("ranks", [(1, 2), (3, 1)])
@pytest.mark.parametrize("kind", ["shards", "sampler"])
def test_the_number_of_ranks_may_change_between_epochs(kind: str, ranks: tuple[int, int]) -> None:
    first, other = (
        EchoLoader(batch_size=5, epochs=1, rank=0, world_size=number, **ORDERS[kind][0]) for number in ranks
    )
    for _ in range(3):
        labels(first)
        other.load_state_dict(first.state_dict())
        assert len(labels(other)) == len(other)
