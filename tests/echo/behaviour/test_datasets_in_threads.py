"""Datasets of others: never shared by threads unless they say so, and what they draw depends on no thread."""

import random
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from adaecho import EchoLoader
from adaecho.echo.read import rows
from adaecho.echo.threads.generators import global_generators_kept, tried
from tests.echo.others import plain
from tests.echo.sources import IDS, VARIANTS

RECORD = 64


class LazyFile(Dataset[Any]):
    """The common way to read records of a file; slow enough that threads would come between seek and read."""

    def __init__(self, path: Path, *, opened: bool = False) -> None:
        self.path, self.file = path, None
        if opened:  # it can't be pickled then
            self[0]

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


class InHand(Dataset[Any]):
    """Tells whether two threads were ever in it together; holds what may make copies dear or impossible."""

    def __init__(self, held: Any = None) -> None:
        self.inside, self.together, self.threads, self.held = 0, False, set[int](), held

    def __len__(self) -> int:
        return 200

    def __getitem__(self, row: int) -> int:
        self.threads.add(threading.get_ident())
        self.inside += 1
        self.together |= self.inside > 1
        time.sleep(0.001)
        self.inside -= 1
        return row


class Safe(InHand):
    thread_safe = True


@pytest.fixture
def records(tmp_path: Path) -> Path:
    np.repeat(np.arange(200), RECORD // 8).tofile(tmp_path / "records")
    return tmp_path / "records"


def read(loader: EchoLoader) -> list[int]:
    """The first number of each example of an iteration."""
    return [int(np.ravel(one)[0]) for batch in loader for one in batch]


@pytest.mark.parametrize("wrap", ["plain", "subset", "concat", "stack"])
@pytest.mark.parametrize("num_workers", [0, 2, 4])
def test_a_lazily_opened_file_is_read_right(records: Path, wrap: str, num_workers: int) -> None:
    plain = LazyFile(records)
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
    dataset = LazyFile(records)
    dataset.hook = lambda: None  # it can't be copied, and can be forked before it has opened its file
    processes: dict[str, Any] = {"num_workers": 4, "processes": True, "place": "auto", "decode": np.copy}
    with EchoLoader(dataset, 8, order="stored", epochs=1, **processes) as loader:
        assert read(loader) == list(range(200))
    assert dataset.file is None


@pytest.mark.parametrize("num_workers", [2, 4])
def test_what_can_not_be_copied_is_read_in_turns_with_a_warning(records: Path, num_workers: int) -> None:
    locked = InHand(threading.Lock())
    for dataset, message in (
        (LazyFile(records, opened=True), "LazyFile can't be copied for each reading thread"),
        (locked, "read one at a time: open files when first needed"),
    ):
        with (  # noqa: PT031 (the loader warns when it is made)
            pytest.warns(UserWarning, match=message) as caught,
            EchoLoader(dataset, 8, order="stored", epochs=1, num_workers=num_workers) as loader,
        ):
            for _ in range(2):
                assert read(loader) == list(range(200))
        assert len(caught) == 1
        assert caught[0].filename == __file__
    assert not locked.together


def test_what_says_that_it_is_safe_is_shared_and_nothing_else() -> None:
    for dataset in (Safe(), InHand()):
        with EchoLoader(dataset, 8, epochs=1, num_workers=4) as loader:
            assert sorted(read(loader)) == list(range(200))
        assert (len(dataset.threads) > 1) == isinstance(dataset, Safe)
    assert dataset.threads == set(), "its copies have read"
    safe, plain, tensors = Safe(), InHand(), TensorDataset(torch.arange(3))
    for shared in ([1], (1,), range(3), safe, Subset(safe, [0]), tensors, ConcatDataset([safe, tensors])):
        assert rows.may_be_shared(shared)
    for copied in (plain, Subset(plain, [0]), ConcatDataset([safe, plain]), StackDataset(a=safe, b=plain)):
        assert not rows.may_be_shared(copied)


def test_memory_maps_are_shared_and_large_datasets_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", np.arange(1 << 20))
    mapped = InHand(np.load(tmp_path / "x.npy", mmap_mode="r"))
    monkeypatch.setattr(rows, "_LARGEST_COPY_BYTES", 1 << 16)
    own = rows._copier(mapped)()
    assert own is not mapped
    assert own.held is mapped.held
    with pytest.warns(UserWarning, match="it takes more than 0 MiB"):
        EchoLoader(InHand(np.arange(1 << 20)), 8, num_workers=2).close()


def test_copies_are_taken_anew_for_each_iteration(records: Path) -> None:
    dataset = LazyFile(records)
    with EchoLoader(dataset, 8, order="stored", epochs=1, num_workers=2) as loader:
        read(loader)
        dataset.path, dataset.file = records.with_name("other"), None
        np.repeat(np.arange(1000, 1200), RECORD // 8).tofile(dataset.path)
        assert read(loader) == list(range(1000, 1200))


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


@pytest.mark.parametrize("variant", VARIANTS[2:5:2], ids=IDS[2:5:2])
def test_what_a_dataset_draws_depends_on_no_thread_and_no_resume(variant: dict[str, Any]) -> None:
    found = []
    for num_workers in (0, 2):
        with (  # noqa: PT031 (the loader warns when it is made)
            pytest.warns(UserWarning, match="Transformed draws random numbers as it reads") as caught,
            EchoLoader(
                Transformed(noisy_but_for_two), 4, num_workers=num_workers, shuffle_buffer=8, seed=3,
                max_bad_examples=1, **variant,
            ) as loader,
        ):  # fmt: skip
            iterator = iter(loader)
            first = plain(list(islice(iterator, 5)))
            state = loader.state_dict()
            rest = plain(list(islice(iterator, 30)))
            loader.load_state_dict(state)
            assert plain(list(islice(loader, 30))) == rest
            assert [bad["row"] for bad in loader.bad_examples] == [2]
        assert len(caught) == 1
        found.append([tuple(row) for batch in first + rest for row in batch])
    assert found[0] == found[1]
    # A row of a later pass is another draw: fresh again.
    assert len(set(found[0])) > len({row[0] for row in found[0]})


def seeded_and_given_back(row: int) -> Any:
    """As torchvision's FakeData, and what forks the generators."""
    if row % 2:
        state = torch.get_rng_state()
        torch.manual_seed(row)
        drawn = torch.randn(1000)
        torch.set_rng_state(state)
        return drawn
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(row)
        return torch.randn(1000)


@pytest.mark.parametrize("num_workers", [0, 3])
def test_threads_never_read_together_what_seeds_a_global_generator_and_gives_it_back(
    num_workers: int,
) -> None:
    true = [seeded_and_given_back(row) for row in range(40)]
    torch.manual_seed(7)
    undisturbed = [float(torch.rand(())) for _ in range(20)]
    torch.manual_seed(7)
    dataset = Transformed(seeded_and_given_back)
    read, drawn = [], []
    with EchoLoader(dataset, 2, order="stored", epochs=1, num_workers=num_workers) as loader:
        with pytest.warns(UserWarning, match="draws random numbers"):
            batches = iter(loader)
        for batch in batches:
            read.extend(batch)
            drawn.append(float(torch.rand(())))
    assert torch.equal(torch.stack(read), torch.stack(true))
    assert drawn == undisturbed


def test_the_global_generators_are_given_back() -> None:
    drawn = []
    for used in (False, True):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        if used:
            with pytest.warns(UserWarning, match="draws random numbers"):
                list(islice(EchoLoader(Transformed(noisy), 4), 3))
        drawn.append(noisy(0).tolist())
    assert drawn[0] == drawn[1]


def test_a_warning_says_what_echoing_becomes_and_points_at_the_line_that_made_the_loader() -> None:
    with pytest.warns(
        UserWarning, match="same draw, which is echoing after augmentation; .*augment="
    ) as caught:
        EchoLoader(Subset(Transformed(noisy), range(40)), 4, echo="example_before_augmentation", factor=2)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EchoLoader(Transformed(np.array), 4)
        EchoLoader(TensorDataset(torch.arange(3)), 2)


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("draws", [False, True])
def test_a_bad_first_example_tells_nothing_of_draws(draws: bool, recwarn: pytest.WarningsRecorder) -> None:
    def read(row: int) -> Any:
        if row == 0:
            raise ValueError("row 0 is damaged")
        return random.random() if draws else row

    EchoLoader(Transformed(read), 4)
    assert ["draws random numbers as it reads" in str(one.message) for one in recwarn] == [True] * draws


def test_looks_in_two_threads_leave_no_trace() -> None:
    given, found = (random.setstate, np.random.set_state, torch.set_rng_state), list[bool]()

    def look() -> None:
        for _ in range(200):
            found.append(tried(lambda: time.sleep(0), key=None)[1])

    looking = [threading.Thread(target=look) for _ in range(3)]
    for thread in looking:
        thread.start()
    for thread in looking:
        thread.join()
    assert found == [False] * 600
    assert given == (random.setstate, np.random.set_state, torch.set_rng_state)


def draw(numbers: int) -> list[Any]:
    """From all of them, also normal numbers, of which NumPy and ``random`` keep every second one."""
    return [
        (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(())))
        for _ in range(numbers)
    ]


def disturb() -> None:
    for number, seed in enumerate((random.seed, np.random.seed, torch.manual_seed)):
        seed(number)
    draw(3)


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
def test_the_global_generators_go_on_where_they_were(before: int, bits: Any) -> None:
    own = np.random.get_bit_generator()
    try:
        streams = []
        for disturbed in (False, True):
            np.random.set_bit_generator(bits(1))
            random.seed(1)
            torch.manual_seed(1)
            drawn = draw(before)
            for _ in range(2 * disturbed):
                with global_generators_kept():
                    np.random.set_bit_generator(np.random.MT19937(8))
                    disturb()
                    inside = draw(2)
                    disturb()
                    with suppress(KeyError), global_generators_kept():
                        disturb()
                        raise KeyError
                    assert draw(2) == inside
            streams.append(drawn + draw(3))
        assert streams[0] == streams[1]
    finally:
        np.random.set_bit_generator(own)


class WithThreads(Dataset[Any]):
    """Asks threads of its own, as a client of a store does: it can't be copied, nor work in a fork."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> int:
        return self.pool.submit(lambda: row).result()


def test_a_dataset_with_threads_of_its_own_is_tried_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_TRIAL_S", 0.5)
    dataset = WithThreads()
    assert dataset[3] == 3
    with EchoLoader(dataset, 4, shuffle=False, epochs=1, num_workers=2) as loader:
        with pytest.warns(UserWarning, match="can't be copied"):
            first = iter(loader)
        for batches in (first, loader):
            assert [row for batch in batches for row in batch.tolist()] == list(range(20))
    dataset.pool.shutdown()


class Sometimes(Transformed):
    """Draws for some examples alone, or once it has been told to."""

    def __init__(self, first: int) -> None:
        super().__init__(noisy)
        self.first = first

    def __getitem__(self, row: int) -> Any:
        return super().__getitem__(row) if row >= self.first else np.full(4, float(row))


def test_a_dataset_that_draws_for_some_examples_or_later_is_seen() -> None:
    for row in (20, 39):
        with pytest.warns(UserWarning, match="draws random numbers"):
            EchoLoader(Sometimes(row), 4)
    dataset = Sometimes(40)
    found = []
    for num_workers in (0, 2):
        dataset.first = 40
        with EchoLoader(dataset, 4, epochs=1, num_workers=num_workers) as loader:
            assert sorted(row[0] for batch in loader for row in batch.tolist()) == list(range(40))
            dataset.first = 1
            with pytest.warns(UserWarning, match="draws random numbers"):
                found.append(plain(list(loader)))
    assert found[0] == found[1]


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
