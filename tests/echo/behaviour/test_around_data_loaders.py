"""Around a DataLoader: whatever draws its order or contents, a resume continues the undisturbed stream."""

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
from adaecho.echo.read import data_loader as data_loader_module
from tests.echo.others import plain
from tests.helpers import through_torch_save

ROWS, PASSES = 40, 3
Loader = data.DataLoader[Any]


class Drawn(data.Dataset[Any]):
    """Rows with what they drew from each of the global generators."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, float, float, float]:
        return row, random.random(), float(np.random.rand()), float(torch.rand(()))


class DrawnStream(data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        rows = list(range(ROWS))
        random.shuffle(rows)
        return iter(rows)


WEIGHTS = torch.arange(1.0, ROWS + 1)
LOADERS: dict[str, Callable[..., Loader]] = {
    "shuffle": lambda **more: data.DataLoader(Drawn(), 8, shuffle=True, **more),
    "seeded": lambda: data.DataLoader(Drawn(), 8, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "weighted": lambda **more: data.DataLoader(
        Drawn(), 8, sampler=data.WeightedRandomSampler(WEIGHTS, ROWS), **more
    ),
    "subset": lambda: data.DataLoader(Drawn(), 8, sampler=data.SubsetRandomSampler(range(ROWS))),
    "batch_sampler": lambda **more: data.DataLoader(
        Drawn(), batch_sampler=data.BatchSampler(data.RandomSampler(range(ROWS)), 8, drop_last=False), **more
    ),
    "no collation": lambda: data.DataLoader(
        torch.arange(ROWS), None, sampler=data.BatchSampler(data.RandomSampler(range(ROWS)), 8, True)
    ),
    "distributed": lambda: data.DataLoader(Drawn(), 8, sampler=data.DistributedSampler(Drawn(), 1, 0)),
    "stream": lambda: data.DataLoader(DrawnStream(), 8),
}
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
WITH_WORKERS: dict[str, Callable[..., Loader]] = {
    "2 workers": lambda: LOADERS["shuffle"](num_workers=2),
    "2 workers out of order": lambda: LOADERS["shuffle"](num_workers=2, in_order=False),
    "2 workers, weighted": lambda: LOADERS["weighted"](num_workers=2),
    "2 persistent workers": lambda: LOADERS["shuffle"](**PERSISTENT),
    "2 persistent workers, batch_sampler": lambda: LOADERS["batch_sampler"](**PERSISTENT),
}


def wrapped(loader: Loader, **arguments: Any) -> EchoLoader:
    common: dict[str, Any] = {"epochs": 1, "echo": "batch", "factor": 2, "batch_shuffle_buffer": 3}
    return EchoLoader(loader, None, **{**common, **arguments})


def taken(loader: EchoLoader, number: int) -> list[Any]:
    """So many batches, over as many iterations as that takes."""
    batches: list[Any] = []
    while len(batches) < number:
        batches += map(plain, islice(loader, number - len(batches)))
    return batches


@pytest.mark.parametrize(
    ("kind", "epochs"), [*itertools.product(LOADERS, (None, 1)), *((kind, None) for kind in WITH_WORKERS)]
)
def test_a_resume_continues_the_undisturbed_stream(kind: str, epochs: int | None) -> None:
    steps = PASSES * 2 * ROWS // 8
    stream, states = [], []
    data_loader = (LOADERS | WITH_WORKERS)[kind]()  # one for all, which none of them may change
    own = data_loader.generator and data_loader.generator.get_state()
    with wrapped(data_loader, epochs=epochs) as loader:
        while len(stream) < steps:
            for batch in islice(loader, steps - len(stream)):
                stream.append(plain(batch))
                states.append(loader.state_dict())
    for position in range(1, steps, {"2 workers out of order": 13}.get(kind, 7 if "workers" in kind else 3)):
        # Workers are dear to start: so many batches tell as well whether it is the same stream.
        end = steps if kind in LOADERS else min(position + 3, steps)
        torch.manual_seed(position)
        with wrapped(data_loader, epochs=epochs) as restored:
            restored.load_state_dict(through_torch_save(states[position - 1]))
            if kind != "stream":
                assert restored.reread_examples <= (3 + 2) * 8  # what the buffer held, and the echoes of one
            assert taken(restored, end - position) == stream[position:end]
    if data_loader.generator is not None:
        assert torch.equal(data_loader.generator.get_state(), own)


@pytest.mark.parametrize(
    "sampler", [data.RandomSampler(range(ROWS)), data.WeightedRandomSampler(WEIGHTS, ROWS)]
)
def test_a_sampler_gives_the_same_rows_inside_a_data_loader_and_without(sampler: Any) -> None:
    inside = EchoLoader(data.DataLoader(range(ROWS), 8, sampler=sampler), None, seed=5, epochs=2)  # type: ignore[arg-type]
    without = EchoLoader(range(ROWS), 8, sampler=sampler, seed=5, epochs=2)
    assert [batch.tolist() for batch in inside] == [batch.tolist() for batch in without]
    assert sampler.generator is None


def test_contents_depend_on_no_number_of_workers() -> None:
    streams = []
    for num_workers in (0, 1, 2):
        with EchoLoader(LOADERS["shuffle"](num_workers=num_workers), None, epochs=1, seed=1) as loader:
            streams.append(plain(list(loader)))
    assert streams[0] == streams[1] == streams[2]


def test_the_global_generators_and_the_data_loader_stay_as_they_were() -> None:
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


class Lawless:
    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(random.Random().sample(range(ROWS), ROWS))


class Opaque:
    """Shows nothing that could be compared."""


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (4, r"the first \d batches of this DataLoader would differ.*`generator`"),
        # The oldest batch that is needed is the first of its pass.
        (1, r"differs from the example in .*sampler draws random numbers without a seed"),
    ],
)
@pytest.mark.parametrize("rows", [torch.arange(ROWS), [Opaque()] * ROWS], ids=["shown", "opaque"])
def test_a_sampler_that_no_seed_governs_is_refused_at_a_resume(rows: Any, batches: int, message: str) -> None:
    loader, other = (
        wrapped(data.DataLoader(rows, 8, sampler=Lawless(), collate_fn=list), batch_length=len)  # type: ignore[arg-type]
        for _ in range(2)
    )
    list(islice(loader, batches))
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(loader.state_dict())


def test_an_interrupt_while_a_data_loader_is_opened_first_does_not_break_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(dict[str, Any]):
        """The attributes of a copy that is not whole yet."""

        def update(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    loader, undisturbed = (EchoLoader(LOADERS["shuffle"](), None) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(data_loader_module, "vars", lambda _: Interrupted(), raising=False)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
    assert taken(loader, 10) == taken(undisturbed, 10)


class Told(data.Dataset[int]):
    """A sampler, or rows of the number of the pass; its copies share the list of those it was told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def set_epoch(self, number: int) -> None:
        self.told.append(number)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(range(ROWS))

    def __getitem__(self, row: int) -> int:
        return self.told[-1]


class OfItsOwnKind(data.DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


@pytest.mark.parametrize("kind", [data.DataLoader, OfItsOwnKind])
@pytest.mark.parametrize("within", [False, True])
def test_each_pass_is_told_to_the_sampler(kind: type[Loader], within: bool) -> None:
    sampler: Any = Told()
    parts = {"batch_sampler": data.BatchSampler(sampler, 8, False)} if within else {"sampler": sampler}
    loader = EchoLoader(kind(range(ROWS), **parts), None, epochs=1)  # type: ignore[arg-type]
    for _ in range(2):
        list(loader)
    loader.set_epoch(7)
    next(iter(loader))
    assert list(dict.fromkeys(sampler.told)) == [0, 1, 7]


def test_each_pass_is_told_to_copies_of_the_dataset_in_persistent_workers() -> None:
    data_loader: Loader = data.DataLoader(Told(), ROWS // 2, num_workers=1, persistent_workers=True)
    with EchoLoader(data_loader, None, epochs=1) as loader:
        for number in range(3):
            assert plain(list(loader)) == [[number] * (ROWS // 2)] * 2


class Counting(data.Sampler[int]):
    """One that counts its passes, and draws with NumPy's generator in the attribute that torch's use."""

    def __init__(self) -> None:
        self.passes, self.generator = 0, np.random.default_rng(0)

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(np.random.default_rng(self.passes).permutation(ROWS).tolist())


def test_a_sampler_that_counts_its_passes_goes_on_counting() -> None:
    sampler = Counting()
    loader = wrapped(data.DataLoader(range(ROWS), 8, sampler=sampler))  # type: ignore[arg-type]
    assert plain(list(loader)) != plain(list(loader))
    assert sampler.passes == 2


class Sized(data.Sampler[list[int]]):
    """A batch sampler whose batches may grow."""

    size = 4

    def __len__(self) -> int:
        return ROWS // self.size

    def __iter__(self) -> Any:
        return (list(range(row, row + self.size)) for row in range(0, len(self) * self.size, self.size))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_assigned_between_passes_holds_from_the_next_on(workers: int) -> None:
    weighted = data.WeightedRandomSampler([1.0] * ROWS, 16)
    data_loader: Loader = data.DataLoader(range(ROWS), 8, sampler=Around(weighted), num_workers=workers)
    loader = wrapped(data_loader)
    sized = Sized()
    growing = wrapped(data.DataLoader(range(ROWS), batch_sampler=sized))  # type: ignore[arg-type]
    assert len(set(np.concatenate(plain(list(loader))).tolist())) > 1
    assert len(list(growing)) == len(growing) == 2 * ROWS // 4
    weighted.weights = torch.eye(ROWS, dtype=torch.float64)[7]
    data_loader.collate_fn = lambda rows: torch.tensor(rows) + 1
    sized.size = 8
    assert set(np.concatenate(plain(list(loader))).tolist()) == {8}
    assert len(list(growing)) == len(growing) == 2 * ROWS // 8


@pytest.mark.parametrize("given", [list, np.array])
def test_a_list_of_rows_that_is_changed_holds_from_the_next_pass_on(given: Callable[[Any], Any]) -> None:
    rows = given([0, 1, 2, 3])
    loader = EchoLoader(data.DataLoader(torch.arange(8), 2, sampler=rows), None, epochs=1)
    assert list(map(plain, loader)) == [[0, 1], [2, 3]]
    rows[:] = [7, 6, 5, 4]
    assert list(map(plain, loader)) == [[7, 6], [5, 4]]


def test_a_list_of_batches_that_is_changed_holds_from_the_next_pass_on() -> None:
    batches = [[0, 1], [2, 3]]
    loader = EchoLoader(data.DataLoader(torch.arange(8), batch_sampler=batches), None, epochs=1)
    assert list(map(plain, loader)) == [[0, 1], [2, 3]]
    batches[:] = [[4, 5]]
    assert len(loader) == 1
    assert list(map(plain, loader)) == [[4, 5]]


class Grouped(data.BatchSampler):
    """Makes its batches to tell how many there are, and gives these once."""

    def __len__(self) -> int:
        self.made = list(super().__iter__())
        return len(self.made)

    def __iter__(self) -> Any:
        made = self.__dict__.pop("made", None)
        return iter(made or list(super().__iter__()))


def test_a_sampler_that_makes_its_batches_to_tell_their_number_follows_the_seed() -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        batches = Grouped(data.RandomSampler(range(ROWS)), 8, False)
        loader = wrapped(data.DataLoader(range(ROWS), batch_sampler=batches))  # type: ignore[arg-type]
        found.append((len(loader), plain(list(loader)), plain(list(loader))))
    assert found[0] == found[1]
    assert found[0][0] == 2 * ROWS // 8


class Around(data.Sampler[int]):
    """One of the user's own that passes on what another gives."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        return iter(self.inner)


@pytest.mark.parametrize(
    "inner",
    [data.RandomSampler(range(ROWS), generator=torch.Generator()), data.DistributedSampler(Drawn(), 1, 0)],
    ids=["random", "distributed"],
)
def test_samplers_within_others_are_keyed_and_told_the_pass(inner: Any) -> None:
    undisturbed, stopped, resumed = (
        wrapped(data.DataLoader(range(ROWS), 8, sampler=Around(inner)))  # type: ignore[arg-type]
        for _ in range(3)
    )
    first, second = (plain(list(undisturbed)) for _ in range(2))
    assert first != second
    taken(stopped, len(first))
    resumed.load_state_dict(through_torch_save(stopped.state_dict()))
    assert plain(list(resumed)) == second
