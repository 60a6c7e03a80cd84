"""``processes=True``: the same batches, and nothing left behind, whatever happens to loader or process."""

import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
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
from tests.echo.record_streams import Rows, plain
from tests.echo.sources import VARIANTS, Broken, Dataset, add_noise, arrays, soon
from tests.echo.threads.test_workers import assert_no_threads_soon
from tests.needs import first_form, needs

OPEN = Path("/proc/self/fd")


def mixed(kind: str, row: int) -> Any:
    """An example of numbers, a large tensor, or of a shape of its own."""
    draws = np.random.default_rng(row)
    if kind == "dict":
        return {"x": draws.random(3), "y": row, "name": torch.tensor(row)}
    if kind == "large":
        return torch.from_numpy(draws.integers(0, 255, (10, 12, 20), dtype=np.uint8))
    return draws.random(1 + row % 3), "s" * (row % 5)


def streamed() -> Iterator[Any]:
    return map(partial(mixed, "ragged"), range(60))


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
            "collate": list if kind == "ragged" else None,
        }  # fmt: skip
        source = Rows(60, partial(mixed, kind))
        expected = plain(list(EchoLoader(source, **common)))
        with EchoLoader(source, num_workers=3, processes=True, **common) as loader:
            head = list(islice(loader, 5))
            state = loader.state_dict()
            loader.load_state_dict(state)
            assert plain(head + list(loader)) == expected
        with EchoLoader(source, num_workers=1, processes=True, **common) as other:
            other.load_state_dict(state)
            assert plain(head + list(other)) == expected
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("source", "more"),
    [(streamed, {"augment": keyed, "collate": list}), (arrays(90), {"augment": add_noise})],
    ids=["iterated", "arrays"],
)
def test_what_is_iterated_and_arrays(source: Any, more: dict[str, Any]) -> None:
    for variant in VARIANTS:
        common: dict[str, Any] = {"shuffle_buffer": 20, **variant, **more, "batch_size": 8}
        expected = plain(list(islice(EchoLoader(source, **common), 25)))
        with EchoLoader(source, num_workers=2, processes=True, **common) as loader:
            head = list(islice(loader, 9))
            state = loader.state_dict()
            assert plain(head + list(islice(loader, 16))) == expected
        with EchoLoader(source, num_workers=1, processes=True, **common) as loader:
            loader.load_state_dict(state)
            assert plain(head + list(islice(loader, 16))) == expected


class LocalError(Exception):
    """Holds what can't be sent."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(f"{what}{why}")
        self.lock = threading.Lock()


@pytest.mark.parametrize("error", [ValueError, LocalError])
def test_bad_examples_are_found_as_they_enter(error: type[Exception]) -> None:
    found = []
    common: dict[str, Any] = {
        "max_bad_examples": 9, "echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 10,
    }  # fmt: skip
    for more in ({}, {"num_workers": 2}, {"num_workers": 2, "processes": True}):
        with EchoLoader(Broken(40, *range(3, 40, 7), error=error), 4, **common, **more) as loader:
            batches = plain(list(islice(loader, 25)))
            found.append(
                (batches, loader.bad_examples, loader.fresh_examples, loader.state_dict()["examples"])
            )
    assert found[0] == found[1] == found[2]
    assert found[0][1]


def fail(example: Any, rng: Any) -> Any:  # noqa: ARG001
    if example["label"] == 5:
        raise LocalError("5: ", "no five")
    return example


@pytest.mark.parametrize(
    ("more", "error", "notes"),
    [
        ({}, "^cannot decode 3", ("while reading example 3 of Broken; max_bad_examples=0", "in __getitem__")),
        ({"augment": fail, "max_bad_examples": 1}, "LocalError: 5: no five",
         ("while augmenting example 5 of Broken", "in a worker process:\nTraceback")),
    ],
    ids=["as it is read", "as it is augmented"],
)  # fmt: skip
def test_errors_name_the_example_shortly(more: dict[str, Any], error: str, notes: tuple[str, str]) -> None:
    with (
        EchoLoader(Broken(40, 3), 4, num_workers=2, processes=True, order="stored", **more) as loader,
        pytest.raises((ValueError, RuntimeError), match=error) as caught,
    ):
        list(loader)
    assert caught.value.__notes__[0].startswith(notes[0])
    assert notes[1] in caught.value.__notes__[1]
    assert caught.value.__cause__ is None
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_is_one_short_error_and_the_loader_can_go_on() -> None:
    expected = plain(list(islice(EchoLoader(Dataset(40), 4, augment=add_noise), 60)))
    with EchoLoader(Dataset(40), 4, num_workers=2, processes=True, augment=add_noise) as loader:
        others = set(multiprocessing.active_children())
        batches = list(islice(iterator := iter(loader), 3))
        os.kill((set(multiprocessing.active_children()) - others).pop().pid or 0, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="ended with exit code -9") as caught:
            batches.extend(islice(iterator, 50))
        assert not hasattr(caught.value, "__notes__")
        assert plain(batches + list(islice(loader, 60 - len(batches)))) == expected
    assert multiprocessing.active_children() == []


def pipes() -> int:
    found = 0
    for one in OPEN.iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(one).startswith(("pipe:", "socket:"))
    return found


def interrupted(loader: EchoLoader) -> None:
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for _ in loader:
            signal.raise_signal(signal.SIGINT)


ENDS: dict[str, Callable[[EchoLoader], object]] = {
    "broken off": lambda loader: next(iter(loader)), "interrupted": interrupted, "closed": EchoLoader.close,
    "given up": lambda _: None,
}  # fmt: skip


def assert_nothing_runs_soon() -> None:
    gc.collect()
    assert soon(lambda: not multiprocessing.active_children())
    assert_no_threads_soon()


@needs(str(OPEN), present=OPEN.exists(), remedy="nothing else lists a process's open files")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("iterated", [False, True])
def test_no_process_and_no_pipe_is_left(end: str, iterated: bool) -> None:
    assert_nothing_runs_soon()  # of other tests
    before = pipes()
    source: Any = streamed if iterated else Dataset(40)
    loader = EchoLoader(source, 4, num_workers=2, processes=True, collate=list)
    next(iter(loader))
    assert len(multiprocessing.active_children()) == 2
    ENDS[end](loader)
    del loader
    assert_nothing_runs_soon()
    assert soon(lambda: pipes() == before)  # a loader that is given up is closed beside this thread


def run(folder: Path, code: str, stop: int | None = None, *, all_of_it: bool = False) -> tuple[int, str, str]:
    """Exit code, output and errors of a script, once it and all that it started have ended."""
    (folder / "script.py").write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(folder / "script.py")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
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
    code, _, errors = run(tmp_path, DRAWS.format(dies=7))
    assert code == 1
    assert errors.count("Traceback") == 1
    assert "ended with exit code 3" in errors.splitlines()[-1]


def test_a_dataset_that_draws_in_a_notebook(tmp_path: Path) -> None:
    codes = [UNGUARDED, UNGUARDED, DRAWS.format(dies=7)]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ended with exit code 3"):
        nbclient.NotebookClient(book, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [[one["text"] for one in cell.outputs if one.get("name") == "stdout"] for cell in book.cells]
    assert outputs == [["256\n"], ["256\n"], []]


SLOW = """
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
"""


@pytest.mark.parametrize(
    ("stop", "all_of_it"),
    [(signal.SIGKILL, False), (signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGINT, True)],
    ids=["kill", "interrupt", "end", "as a terminal interrupts"],
)
def test_processes_that_lose_their_parent_end_without_a_word(
    tmp_path: Path, stop: int, all_of_it: bool
) -> None:
    code, _, errors = run(tmp_path, SLOW, stop, all_of_it=all_of_it)
    assert code == -stop
    assert errors.count("Traceback") == (stop == signal.SIGINT), errors
    assert stop != signal.SIGINT or errors.splitlines()[-1].startswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        (Dataset(40), {"augment": add_noise, "processes": True}, ""),
        (
            Dataset(40),
            {"augment": seeded},
            "cannot fork worker processes, so all work is inline",
        ),
    ],
    ids=["threads", "inline"],
)
def test_without_fork_threads_do_what_is_thread_safe_and_the_rest_is_inline(
    source: Any, more: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(list(EchoLoader(source, 4, augment=more["augment"], epochs=1)))
    monkeypatch.setattr(pipeline, "can_fork", lambda: False)
    with (
        pytest.warns(UserWarning, match=message) if message else nullcontext(),
        EchoLoader(source, 4, num_workers=2, epochs=1, **more) as loader,
    ):
        assert plain(list(loader)) == expected
        assert loader.num_workers == (0 if message else 2)
    assert multiprocessing.active_children() == []


class Commands:
    """Reads what a command writes, and ends it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> int:
        command = ["sh", "-c", f"printf '%08d' {row}; exec sleep 600"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            number = int(running.stdout.read(8))
            running.send_signal(signal.SIGINT if row % 2 else signal.SIGTERM)
        return number


def test_commands_that_a_dataset_starts_can_be_ended() -> None:
    with EchoLoader(Commands(), 2, epochs=1, num_workers=1, processes=True) as loader:
        assert sorted(number for batch in loader for number in batch.tolist()) == list(range(4))
