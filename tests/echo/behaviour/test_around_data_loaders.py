"""Around a DataLoader: whatever draws its order or contents, a resume continues the undisturbed stream."""

import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from adaecho import EchoLoader
from adaecho.echo.read.around import data_loader as data_loader_module
from tests.helpers import through_torch_save

ROWS, PASSES = 40, 3
Loader = DataLoader[Any]


class Drawn(Dataset[Any]):
    """Rows with what they drew from each of the global generators."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, float, float, float]:
        return row, random.random(), float(np.random.rand()), float(torch.rand(()))


class DrawnStream(IterableDataset[Any]):
    """Rows in an order drawn from a global generator."""

    def __iter__(self) -> Any:
        rows = list(range(ROWS))
        random.shuffle(rows)
        return iter(rows)


WEIGHTS = torch.arange(1.0, ROWS + 1)
LOADERS: dict[str, Callable[[], Loader]] = {
    "shuffle": lambda: DataLoader(Drawn(), 8, shuffle=True),
    "seeded": lambda: DataLoader(Drawn(), 8, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: DataLoader(Drawn(), 8, sampler=WeightedRandomSampler(WEIGHTS, ROWS)),
    "subset": lambda: DataLoader(Drawn(), 8, sampler=SubsetRandomSampler(range(ROWS))),
    "batch_sampler": lambda: DataLoader(
        Drawn(), batch_sampler=BatchSampler(RandomSampler(range(ROWS)), 8, drop_last=False)
    ),
    "no collation": lambda: DataLoader(
        torch.arange(ROWS), batch_size=None, sampler=BatchSampler(RandomSampler(range(ROWS)), 8, True)
    ),
    "distributed": lambda: DataLoader(Drawn(), 8, sampler=DistributedSampler(Drawn(), 1, 0)),
    "stream": lambda: DataLoader(DrawnStream(), 8),
    "2 workers": lambda: DataLoader(Drawn(), 8, shuffle=True, num_workers=2),
    "2 workers out of order": lambda: DataLoader(Drawn(), 8, shuffle=True, num_workers=2, in_order=False),
    "2 workers, weighted": lambda: DataLoader(
        Drawn(), 8, sampler=WeightedRandomSampler(WEIGHTS, ROWS), num_workers=2
    ),
    "2 persistent workers": lambda: DataLoader(
        Drawn(), 8, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "2 persistent workers, batch_sampler": lambda: DataLoader(
        Drawn(),
        batch_sampler=BatchSampler(RandomSampler(range(ROWS)), 8, drop_last=False),
        num_workers=2,
        persistent_workers=True,
    ),
}


def wrapped(loader: Loader, epochs: int | None = 1, **arguments: Any) -> EchoLoader:
    return EchoLoader(
        loader, batch_size=None, epochs=epochs, echo="batch", factor=2, batch_shuffle_buffer=3, **arguments
    )


def contents(batch: Any) -> list[Any]:
    return [part.tolist() for part in batch] if isinstance(batch, list) else [batch.tolist()]


def taken(loader: EchoLoader, number: int) -> list[Any]:
    """So many batches, over as many iterations as that takes."""
    batches: list[Any] = []
    while len(batches) < number:
        batches += map(contents, islice(loader, number - len(batches)))
    return batches


@pytest.mark.parametrize(
    ("kind", "epochs"),
    [(kind, None) for kind in LOADERS] + [(kind, 1) for kind in LOADERS if "workers" not in kind],
)
def test_a_resume_continues_the_undisturbed_stream(kind: str, epochs: int | None) -> None:
    steps = PASSES * 2 * ROWS // 8
    stream, states = [], []
    with wrapped(LOADERS[kind](), epochs) as loader:
        while len(stream) < steps:
            for batch in loader:
                stream.append(contents(batch))
                states.append(loader.state_dict())
                if len(stream) == steps:
                    break
    data_loader = LOADERS[kind]()  # one for all that follow, which none of them may change
    own = data_loader.generator and data_loader.generator.get_state()
    for position in range(1, steps, {"2 workers out of order": 13}.get(kind, 7 if "workers" in kind else 3)):
        # Workers are dear to start: so many batches tell as well whether it is the same stream.
        end = steps if data_loader.num_workers == 0 else min(position + 3, steps)
        torch.manual_seed(position)
        with wrapped(data_loader, epochs) as restored:
            restored.load_state_dict(through_torch_save(states[position - 1]))
            if kind != "stream":
                assert restored.reread_examples <= (3 + 2) * 8  # what the buffer held, and the echoes of one
            assert taken(restored, end - position) == stream[position:end]
    if data_loader.generator is not None:
        assert torch.equal(data_loader.generator.get_state(), own)


@pytest.mark.parametrize("sampler", [RandomSampler(range(ROWS)), WeightedRandomSampler(WEIGHTS, ROWS)])
def test_a_sampler_gives_the_same_rows_inside_a_data_loader_and_without(sampler: Any) -> None:
    inside = EchoLoader(DataLoader(range(ROWS), 8, sampler=sampler), None, seed=5, epochs=2)  # type: ignore[arg-type]
    without = EchoLoader(range(ROWS), 8, sampler=sampler, seed=5, epochs=2)
    assert [batch.tolist() for batch in inside] == [batch.tolist() for batch in without]
    assert sampler.generator is None


def test_contents_depend_on_no_number_of_workers() -> None:
    streams = []
    for num_workers in (0, 1, 2):
        data_loader: Loader = DataLoader(Drawn(), 8, shuffle=True, num_workers=num_workers)
        with EchoLoader(data_loader, None, epochs=1, seed=1) as loader:
            streams.append([contents(batch) for batch in loader])
    assert streams[0] == streams[1] == streams[2]


def test_the_global_generators_and_the_data_loader_stay_as_they_were() -> None:
    data_loader: Loader = DataLoader(Drawn(), 8, shuffle=True)
    sampler = data_loader.sampler
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    undisturbed = [contents(batch) for batch in data_loader]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    with EchoLoader(data_loader, None, epochs=2) as loader:
        assert len(list(loader)) == 10
    assert [contents(batch) for batch in data_loader] == undisturbed
    assert data_loader.sampler is sampler


class Opaque:
    """Shows nothing that could be compared."""


class Lawless:
    """A sampler that draws from a global generator."""

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        rows = list(range(ROWS))
        random.Random().shuffle(rows)
        return iter(rows)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (4, r"the first \d batches of this DataLoader would be others.*`generator`"),
        # The oldest batch that is needed is the first of its pass.
        (1, r"is another one than .*sampler draws from something that no seed"),
    ],
)
@pytest.mark.parametrize("shows", [False, True])
def test_a_sampler_that_no_seed_governs_is_refused_at_a_resume(
    shows: bool, batches: int, message: str
) -> None:
    def make() -> EchoLoader:
        rows = torch.arange(ROWS) if shows else [Opaque()] * ROWS
        return wrapped(DataLoader(rows, 8, sampler=Lawless(), collate_fn=list), batch_length=len)  # type: ignore[arg-type]

    loader = make()
    list(islice(loader, batches))
    with pytest.raises(ValueError, match=message):
        make().load_state_dict(loader.state_dict())


def test_an_interrupt_while_a_data_loader_is_opened_first_does_not_break_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(dict[str, Any]):
        """The attributes of a copy that is not whole yet."""

        def update(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    with EchoLoader(DataLoader(torch.arange(ROWS), 8, shuffle=True), None) as loader:  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(data_loader_module, "vars", lambda _: Interrupted(), raising=False)
            with pytest.raises(KeyboardInterrupt):
                next(iter(loader))
        rest = [batch.tolist() for batch in islice(loader, 10)]
    with EchoLoader(DataLoader(torch.arange(ROWS), 8, shuffle=True), None) as undisturbed:  # type: ignore[arg-type]
        assert rest == [batch.tolist() for batch in islice(undisturbed, 10)]


class Heard:
    """A sampler that remembers the passes it was told of, in a list that its copies share."""

    def __init__(self, told: list[int]) -> None:
        self.told = told

    def set_epoch(self, number: int) -> None:
        self.told.append(number)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(range(ROWS))


class OfItsOwnKind(DataLoader[Any]):
    """Overrides how it is iterated."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


@pytest.mark.parametrize("kind", [DataLoader, OfItsOwnKind])
@pytest.mark.parametrize("within", [False, True])
def test_each_pass_is_told_to_the_sampler(kind: type[Loader], within: bool) -> None:
    told: list[int] = []
    sampler: Any = Heard(told)
    parts = {"batch_sampler": BatchSampler(sampler, 8, False)} if within else {"sampler": sampler}
    loader = EchoLoader(kind(range(ROWS), **parts), None, epochs=1)  # type: ignore[arg-type]
    for _ in range(2):
        list(loader)
    loader.set_epoch(7)
    next(iter(loader))
    assert list(dict.fromkeys(told)) == [0, 1, 7]


class OfItsPass(Dataset[int]):
    number = 0

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> int:
        return self.number


def test_each_pass_is_told_to_copies_of_the_dataset_in_persistent_workers() -> None:
    data_loader: Loader = DataLoader(OfItsPass(), 4, num_workers=1, persistent_workers=True)
    with EchoLoader(data_loader, None, epochs=1) as loader:
        assert [[batch.tolist() for batch in loader] for _ in range(3)] == [[[n] * 4] * 2 for n in range(3)]


def test_a_distributed_sampler_draws_each_epoch_anew_as_in_a_loop_that_sets_it() -> None:
    sampler: Any = DistributedSampler(Drawn(), 2, 1)
    data_loader: Loader = DataLoader(range(ROWS), 5, sampler=sampler)  # type: ignore[arg-type]
    with EchoLoader(data_loader, None, epochs=1, rank=1, world_size=2) as loader:
        seen = [[batch.tolist() for batch in loader] for _ in range(2)]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert [batch.tolist() for batch in data_loader] == seen[epoch]
    assert seen[0] != seen[1]


class Counting(Sampler[int]):
    """One that counts its passes, and draws with NumPy's generator in the attribute that torch's use."""

    def __init__(self) -> None:
        self.passes, self.generator = 0, np.random.default_rng(0)

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(np.random.default_rng(self.passes).permutation(ROWS).tolist())


def test_a_sampler_that_counts_its_passes_goes_on_counting() -> None:
    sampler = Counting()
    loader = wrapped(DataLoader(range(ROWS), 8, sampler=sampler))  # type: ignore[arg-type]
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first != second
    assert sampler.passes == 0, "the given one stays as it was"


class Around(Sampler[int]):
    """One of the user's own that passes on what another gives."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        return iter(self.inner)


@pytest.mark.parametrize(
    "inner",
    [
        RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(3)),
        DistributedSampler(Drawn(), 1, 0),
    ],
)
def test_samplers_within_others_are_keyed_and_told_the_pass(inner: Any) -> None:
    def loader() -> EchoLoader:
        return wrapped(DataLoader(range(ROWS), 8, sampler=Around(inner)))  # type: ignore[arg-type]

    undisturbed, resumed = loader(), loader()
    first, second = ([batch.tolist() for batch in undisturbed] for _ in range(2))
    assert first != second
    stopped = loader()
    taken(stopped, len(first))
    resumed.load_state_dict(through_torch_save(stopped.state_dict()))
    assert [batch.tolist() for batch in resumed] == second
