"""Ranks make equally many steps, whatever the length of the source, the factor and what came before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from adaecho import EchoLoader
from tests.echo.sources import IDS, VARIANTS, Dataset, Stream, arrays, labels
from tests.forks import FORKS


def ranks(
    world: int, length: int, batch_size: int, make: Any = Dataset, **arguments: Any
) -> list[EchoLoader]:
    common: dict[str, Any] = {"epochs": 1, "world_size": world, **arguments}
    return [EchoLoader(make(length), batch_size, rank=rank, **common) for rank in range(world)]


def test_129_rows_for_two_ranks() -> None:
    for loader in ranks(2, 129, 16):
        assert len(loader) == 5
        assert [len(batch) for batch in labels(loader)] == [16, 16, 16, 16, 1]
        assert loader.fresh_examples == 65


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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_first_examples_of_a_pass_come_again_or_the_remainder_is_left_out(num_workers: int) -> None:
    common: dict[str, Any] = {"order": "stored", "num_workers": num_workers}
    first, second = ranks(2, 5, 2, **common)
    assert labels(first) == [[0, 2], [4]]
    assert labels(second) == [[1, 3], [0]]
    assert labels(first) == [[0, 2], [4]]
    assert labels(second) == [[1, 3], [0]]
    assert first.fresh_examples == second.fresh_examples == 6
    first, second = ranks(2, 5, 2, drop_last=True, **common)
    assert (labels(first), labels(second)) == ([[0, 2]], [[1, 3]])
    assert first.fresh_examples == second.fresh_examples == 2
    for loader in (first, second):
        loader.close()


def test_without_a_remainder_nothing_is_read_twice_or_left_out() -> None:
    for drop_last in (False, True):
        loaders = ranks(3, 12, 2, drop_last=drop_last, epochs=2)
        read = [label for loader in loaders for batch in labels(loader) for label in batch]
        assert sorted(read) == sorted([*range(12), *range(12)])


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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_short_batches_are_dropped_in_one_process(num_workers: int) -> None:
    for echo in ("none", "batch", "example_before_augmentation"):
        factor = 1 if echo == "none" else 2
        common: dict[str, Any] = {"echo": echo, "factor": factor, "epochs": 1, "num_workers": num_workers}
        with EchoLoader(arrays(31), 4, drop_last=True, **common) as loader:
            kept = labels(loader)
            assert len(kept) == {"none": 7, "batch": 14}.get(echo, 15)
            assert {len(batch) for batch in kept} == {4}
            assert loader.fresh_examples == 31
        with EchoLoader(arrays(31), 4, **common) as whole:
            assert kept == labels(whole)[: len(kept)]


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


def _loop(rank: int, folder: Path, echo: str, factor: float) -> None:
    """The README's loop, as one rank; how many steps it made goes to a file of the rank's."""
    init = f"file://{folder / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    dataset = TensorDataset(torch.randn(129, 3), torch.randint(10, (129,)))
    model = DistributedDataParallel(torch.nn.Linear(3, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = EchoLoader(dataset, batch_size=16, epochs=1, echo=echo, factor=factor, shuffle_buffer=32)
    steps = 0
    for _ in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    (folder / f"{rank}.steps").write_text(str(steps))


@pytest.mark.parametrize(
    ("echo", "factor"), [("none", 1.0), ("batch", 1.5), ("example_before_augmentation", 1.5)]
)
def test_the_readme_s_loop_ends_under_ddp(tmp_path: Path, echo: str, factor: float) -> None:
    running = [FORKS.Process(target=_loop, args=(rank, tmp_path, echo, factor)) for rank in range(2)]
    for process in running:
        process.start()
    try:
        for process in running:
            process.join(240)
    finally:
        for process in running:
            process.kill()
    assert [process.exitcode for process in running] == [0, 0]
    steps = [(tmp_path / f"{rank}.steps").read_text() for rank in range(2)]
    assert steps[0] == steps[1]
    assert int(steps[0]) >= 15
