"""Ranks make equally many steps, whatever the length of the source, the factor and what came before."""

from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from adaecho import EchoLoader
from tests.echo.sources import IDS, VARIANTS, Dataset, Stream, arrays, labels


def ranks(
    world: int, length: int, batch_size: int, make: Any = Dataset, **arguments: Any
) -> list[EchoLoader]:
    common: dict[str, Any] = {"epochs": 1, "world_size": world, **arguments}
    return [EchoLoader(make(length), batch_size, rank=rank, **common) for rank in range(world)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("make", [Dataset, arrays])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_every_rank_makes_as_many_batches_of_the_same_sizes(
    variant: dict[str, Any], make: Any, drop_last: bool
) -> None:
    for world, length, batch_size in ((2, 29, 4), (3, 32, 5), (4, 7, 1)):
        arguments = {**variant, "shuffle_buffer": 3, "drop_last": drop_last}
        loaders = ranks(world, length, batch_size, make, **arguments)
        for _ in range(3):  # the draws of a fractional factor differ from pass to pass
            expected = [len(loader) for loader in loaders]
            # In what order a buffer of batches lets them go is each rank's own.
            sizes = [sorted(len(batch) for batch in labels(loader)) for loader in loaders]
            assert sizes == [sizes[0]] * world
            assert expected == [len(sizes[0])] * world
            if drop_last:
                assert set(sizes[0]) <= {batch_size}


@pytest.mark.parametrize("variant", [{"echo": "none"}, *VARIANTS[3:]], ids=str)
def test_the_length_is_true_before_during_and_after_a_pass_that_was_broken_off(
    variant: dict[str, Any],
) -> None:
    for loader in ranks(2, 31, 4, **variant):
        for _ in range(3):
            for number, _ in enumerate(loader):
                before = len(loader)
                if number == 3:
                    break
            del number
            announced = len(loader)
            assert announced == len(labels(loader))
            assert before > 3


@pytest.mark.parametrize("factor", [1, 1.5, 2.25])
def test_around_data_loaders_whose_sampler_shares_out(factor: float) -> None:
    counts: list[list[tuple[int, int]]] = []
    for rank in range(2):
        sampler: Any = DistributedSampler(range(129), num_replicas=2, rank=rank)  # type: ignore[arg-type]
        data_loader = DataLoader(range(129), batch_size=16, sampler=sampler)  # type: ignore[arg-type]
        loader = EchoLoader(
            data_loader, batch_size=None, echo="batch", factor=factor, epochs=1, rank=rank, world_size=2
        )
        counts.append([])
        for epoch in range(3):
            sampler.set_epoch(epoch)
            counts[-1].append((len(loader), sum(1 for _ in loader)))
    assert counts[0] == counts[1]
    assert all(announced == made for announced, made in counts[0])


def test_the_length_within_a_pass_is_that_pass_s() -> None:
    loader = EchoLoader(Dataset(50), 4, echo="batch", factor=2.4, epochs=1)
    for _ in range(4):
        within = [len(loader) for _ in loader]
        assert set(within) == {len(within)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": Stream(9)}, "epochs=1 with world_size=2: Stream can only be iterated"),
        ({"echo": "batch", "factor": "auto"}, "factor='auto' with epochs=1 and world_size=2"),
        ({"max_bad_examples": 3}, "max_bad_examples=3 with epochs=1 and world_size=2"),
    ],
)
def test_what_would_make_ranks_wait_for_each_other_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"source": Dataset(9), "batch_size": 2, "rank": 0, "world_size": 2, **arguments}
    with pytest.raises(ValueError, match=f"{message}.*islice"):
        EchoLoader(epochs=1, **given)
    EchoLoader(**given)
