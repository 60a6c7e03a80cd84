"""``processes=True``: the same batches, and nothing left behind, whatever happens to loader or process."""

import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo import pipeline
from adaecho.echo.read import rows
from tests.echo.sources import VARIANTS, Broken, Dataset, add_noise, arrays
from tests.echo.threads.test_workers import assert_no_threads_soon
from tests.needs import first_form, needs
from tests.programs import ROOT

OPEN = Path("/proc/self/fd")
ENDS = needs(str(OPEN), present=OPEN.exists(), remedy="nothing else lists a process's open files")


class Mixed:
    """Of a kind of examples each: numbers, large tensors, of unequal shapes."""

    def __init__(self, kind: str, length: int = 60) -> None:
        self.kind, self.length = kind, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Any:
        draws = np.random.default_rng(row)
        if self.kind == "dict":
            return {"x": draws.random(3), "y": row, "name": torch.tensor(row)}
        if self.kind == "large":
            return torch.from_numpy(draws.integers(0, 255, (10, 12, 20), dtype=np.uint8))
        return draws.random(1 + row % 3), "s" * (row % 5)


def drawn(example: Any, draw: Callable[[], float]) -> Any:
    if isinstance(example, dict):
        return {**example, "x": example["x"] + draw()}
    if isinstance(example, tuple):
        return example[0] * draw(), example[1]
    example[0] = 1  # which must not be seen by another use
    return example.flip(0) if draw() < 0.5 else example


def keyed(example: Any, rng: Any) -> Any:
    return drawn(example, rng.random)


def seeded(example: Any) -> Any:
    return drawn(example, lambda: np.random.rand() + random.random() + float(torch.rand(())))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)


def assert_same(batches: list[Any], expected: list[Any]) -> None:
    assert len(batches) == len(expected)
    assert all(map(same, batches, expected))


def as_list(examples: list[Any]) -> list[Any]:
    return examples


AUGMENTS: dict[str, Any] = {"keyed": keyed, "seeded": seeded, "both": (seeded, keyed)}
KINDS = ("dict", "large", "ragged")
ONCE = list(zip(KINDS, AUGMENTS, strict=True))
OTHERS = [case for case in itertools.product(KINDS, AUGMENTS) if case not in ONCE]


@pytest.mark.parametrize("case", first_form(*ONCE, also=OTHERS), ids="-".join)
def test_the_same_batches_for_any_number_of_processes_and_after_a_resume(case: tuple[str, str]) -> None:
    kind, augment = case
    for variant in VARIANTS[::2] + VARIANTS[-2:-1]:
        common: dict[str, Any] = {
            "shuffle_buffer": 20, **variant, "augment": AUGMENTS[augment], "epochs": 1, "batch_size": 8,
            "collate": as_list if kind == "ragged" else None,
        }  # fmt: skip
        expected = list(EchoLoader(Mixed(kind), **common))
        with EchoLoader(Mixed(kind), num_workers=3, processes=True, **common) as loader:
            head = list(islice(loader, 5))
            state = loader.state_dict()
            loader.load_state_dict(state)
            assert_same(head + list(loader), expected)
        with EchoLoader(Mixed(kind), num_workers=1, processes=True, **common) as other:
            other.load_state_dict(state)
            assert_same(head + list(other), expected)
    assert multiprocessing.active_children() == []


def streamed() -> Iterator[Any]:
    return map(Mixed("ragged").__getitem__, range(60))


@pytest.mark.parametrize("make", [lambda: streamed, lambda: arrays(90)], ids=["iterated", "arrays"])
def test_what_is_iterated_and_arrays(make: Any) -> None:
    for variant in VARIANTS:
        source = make()
        common: dict[str, Any] = {
            "shuffle_buffer": 20, **variant, "augment": keyed if source is streamed else add_noise,
            "batch_size": 8, "collate": as_list if source is streamed else None,
        }  # fmt: skip
        expected = list(islice(EchoLoader(source, **common), 25))
        with EchoLoader(source, num_workers=2, processes=True, **common) as loader:
            head = list(islice(loader, 9))
            loader.stop()
            assert_same(head + list(islice(loader, 16)), expected)
        with EchoLoader(source, num_workers=2, processes=True, **common) as loader:
            list(islice(loader, 9))
            state = loader.state_dict()
        with EchoLoader(source, num_workers=1, processes=True, **common) as loader:
            loader.load_state_dict(state)
            assert_same(head + list(islice(loader, 16)), expected)


TORN = range(3, 40, 7)


def test_bad_examples_are_found_as_they_enter() -> None:
    found = []
    common: dict[str, Any] = {
        "max_bad_examples": 9, "echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 10,
        "augment": add_noise,
    }  # fmt: skip
    for more in ({}, {"num_workers": 2}, {"num_workers": 2, "processes": True}):
        with EchoLoader(Broken(40, *TORN), 4, **common, **more) as loader:
            batches = list(islice(loader, 25))
            found.append((loader.bad_examples, loader.fresh_examples, loader.state_dict()["examples"]))
            assert_same(batches, list(islice(EchoLoader(Broken(40, *TORN), 4, **common), 25)))
    assert found[0] == found[1] == found[2]
    assert found[0][0]
    with (
        EchoLoader(Broken(40, *TORN), 4, processes=True, order="stored") as loader,
        pytest.raises(ValueError, match="cannot decode 3") as caught,
    ):
        list(islice(loader, 3))
    assert caught.value.__notes__[0].startswith("while reading example 3 of Broken; max_bad_examples=0")
    assert "in __getitem__" in caught.value.__notes__[1]


class LocalError(Exception):
    """Takes what no copy of it is made with."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(f"{row}: {why}")


def test_errors_name_the_example_shortly() -> None:
    def fail(example: Any, rng: Any) -> Any:  # noqa: ARG001
        if example["label"] == 5:
            raise LocalError(5, "no five")
        return example

    with (
        EchoLoader(Dataset(40), 4, num_workers=2, processes=True, order="stored", augment=fail) as loader,
        pytest.raises(RuntimeError, match="LocalError: 5: no five") as caught,
    ):
        list(loader)
    assert caught.value.__notes__[0] == "while augmenting example 5 of Dataset"
    assert caught.value.__notes__[1].startswith("in a worker process:\nTraceback")
    assert caught.value.__cause__ is None
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_is_one_short_error_and_the_loader_can_go_on() -> None:
    with EchoLoader(Dataset(40), 4, num_workers=2, processes=True, augment=add_noise) as loader:
        expected = list(islice(EchoLoader(Dataset(40), 4, augment=add_noise), 60))
        others = set(multiprocessing.active_children())
        batches = list(islice(iterator := iter(loader), 3))
        os.kill((set(multiprocessing.active_children()) - others).pop().pid or 0, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="ended with exit code -9") as caught:
            batches.extend(islice(iterator, 50))
        assert not hasattr(caught.value, "__notes__")
        assert_same(batches + list(islice(loader, 60 - len(batches))), expected)
    assert multiprocessing.active_children() == []


def assert_none_soon() -> None:
    deadline = time.monotonic() + 60
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert multiprocessing.active_children() == []
    assert_no_threads_soon()


def pipes() -> int:
    def links() -> Iterator[str]:
        for one in OPEN.iterdir():
            try:
                yield os.readlink(one)
            except FileNotFoundError:
                continue

    return sum(link.startswith(("pipe:", "socket:")) for link in links())


def break_off(loader: EchoLoader) -> None:
    for _ in loader:
        break


def interrupt(loader: EchoLoader) -> None:
    for _ in loader:
        signal.raise_signal(signal.SIGINT)


def given_up(loader: EchoLoader) -> None:
    next(iter(loader))
    del loader
    gc.collect()


@ENDS
@pytest.mark.parametrize("end", [break_off, interrupt, given_up, EchoLoader.close])
@pytest.mark.parametrize("iterated", [False, True])
def test_no_process_and_no_pipe_is_left(end: Callable[[EchoLoader], None], iterated: bool) -> None:
    gc.collect()  # what others have left
    assert_none_soon()
    before = pipes()
    source: Any = streamed if iterated else Dataset(40)
    loader = EchoLoader(source, 4, num_workers=2, processes=True, collate=as_list)
    batches = iter(loader)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    del batches
    try:
        end(loader)
    except KeyboardInterrupt:
        assert end is interrupt
    if iterated:  # what they have can't be read again: it is kept as long as the loader
        loader.close()
    del loader
    gc.collect()
    assert_none_soon()
    assert pipes() == before


def run(folder: Path, code: str, stop: int | None = None, *, all_of_it: bool = False) -> tuple[int, str, str]:
    """Exit code, output and errors of a script, once it and all that it started have ended."""
    (folder / "script.py").write_text(textwrap.dedent(code))
    process = subprocess.Popen(
        [sys.executable, str(folder / "script.py")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    if stop is not None:
        assert process.stdout.readline() == "started\n"
        (os.killpg if all_of_it else os.kill)(process.pid, stop)
    said, errors = process.communicate(timeout=100)  # the ends of its pipes: no child holds them
    return process.returncode, said, errors


DRAWS = """
import random, torch
from torch.utils.data import Dataset
from adaecho import EchoLoader

class Noisy(Dataset):
    transform = staticmethod(lambda row: row + torch.rand(1))

    def __len__(self):
        return 64

    def __getitem__(self, row):
        if row == {dies}:
            import os; os._exit(3)
        return self.transform(row)

loader = EchoLoader(Noisy(), 8, num_workers=2, epochs=2, max_bad_examples=40)  # none of which is a death
print(sum(len(batch) for _ in range(2) for batch in loader))
"""
UNGUARDED = DRAWS.format(dies=None)


def test_a_dataset_that_draws_in_a_script_without_a_guard(tmp_path: Path) -> None:
    code, said, errors = run(tmp_path, UNGUARDED)
    assert (code, said) == (0, "256\n"), errors
    assert errors.count("Warning") == 1
    code, _, errors = run(tmp_path, DRAWS.format(dies=7))
    assert code == 1
    assert errors.count("Traceback") == 1
    assert "ended with exit code 3" in errors.splitlines()[-1]


def test_a_dataset_that_draws_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    codes = [UNGUARDED, UNGUARDED, DRAWS.format(dies=7)]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ended with exit code 3"):
        nbclient.NotebookClient(book, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = [
        "".join(one["text"] for one in cell.outputs if one.get("name") == "stdout") for cell in book.cells
    ]
    assert said == ["256\n", "256\n", ""]


@pytest.mark.parametrize(
    ("stop", "all_of_it"),
    [(signal.SIGKILL, False), (signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGINT, True)],
    ids=["kill", "interrupt", "end", "as a terminal interrupts"],
)
def test_processes_that_lose_their_parent_end_without_a_word(
    tmp_path: Path, stop: int, all_of_it: bool
) -> None:
    code, _, errors = run(
        tmp_path,
        """
        import time
        from adaecho import EchoLoader

        class Slow:
            def __len__(self): return 1000
            def __getitem__(self, row):
                time.sleep(0.005)
                return row

        for number, _ in enumerate(EchoLoader(Slow(), 4, num_workers=2, processes=True)):
            if number == 3:
                print("started", flush=True)
        """,
        stop,
        all_of_it=all_of_it,
    )
    assert code == -stop
    assert errors.count("Traceback") == (stop == signal.SIGINT), errors
    assert stop != signal.SIGINT or errors.splitlines()[-1].startswith("KeyboardInterrupt")


@pytest.fixture
def _no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pipeline, rows):
        monkeypatch.setattr(module, "can_fork", lambda: False)


@pytest.mark.usefixtures("_no_fork")
def test_without_fork_threads_do_it_or_one_place_with_one_warning() -> None:
    with (  # noqa: PT031 (the first batch asks for workers)
        pytest.warns(UserWarning, match="can't be forked here: workers are threads") as caught,
        EchoLoader(Dataset(40), 4, num_workers=2, processes=True, augment=add_noise, epochs=1) as loader,
    ):
        expected = list(EchoLoader(Dataset(40), 4, augment=add_noise, epochs=1))
        assert_same(list(loader), expected)
        list(loader)
    assert len(caught) == 1
    with (
        pytest.warns(UserWarning, match="works in one place, as with num_workers=0") as caught,
        EchoLoader(Mixed("dict"), 4, num_workers=2, augment=seeded, epochs=1) as loader,
    ):
        assert_same(list(loader), list(EchoLoader(Mixed("dict"), 4, augment=seeded, epochs=1)))
    assert len(caught) == 1
    assert multiprocessing.active_children() == []


def test_r_counts_what_processes_do() -> None:
    def slow(example: Any) -> Any:
        time.sleep(0.004)
        return example

    def quick(example: Any, rng: Any) -> Any:  # noqa: ARG001
        return example

    with EchoLoader(
        Dataset(400), 4, num_workers=2, processes=True, decode=slow, augment=quick,
        echo="example_before_augmentation", factor=2, shuffle_buffer=16,
    ) as loader:  # fmt: skip
        list(islice(loader, 60))
        assert 0.006 < loader.upstream_s_per_batch < 0.02  # 4 * 4 ms, over two processes
