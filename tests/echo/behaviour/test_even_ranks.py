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
