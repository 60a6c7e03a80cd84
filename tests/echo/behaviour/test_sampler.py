"""A DataLoader's sampler as the order: drawn as a function of (seed, pass), resumed exactly."""

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
    "subset": lambda: data.SubsetRandomSampler(range(0, LENGTH, 2)),
    "list": lambda: [5, 3, 3, 1],
    "distributed": lambda: data.DistributedSampler(range(LENGTH), num_replicas=2, rank=1),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_it_decides_what_is_read_and_leaves_the_global_generator_alone(name: str, num_workers: int) -> None:
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
    if name in ("random", "subset"):
        assert sorted(rows) == list(range(0, LENGTH, 2 if name == "subset" else 1))


def test_ranks_share_out_what_it_draws() -> None:
    def drawn(rank: int, world_size: int) -> list[list[int]]:
        given: dict[str, Any] = {"sampler": SAMPLERS["weighted"](), "rank": rank, "world_size": world_size}
        return labels(EchoLoader(arrays(LENGTH), 1, epochs=1, **given))

    whole, *ranks = drawn(0, 1), drawn(0, 2), drawn(1, 2)
    assert [*whole, whole[0]] == [one for both in zip(*ranks, strict=True) for one in both]


class Given:
    """Gives these rows, or draws them from a global generator, and tells a length."""

    def __init__(self, length: int, rows: list[Any] | None) -> None:
        self.length, self.rows = length, rows

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(np.random.permutation(self.length).tolist() if self.rows is None else self.rows)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (Given(LENGTH, None), "sampler=Given: the sampler drew two orders for one pass.*generator"),
        (Given(3, [1, 2]), "sampler=Given: the sampler yielded 2 rows, but its length is 3"),
        (Given(2, [1, 23]), "sampler=Given: the sampler yielded row 23 for a source with 23 rows"),
        (Given(0, []), "sampler=Given: the sampler yields no rows"),
        (Given(2, [1.5, 2]), "sampler=Given: the sampler must yield rows, each an integer"),
        ("rows", "sampler=str: the sampler must yield rows"),
        (
            data.BatchSampler(data.SequentialSampler(range(9)), 3, False),
            r"for a BatchSampler pass its sampler, batch",
        ),
        (SAMPLERS["distributed"](), r"=DistributedSampler with world_size=2.*leave out the sampler"),
    ],
)
def test_one_that_can_not_be_resumed_or_is_wrong_is_refused(sampler: Any, message: str) -> None:
    ranks = {"rank": 1, "world_size": 2} if isinstance(sampler, data.DistributedSampler) else {}
    with pytest.raises(ValueError, match=message):
        EchoLoader(arrays(LENGTH), 4, sampler=sampler, **ranks)  # type: ignore[arg-type]


class Own(data.RandomSampler):
    """Of torch's with a generator, which it doesn't ask."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(LENGTH).tolist())


def test_one_that_has_a_generator_and_draws_from_the_global_one_is_refused() -> None:
    with pytest.raises(ValueError, match="the sampler drew two orders for one pass"):
        EchoLoader(Dataset(LENGTH), 4, sampler=Own(range(LENGTH)))


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
@pytest.mark.parametrize("echo", ["none", "example_before_augmentation"])
def test_a_state_goes_on_in_no_other_order_of_its_pass(kind: str, echo: str) -> None:
    def make(options: dict[str, Any]) -> EchoLoader:
        factor = 1 if echo == "none" else 2
        return EchoLoader(batch_size=5, epochs=1, echo=echo, factor=factor, shuffle_buffer=20, **options)

    first, (same, other) = make(ORDERS[kind][0]), ORDERS[kind]
    for batches in range(len(first) - 1):  # of the last ones all that remains lies in the buffer
        state = first.state_dict()
        if batches:
            with pytest.raises(ValueError, match="the order of this epoch differs from the saved"):
                make(other).load_state_dict(state)
        make(same).load_state_dict(state)
        labels(first, 1) if batches else next(iter(first))
    labels(first)
    make(other).load_state_dict(first.state_dict())  # between passes


@pytest.mark.parametrize("ranks", [(1, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("kind", ["shards", "sampler"])
def test_between_passes_there_may_be_other_ranks(kind: str, ranks: tuple[int, int]) -> None:
    first, other = (
        EchoLoader(batch_size=5, epochs=1, rank=0, world_size=number, **ORDERS[kind][0]) for number in ranks
    )
    for _ in range(3):
        labels(first)
        other.load_state_dict(first.state_dict())
        assert len(labels(other)) == len(other)
