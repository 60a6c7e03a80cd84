"""Datasets of users: worker processes by default, threads if declared, keyed random numbers."""

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
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from adaecho import EchoLoader
from adaecho.echo.order.keyed import global_generators_kept
from tests.echo.others import plain
from tests.echo.sources import IDS, VARIANTS, AddNoise, add_noise, arrays

RECORD = 64


class LazyFile(Dataset[Any]):
    """Reads records of a lazily opened file, and sleeps so that threads would collide."""

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


@pytest.mark.parametrize("wrap", ["plain", "concat", "stack"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_lazily_opened_file_is_read_correctly(records: Path, wrap: str, num_workers: int) -> None:
    lazy = LazyFile(records)
    dataset: Any = {
        "plain": lambda: lazy,
        "concat": lambda: ConcatDataset([Subset(lazy, range(100)), Subset(lazy, range(100, 200))]),
        "stack": lambda: StackDataset(x=lazy, label=list(range(200))),
    }[wrap]()
    with EchoLoader(dataset, 8, order="sequential", epochs=1, num_workers=num_workers) as loader:
        found = torch.cat([batch["x"] if wrap == "stack" else batch for batch in loader])
    assert found.tolist() == [[row] * (RECORD // 8) for row in range(200)]
    assert num_workers == 0 or lazy.file is None


class Locating(Dataset[Any]):
    """Returns the process and the thread that read the example."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, row: int) -> Any:
        time.sleep(0.001)
        return os.getpid(), threading.get_ident()


class Safe(Locating):
    thread_safe = True


def same(example: Any, rng: Any) -> Any:  # noqa: ARG001
    return example


@pytest.mark.parametrize(
    ("source", "more", "processes"),
    [
        (Locating(), {}, True), (Safe(), {}, False), (Safe(), {"augment": same}, True),
        (Safe(), {"decode": tuple}, True), (Safe(), {"processes": True}, True),
        (arrays(200), {"augment": AddNoise()}, False), (arrays(200), {"augment": same}, True),
        (arrays(200), {"augment": add_noise}, False),
    ],
)  # fmt: skip
def test_threads_call_only_code_that_declares_thread_safe(
    source: Any, more: dict[str, Any], processes: bool
) -> None:
    with EchoLoader(source, 8, epochs=1, num_workers=2, **more) as loader:
        assert loader.processes == processes
        found = list(loader)
    if isinstance(source, Locating):
        ids = {int(one) for batch in found for one in batch[0]}
        assert (os.getpid() not in ids) == processes
        assert len(ids) == (2 if processes else 1)


def noisy(row: int) -> Any:
    return np.array([row, random.random(), np.random.rand(), float(torch.rand(()))])


def noisy_except_two(row: int) -> Any:
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
def test_random_numbers_of_a_dataset_do_not_depend_on_workers_or_resumes(variant: dict[str, Any]) -> None:
    found = []
    for num_workers in (0, 2, 3):
        with EchoLoader(
            Transformed(noisy_except_two), 4, num_workers=num_workers, shuffle_buffer=8, seed=3,
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
    # A row draws new numbers in a later epoch
    assert len(set(found[0])) > len({row[0] for row in found[0]})


def draw(numbers: int) -> list[Any]:
    """Draw from all global generators. NumPy and ``random`` cache every second normal number."""
    return [
        (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(())))
        for _ in range(numbers)
    ]


def seed_all() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def test_reading_rows_does_not_change_the_global_generators() -> None:
    drawn = []
    for reads in (False, True):
        seed_all()
        if reads:
            list(islice(EchoLoader(Transformed(noisy), 4), 3))
        drawn.append(draw(2))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_global_generators_are_restored(before: int) -> None:
    streams = []
    for disturbed in (False, True):
        seed_all()
        drawn = draw(before)
        if disturbed:
            with suppress(KeyError), global_generators_kept():
                draw(3)
                seed_all()
                raise KeyError
        streams.append(drawn + draw(3))
    assert streams[0] == streams[1]


class WithEpoch(Dataset[Any]):
    """The training loop sets the epoch."""

    epoch = -1

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> int:
        return 100 * self.epoch + row


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_reads_attributes_set_before_it_also_after_a_resume(num_workers: int) -> None:
    common: dict[str, Any] = {"epochs": 1, "num_workers": num_workers, "shuffle_buffer": 6}
    first, second = WithEpoch(), WithEpoch()
    with EchoLoader(first, 4, **common) as loader, EchoLoader(second, 4, **common) as resumed:
        for first.epoch in range(2):
            iterator = iter(loader)
            list(islice(iterator, 3))
        resumed.load_state_dict(loader.state_dict())
        second.epoch = 1
        rest = plain(list(iterator))
        assert plain(list(resumed)) == rest
        assert {row // 100 for batch in rest for row in batch} == {1}
