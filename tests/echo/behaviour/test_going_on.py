"""How iterations end; after an error, with two iterators, in a fork, from a state that is none."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from adaecho import EchoLoader
from adaecho.echo.state import VERSION
from tests.echo.others import plain
from tests.echo.sources import IDS, SOURCES, VARIANTS, Bad, Broken, Dataset, Stream, arrays, labels
from tests.helpers import through_torch_save

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


@WORKERS
@pytest.mark.parametrize("epochs", [1, None])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_a_loader_that_failed_begins_a_new_pass_or_where_it_is_endless_goes_on(
    variant: dict[str, Any], epochs: int | None, num_workers: int
) -> None:
    common: dict[str, Any] = {"epochs": epochs, "order": "stored", "num_workers": num_workers, **variant}
    common["shuffle_buffer"] = 0 if epochs else 3
    source, taken = Broken(20, *range(10, 20), error=ConnectionError), list[list[int]]()
    with EchoLoader(source, 4, **common) as loader, EchoLoader(Dataset(20), 4, **common) as sound:
        iterator = iter(loader)
        with pytest.raises(ConnectionError):
            taken.extend(batch["label"].tolist() for batch in iterator)
        goes_on = "begins a new" if epochs else "continues after the last batch"
        with pytest.raises(RuntimeError, match=rf"\(ConnectionError\); iter\(loader\) {goes_on}") as caught:
            next(iterator)
        assert isinstance(caught.value.__cause__, ConnectionError)
        source.bad = ()  # a disk that fails now and then
        if epochs is None:
            del iterator
            taken += labels(loader, 8)
            assert taken == labels(sound, len(taken))
        elif variant.get("factor") == 2.5:  # keyed by how many batches there were before
            assert {label for batch in labels(loader) for label in batch} == set(range(20))
        else:
            list(sound)
            assert labels(loader) == labels(sound)


def test_one_iterator_after_the_other_continues() -> None:
    loader = EchoLoader(Dataset(12), 4, epochs=1)
    for _ in range(3):
        next(iter(loader))
        iterator = iter(loader)
        next(iterator)
        iterator = iter(loader)
        assert len(list(iterator)) == 3


FORK = """
import atexit, os, sys, threading, time

# What a thread lets go of while the interpreter ends may abort the process.
atexit.register(lambda: threading.active_count() > 1 and os._exit(3))  # the last of all
from adaecho import EchoLoader

class Slow:
    thread_safe = True
    def __len__(self): return 1000
    def __getitem__(self, index):
        time.sleep(0.05)
        return index

def said(use):
    try:
        use()
        return "worked"
    except RuntimeError as error:
        assert "was forked" in str(error), error
        return "refused"
    except ValueError:
        return "checked"

for arguments in ({}, {"epochs": 1}, {"echo": "batch", "factor": 2}):
    for started in (True, False):
        loader = EchoLoader(Slow(), 4, num_workers=2, **arguments)
        if started:
            iterator = iter(loader)
            next(iterator)
        child = os.fork()
        if not child:
            for use in (lambda: next(iter(loader)), loader.state_dict, lambda: loader.load_state_dict({})):
                print(said(use), flush=True)
            sys.exit(0)  # not os._exit: what runs at exit must not wait either
        assert os.waitpid(child, 0)[1] == 0, (arguments, started)
        next(iter(loader))
        loader.close()
"""


LAST = """
import os, sys
import numpy as np
from adaecho import EchoLoader

os.kept = iter(EchoLoader(np.arange(1000), 4, num_workers=2))  # until modules are emptied
next(os.kept)
child = os.fork()
if child:
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [(FORK, (["refused"] * 3 + ["worked", "worked", "checked"]) * 3), (LAST, [])],
    ids=["a child is told instead of hanging", "an iterator outlives the modules"],
)
def test_a_process_that_forks_ends_in_silence(script: str, said: list[str]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", said)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: {}, "the state has format version None"),
        (lambda _: None, "the state has format version None"),
        (lambda _: torch.nn.Linear(2, 2).state_dict(), "the state has format version None"),
        *[
            (
                lambda state, version=version: {**state, "version": version},
                f"version {version!r}, .* reads {VERSION}; pass",
            )
            for version in (2, VERSION + 1, "3")
        ],
    ],
)
def test_a_state_that_is_none_or_of_another_format_is_refused_and_changes_nothing(
    change: Any, message: str
) -> None:
    loader = EchoLoader(arrays(20), 4, order="stored")
    state = loader.state_dict()
    assert labels(loader, 1) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(change(state))
    assert labels(loader, 1) == [[4, 5, 6, 7]]
    loader.load_state_dict(state)
    assert labels(loader, 1) == [[0, 1, 2, 3]]


@WORKERS
@pytest.mark.parametrize("echo", ["none", "batch", "example_before_augmentation"])
@pytest.mark.parametrize("source", [Dataset, Stream])
def test_bad_examples_at_the_end_of_a_pass_are_listed_and_counted(
    source: Any, echo: str, num_workers: int
) -> None:
    common: dict[str, Any] = {"order": "stored", "echo": echo, "epochs": 1, "num_workers": num_workers}

    def make(state: Any = None) -> EchoLoader:
        loader = EchoLoader(source(10), 2, decode=Bad(5, 6, 7, 8, 9), max_bad_examples=10, **common)
        if state is not None:
            loader.load_state_dict(through_torch_save(state))
        return loader

    with make() as loader:
        batches = labels(loader)
        assert batches == [[0, 1], [2, 3], [4]]
        assert [example["index"] for example in loader.bad_examples] == [5, 6, 7, 8, 9]
        assert loader.fresh_examples == 10
        with make(loader.state_dict()) as restored:
            assert (restored.fresh_examples, len(restored.bad_examples)) == (10, 5)
            assert labels(restored) == batches
            assert (restored.fresh_examples, len(restored.bad_examples)) == (20, 5)
    # After the last batch, the end not yet met: restoring meets it, and counts what the batches took.
    with make() as loader:
        labels(loader, 3)
        with make(loader.state_dict()) as restored:
            assert (restored.fresh_examples, len(restored.bad_examples)) == (5, 5)
            assert labels(restored) == batches


@WORKERS
@pytest.mark.parametrize("where", ["decode", "augment", "collate", "source"])
def test_a_stop_iteration_of_the_users_code_does_not_end_the_loop(where: str, num_workers: int) -> None:
    def stop(*_: Any) -> Any:
        return next(iter(()))

    source = Broken(10, 5, error=StopIteration) if where == "source" else Dataset(10)
    stages: dict[str, Any] = {} if where == "source" else {where: stop}
    with EchoLoader(source, 2, num_workers=num_workers, order="stored", **stages) as loader:
        for _ in range(2):  # the next batch is tried again
            with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
                labels(loader, 10)
            assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize("kind", ["map", "stream", "batches"])
@WORKERS
def test_an_abandoned_pass_is_followed_by_a_whole_one(kind: str, num_workers: int) -> None:
    """What was read ahead of it counts nothing."""
    common: dict[str, Any] = {"epochs": 1, "num_workers": num_workers}
    if kind == "batches":
        batches = DataLoader(list(range(10)), batch_size=4)  # type: ignore[arg-type]
        loader, fresh = EchoLoader(batches, None, echo="batch", factor=2, **common), 4
    else:
        loader, fresh = EchoLoader(SOURCES[kind][0](10), 4, order="stored", shuffle_buffer=2, **common), 6
    next(iter(loader))
    assert loader.fresh_examples == fresh
    rows = [row for batch in plain(list(loader)) for row in (batch if kind == "batches" else batch["label"])]
    assert sorted(rows) == sorted([*range(10)] * (2 if kind == "batches" else 1))
    assert loader.fresh_examples == fresh + 10


@WORKERS
@pytest.mark.parametrize("source", [arrays(20), list(range(20))], ids=["arrays", "rows"])
def test_an_iteration_that_went_on_from_a_state_can_be_left(source: Any, num_workers: int) -> None:
    """The state may have come after ``iter()``: what follows is a new iteration all the same."""
    with EchoLoader(source, 4, epochs=1, num_workers=num_workers) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        loader.load_state_dict(state)
        next(iterator)
        del iterator
        assert len(loader) == len(list(loader)) == 5
        assert loader.epoch == 2
