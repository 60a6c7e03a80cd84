"""What a user wrote works in processes unless it says that it is thread-safe; its draws depend on neither."""

import os
import random
import threading
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from adaecho import EchoLoader
from adaecho.echo.order.keyed import global_generators_kept
from adaecho.echo.read import rows
from tests.echo.others import plain
from tests.echo.sources import IDS, VARIANTS, AddNoise, add_noise, arrays

RECORD = 64


class LazyFile(Dataset[Any]):
    """The common way to read records of a file; slow enough that threads would come between seek and read."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __len__(self) -> int:
        return 200

    def __getitem__(self, row: int) -> Any:
        if self.file is None:
            self.file: Any = open(self.path, "rb")  # noqa: SIM115
        self.file.seek(row * RECORD)
        time.sleep(0.0005)
        return np.frombuffer(self.file.read(RECORD), dtype=np.int64).copy()

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()


@pytest.fixture
def records(tmp_path: Path) -> Path:
    np.repeat(np.arange(200), RECORD // 8).tofile(tmp_path / "records")
    return tmp_path / "records"


@pytest.mark.parametrize("wrap", ["plain", "subset", "concat", "stack"])
@pytest.mark.parametrize("num_workers", [0, 2, 4])
def test_a_lazily_opened_file_is_read_right(records: Path, wrap: str, num_workers: int) -> None:
    lazy = LazyFile(records)
    dataset: Any = {
        "plain": lambda: lazy,
        "subset": lambda: Subset(lazy, range(200)),
        "concat": lambda: ConcatDataset([Subset(lazy, range(100)), Subset(lazy, range(100, 200))]),
        "stack": lambda: StackDataset(x=lazy, label=list(range(200))),
    }[wrap]()
    with EchoLoader(dataset, 8, order="stored", epochs=1, num_workers=num_workers) as loader:
        found = torch.cat([batch["x"] if wrap == "stack" else batch for batch in loader])
    assert found.tolist() == [[row] * (RECORD // 8) for row in range(200)]
    assert num_workers == 0 or lazy.file is None


class Where(Dataset[Any]):
    """Tells process and thread."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, row: int) -> Any:
        time.sleep(0.001)
        return os.getpid(), threading.get_ident()


class Safe(Where):
    thread_safe = True


def same(example: Any, rng: Any) -> Any:  # noqa: ARG001
    return example


@pytest.mark.parametrize(
    ("source", "more", "processes"),
    [
        (Where(), {}, True), (Safe(), {}, False), (Safe(), {"augment": same}, True),
        (Safe(), {"decode": tuple}, True), (Safe(), {"processes": True}, True),
        (arrays(200), {"augment": AddNoise()}, False), (arrays(200), {"augment": same}, True),
        (arrays(200), {"augment": add_noise}, False),
    ],
)  # fmt: skip
def test_only_what_says_that_it_is_thread_safe_is_called_by_threads(
    source: Any, more: dict[str, Any], processes: bool
) -> None:
    with EchoLoader(source, 8, epochs=1, num_workers=2, **more) as loader:
        assert loader.processes == processes
        found = list(loader)
    if isinstance(source, Where):
        ids = {int(one) for batch in found for one in batch[0]}
        assert (os.getpid() not in ids) == processes
        assert len(ids) == (2 if processes else 1)


def test_what_is_thread_safe() -> None:
    safe, other, tensors = Safe(), Where(), TensorDataset(torch.arange(3))
    for shared in ([1], (1,), range(3), safe, Subset(safe, [0]), tensors, ConcatDataset([safe, tensors])):
        assert rows.is_thread_safe(shared)
    for alone in (other, Subset(other, [0]), ConcatDataset([safe, other]), StackDataset(a=safe, b=other)):
        assert not rows.is_thread_safe(alone)


def noisy(row: int) -> Any:
    return np.array([row, random.random(), np.random.rand(), float(torch.rand(()))])


def noisy_but_for_two(row: int) -> Any:
    if row == 2:
        raise ValueError("row 2 is damaged")
    return noisy(row)


class Transformed(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        return self.transform(row)


@pytest.mark.filterwarnings("ignore:source. Transformed draws")
@pytest.mark.parametrize("variant", VARIANTS[2:5:2], ids=IDS[2:5:2])
def test_what_a_dataset_draws_depends_on_no_worker_and_no_resume(variant: dict[str, Any]) -> None:
    found = []
    for num_workers in (0, 2, 3):
        with EchoLoader(
            Transformed(noisy_but_for_two), 4, num_workers=num_workers, shuffle_buffer=8, seed=3,
            max_bad_examples=1, **variant,
        ) as loader:  # fmt: skip
            iterator = iter(loader)
            first = plain(list(islice(iterator, 5)))
            state = loader.state_dict()
            rest = plain(list(islice(iterator, 30)))
            loader.load_state_dict(state)
            assert plain(list(islice(loader, 30))) == rest
            assert [bad["row"] for bad in loader.bad_examples] == [2]
        found.append([tuple(row) for batch in first + rest for row in batch])
    assert found[0] == found[1] == found[2]
    # A row of a later pass is another draw: fresh again.
    assert len(set(found[0])) > len({row[0] for row in found[0]})


def draw(numbers: int) -> list[Any]:
    """From all of them, also normal numbers, of which NumPy and ``random`` keep every second one."""
    return [
        (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(())))
        for _ in range(numbers)
    ]


def seed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_generators_are_given_back(num_workers: int) -> None:
    drawn = []
    for used in (False, True):
        seed()
        if used:
            with EchoLoader(Transformed(noisy), 4, num_workers=num_workers) as loader:
                list(islice(loader, 3))
        drawn.append(draw(2))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_global_generators_go_on_where_they_were(before: int) -> None:
    streams = []
    for disturbed in (False, True):
        seed()
        drawn = draw(before)
        if disturbed:
            with suppress(KeyError), global_generators_kept():
                draw(3)
                seed()
                raise KeyError
        streams.append(drawn + draw(3))
    assert streams[0] == streams[1]


class Told(Dataset[Any]):
    """Has an epoch that its owner tells it."""

    epoch = -1

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> int:
        return 100 * self.epoch + row


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_iteration_reads_what_the_dataset_was_told_before_it_began(num_workers: int) -> None:
    common: dict[str, Any] = {"epochs": 1, "num_workers": num_workers, "shuffle_buffer": 6}
    dataset = Told()
    loader = EchoLoader(dataset, 4, **common)
    for dataset.epoch in range(2):
        iterator = iter(loader)
        begun = list(islice(iterator, 3))
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    dataset = Told()
    resumed = EchoLoader(dataset, 4, **common)
    resumed.load_state_dict(state)
    for dataset.epoch in range(resumed.epoch, 2):
        assert [batch.tolist() for batch in resumed] == rest
    assert sorted(row for batch in [*begun, *rest] for row in map(int, batch)) == list(range(100, 120))
    loader.close()
    resumed.close()
