"""``processes=True``: the same batches, errors, and the end of all worker processes."""

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from tests.echo.record_streams import Rows, plain
from tests.echo.sources import VARIANTS, Broken, Dataset, add_noise, arrays, soon
from tests.echo.threads.test_workers import assert_no_threads_soon
from tests.needs import needs

OPEN = Path("/proc/self/fd")


def make_example(kind: str, row: int) -> Any:
    """Make an example: a dict of numbers, a large tensor, or a tuple with an array of varying length."""
    draws = np.random.default_rng(row)
    if kind == "dict":
        return {"x": draws.random(3), "y": row, "name": torch.tensor(row)}
    if kind == "large":
        return torch.from_numpy(draws.integers(0, 255, (10, 12, 20), dtype=np.uint8))
    return draws.random(1 + row % 3), "s" * (row % 5)


def ragged_stream() -> Iterator[Any]:
    return map(partial(make_example, "ragged"), range(60))


def add_noise_by(example: Any, draw: Callable[[], float]) -> Any:
    if isinstance(example, dict):
        return {**example, "x": example["x"] + draw()}
    if isinstance(example, tuple):
        return example[0] * draw(), example[1]
    example[0] = 1  # must not reach another repeat
    return example.flip(0) if draw() < 0.5 else example


def keyed_noise(example: Any, rng: Any) -> Any:
    return add_noise_by(example, rng.random)


def global_noise(example: Any) -> Any:
    return add_noise_by(example, lambda: np.random.rand() + random.random() + float(torch.rand(())))


AUGMENTS: dict[str, Any] = {"keyed": keyed_noise, "seeded": global_noise, "both": (global_noise, keyed_noise)}
KINDS = ("dict", "large", "ragged")


@pytest.mark.parametrize(("kind", "augment"), list(zip(KINDS, AUGMENTS, strict=True)))
def test_batches_do_not_depend_on_the_number_of_processes(kind: str, augment: str) -> None:
    for variant in VARIANTS[::3] + VARIANTS[-1:]:
        common: dict[str, Any] = {
            "shuffle_buffer": 20, **variant, "augment": AUGMENTS[augment], "epochs": 1, "batch_size": 8,
            "collate": list if kind == "ragged" else None,
        }  # fmt: skip
        source = Rows(60, partial(make_example, kind))
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
    [(ragged_stream, {"augment": keyed_noise, "collate": list}), (arrays(90), {"augment": add_noise})],
    ids=["iterated", "arrays"],
)
def test_iterables_and_arrays_with_processes(source: Any, more: dict[str, Any]) -> None:
    for variant in VARIANTS[::4]:
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
    """Cannot be pickled."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(f"{what}{why}")
        self.lock = threading.Lock()


@pytest.mark.parametrize("error", [ValueError, LocalError])
def test_processes_find_the_same_bad_examples(error: type[Exception]) -> None:
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
    ids=["read", "augment"],
)  # fmt: skip
def test_errors_of_a_worker_process_name_the_example(
    more: dict[str, Any], error: str, notes: tuple[str, str]
) -> None:
    with (
        EchoLoader(Broken(40, 3), 4, num_workers=2, processes=True, order="sequential", **more) as loader,
        pytest.raises((ValueError, RuntimeError), match=error) as caught,
    ):
        list(loader)
    assert caught.value.__notes__[0].startswith(notes[0])
    assert notes[1] in caught.value.__notes__[1]
    assert caught.value.__cause__ is None
    assert multiprocessing.active_children() == []


def test_a_killed_worker_process_is_one_error_and_the_loader_continues() -> None:
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
    "interrupted": interrupted,
    "closed": EchoLoader.close,
    "forgotten": lambda _: None,
}


def assert_all_workers_end_soon() -> None:
    gc.collect()
    assert soon(lambda: not multiprocessing.active_children())
    assert_no_threads_soon()


@needs(str(OPEN), present=OPEN.exists(), remedy="nothing else lists a process's open files")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("iterated", [False, True])
def test_no_process_and_no_pipe_remains(end: str, iterated: bool) -> None:
    assert_all_workers_end_soon()
    before = pipes()
    source: Any = ragged_stream if iterated else Dataset(40)
    loader = EchoLoader(source, 4, num_workers=2, processes=True, collate=list)
    next(iter(loader))
    assert len(multiprocessing.active_children()) == 2
    ENDS[end](loader)
    del loader
    assert_all_workers_end_soon()
    assert soon(lambda: pipes() == before)  # another thread closes a forgotten loader


def run(folder: Path, code: str, stop: int | None = None, *, all_of_it: bool = False) -> tuple[int, str, str]:
    """Run a script until it and its child processes have ended. Returns exit code, output and errors."""
    (folder / "script.py").write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(folder / "script.py")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    if stop is not None:
        assert process.stdout.readline() == "started\n"
        (os.killpg if all_of_it else os.kill)(process.pid, stop)
    output, errors = process.communicate(timeout=100)  # returns when no child holds the pipes
    return process.returncode, output, errors


DRAWS = """
import torch
from torch.utils.data import Dataset
from adaecho import EchoLoader

class Noisy(Dataset):
    transform = staticmethod(lambda row: row + torch.rand(1))

    def __len__(self):
        return 64

    def __getitem__(self, row):
        return self.transform(row)

loader = EchoLoader(Noisy(), 8, num_workers=2, epochs=2, max_bad_examples=40)
print(sum(len(batch) for _ in range(2) for batch in loader))
"""


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    code, output, errors = run(tmp_path, DRAWS)
    assert (code, output) == (0, "256\n"), errors


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
    [(signal.SIGKILL, False), (signal.SIGINT, True)],
    ids=["SIGKILL", "SIGINT of the process group"],
)
def test_worker_processes_end_with_their_parent(tmp_path: Path, stop: int, all_of_it: bool) -> None:
    code, _, errors = run(tmp_path, SLOW, stop, all_of_it=all_of_it)
    assert code == -stop
    assert errors.count("Traceback") == (stop == signal.SIGINT), errors
    assert stop != signal.SIGINT or errors.splitlines()[-1].startswith("KeyboardInterrupt")
