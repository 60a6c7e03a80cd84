"""Datasets of others: never shared by threads unless they say so, and what they draw depends on no thread."""

import random
import threading
import time
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from adaecho import EchoLoader
from adaecho.echo.read import rows
from tests.echo.sources import IDS, VARIANTS

RECORD = 64


class LazyFile(Dataset[Any]):
    """The common way to read records of a file; slow enough that threads would come between seek and read."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length, self.file = path, length, None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Any:
        if self.file is None:
            self.file: Any = open(self.path, "rb")  # noqa: SIM115
        self.file.seek(row * RECORD)
        time.sleep(0.0005)
        return np.frombuffer(self.file.read(RECORD), dtype=np.int64).copy()

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()


class OpenFile(LazyFile):
    """It can't be pickled."""

    def __init__(self, path: Path, length: int) -> None:
        super().__init__(path, length)
        self[0]


class Unsendable(LazyFile):
    """It can't be copied, and can be forked before it has opened its file."""

    def __init__(self, path: Path, length: int) -> None:
        super().__init__(path, length)
        self.hook = lambda: None


class InHand(Dataset[Any]):
    """Tells whether two threads were ever in it together."""

    def __init__(self) -> None:
        self.inside, self.together, self.threads = 0, False, set[int]()

    def __len__(self) -> int:
        return 200

    def __getitem__(self, row: int) -> int:
        self.threads.add(threading.get_ident())
        self.inside += 1
        self.together |= self.inside > 1
        time.sleep(0.001)
        self.inside -= 1
        return row


class Locked(InHand):
    def __getstate__(self) -> Any:
        raise TypeError("cannot pickle an open file")


class Holding(InHand):
    def __init__(self, array: Any) -> None:
        super().__init__()
        self.array = array


class Safe(InHand):
    thread_safe = True


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "records"
    np.repeat(np.arange(200), RECORD // 8).tofile(path)
    return path


@pytest.mark.parametrize("wrap", ["plain", "subset", "concat", "stack"])
@pytest.mark.parametrize("num_workers", [0, 2, 4])
def test_a_lazily_opened_file_is_read_right(records: Path, wrap: str, num_workers: int) -> None:
    plain = LazyFile(records, 200)
    dataset: Any = {
        "plain": lambda: plain,
        "subset": lambda: Subset(plain, range(200)),
        "concat": lambda: ConcatDataset([Subset(plain, range(100)), Subset(plain, range(100, 200))]),
        "stack": lambda: StackDataset(x=plain, label=list(range(200))),
    }[wrap]()
    with EchoLoader(dataset, 8, order="stored", epochs=1, num_workers=num_workers) as loader:
        found = torch.cat([batch["x"] if wrap == "stack" else batch for batch in loader])
    assert found.tolist() == [[row] * (RECORD // 8) for row in range(200)]


def test_no_two_processes_share_a_file_that_a_trial_has_opened(records: Path) -> None:
    dataset = Unsendable(records, 200)
    with EchoLoader(
        dataset, 8, order="stored", epochs=1, num_workers=4, processes=True, place="auto", decode=np.copy
    ) as loader:
        assert torch.cat(list(loader))[:, 0].tolist() == list(range(200))
    assert dataset.file is None


@pytest.mark.parametrize("num_workers", [2, 4])
def test_what_can_not_be_copied_is_read_in_turns_with_a_warning(records: Path, num_workers: int) -> None:
    dataset = OpenFile(records, 200)
    with (  # noqa: PT031 (the loader warns when it is made)
        pytest.warns(UserWarning, match="OpenFile can't be copied for each reading thread") as caught,
        EchoLoader(dataset, 8, order="stored", epochs=1, num_workers=num_workers) as loader,
    ):
        for _ in range(2):
            assert torch.cat(list(loader))[:, 0].tolist() == list(range(200))
    assert len(caught) == 1
    dataset = Locked()  # type: ignore[assignment]
    with (
        pytest.warns(UserWarning, match="read one at a time: open files when first needed"),
        EchoLoader(dataset, 8, epochs=1, num_workers=num_workers) as loader,
    ):
        list(loader)
    assert not dataset.together  # type: ignore[attr-defined]


def test_what_says_that_it_is_safe_is_shared() -> None:
    dataset = Safe()
    with EchoLoader(dataset, 8, epochs=1, num_workers=4) as loader:
        list(loader)
    assert len(dataset.threads) > 1
    plain = InHand()
    with EchoLoader(plain, 8, epochs=1, num_workers=4) as loader:
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(200))
    assert not plain.threads


def test_which_datasets_are_shared() -> None:
    safe, plain = Safe(), InHand()
    tensors = TensorDataset(torch.arange(3))
    for dataset in (
        [1, 2],
        (1, 2),
        range(3),
        safe,
        Subset(safe, [0]),
        tensors,
        ConcatDataset([safe, tensors]),
    ):
        assert rows.may_be_shared(dataset)
    for other in (plain, Subset(plain, [0]), ConcatDataset([safe, plain]), StackDataset(a=safe, b=plain)):
        assert not rows.may_be_shared(other)


def test_memory_maps_are_shared_and_large_datasets_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", np.arange(1 << 20))
    mapped = Holding(np.load(tmp_path / "x.npy", mmap_mode="r"))
    monkeypatch.setattr(rows, "_LARGEST_COPY_BYTES", 1 << 16)
    own = rows._copier(mapped)()
    assert own is not mapped
    assert own.array is mapped.array
    with pytest.warns(UserWarning, match="it takes more than 0 MiB"):
        EchoLoader(Holding(np.arange(1 << 20)), 8, num_workers=2).close()


def test_copies_are_taken_anew_for_each_iteration(records: Path) -> None:
    dataset = LazyFile(records, 200)
    with EchoLoader(dataset, 8, order="stored", epochs=1, num_workers=2) as loader:
        list(loader)
        other = records.with_name("other")
        np.repeat(np.arange(1000, 1200), RECORD // 8).tofile(other)
        dataset.path, dataset.file = other, None
        assert torch.cat(list(loader))[:, 0].tolist() == list(range(1000, 1200))


class Noisy:
    """Draws from each of the global generators."""

    def __call__(self, row: int) -> Any:
        return np.array([row, random.random(), np.random.rand(), float(torch.rand(()))])


class Transformed(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        return self.transform(row)


def rows_of(batches: Any) -> list[list[float]]:
    return [row for batch in batches for row in batch.tolist()]


@pytest.mark.parametrize("variant", VARIANTS[2:5:2], ids=IDS[2:5:2])
def test_what_a_dataset_draws_depends_on_no_thread_and_no_resume(variant: dict[str, Any]) -> None:
    common: dict[str, Any] = {"shuffle_buffer": 8, "seed": 3, **variant}
    found = []
    for num_workers in (0, 2):
        with (  # noqa: PT031 (the loader warns when it is made)
            pytest.warns(UserWarning, match="Transformed draws random numbers as it reads") as caught,
            EchoLoader(Transformed(Noisy()), 4, num_workers=num_workers, **common) as loader,
        ):
            iterator = iter(loader)
            first = rows_of(islice(iterator, 5))
            state = loader.state_dict()
            rest = rows_of(islice(iterator, 30))
            loader.load_state_dict(state)
            assert rows_of(islice(loader, 30)) == rest
        assert len(caught) == 1
        found.append(first + rest)
    assert all(one == found[0] for one in found)
    # A row of a later pass is another draw: fresh again.
    assert len({tuple(row) for row in found[0]}) > len({row[0] for row in found[0]})


def test_the_global_generators_are_given_back() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), float(torch.rand(()))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with pytest.warns(UserWarning, match="draws random numbers"):
        list(islice(EchoLoader(Transformed(Noisy()), 4), 3))
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected


def test_warnings_say_what_echoing_becomes_and_point_at_the_line_that_made_the_loader() -> None:
    source = Subset(Transformed(Noisy()), range(40))
    message = r"same draw, which is echoing after augmentation; .*augment="
    with pytest.warns(UserWarning, match=message) as caught:
        EchoLoader(source, 4, echo="example_before_augmentation", factor=2)
    with pytest.warns(UserWarning, match="can't be copied") as in_turns:
        EchoLoader(Locked(), 4, num_workers=2).close()
    assert {caught[0].filename, in_turns[0].filename} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EchoLoader(Transformed(np.array), 4)
        EchoLoader(TensorDataset(torch.arange(3)), 2)


def test_errors_of_a_dataset_that_draws_name_the_example() -> None:
    for num_workers in (0, 1):
        with (  # noqa: PT031 (the loader warns when it is made)
            pytest.warns(UserWarning, match="draws"),
            EchoLoader(
                Transformed(Failing()), 4, num_workers=num_workers, order="stored", max_bad_examples=1
            ) as loader,
        ):
            assert [row[0] for row in next(iter(loader)).tolist()] == [0, 1, 3, 4]
            assert loader.bad_examples[0]["row"] == 2


class Failing(Noisy):
    def __call__(self, row: int) -> Any:
        if row == 2:
            raise ValueError("row 2 is damaged")
        return super().__call__(row)


@pytest.mark.parametrize("draws", [False, True])
def test_a_bad_first_example_tells_nothing_of_draws(draws: bool) -> None:
    def read(row: int) -> Any:
        if row == 0:
            raise ValueError("row 0 is damaged")
        return random.random() if draws else row

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        EchoLoader(Transformed(read), 4)
    assert ["draws random numbers as it reads" in str(one.message) for one in caught] == [True] * draws
