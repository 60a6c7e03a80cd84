"""Ten loops around ten loaders: after a resume the rest of the undisturbed run comes, or it is refused."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from tests.echo import others
from tests.echo.others import REFUSED, REMEDY, ROWS, SIZE, plain
from tests.helpers import through_torch_save
from tests.needs import first_form

EACH_EPOCH = 12  # batches: six, twice
EPOCHS, TOTAL, STOPS = 3, 40, (5, 13, 20)  # none at the end of an epoch of any loop


class Place(NamedTuple):
    """Where a training loop is: in which epoch, after how many batches of it, and of all."""

    epoch: int = 0
    of_epoch: int = 0
    of_all: int = 0


Loop = Callable[[EchoLoader, Place], Iterator[Any]]


def epochs(loader: EchoLoader, at: Place) -> Iterator[Any]:
    for epoch in range(at.epoch, EPOCHS):
        for batch in loader:
            yield epoch, batch


def told_epochs(loader: EchoLoader, at: Place) -> Iterator[Any]:
    for epoch in range(at.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


def short_epochs(loader: EchoLoader, at: Place) -> Iterator[Any]:
    """Each is left after nine batches."""
    taken = at.of_epoch
    for epoch in range(at.epoch, 2 * EPOCHS):
        for batch in loader:
            taken += 1
            yield epoch, batch
            if taken == 9:
                break
        taken = 0


def at_once(loader: EchoLoader, _: Place) -> Iterator[Any]:
    for batch in loader:
        yield 0, batch


def steps(loader: EchoLoader, at: Place) -> Iterator[Any]:
    for batch in islice(loader, TOTAL - at.of_all):
        yield 0, batch


LOADERS = others.LOADERS | others.MORE
LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "epochs": (epochs, {"epochs": 1}),
    "epochs, told": (told_epochs, {"epochs": 1}),
    "epochs, left early": (short_epochs, {"epochs": 1}),
    "epochs at once": (at_once, {"epochs": EPOCHS}),
    "steps": (steps, {}),
    "factor 1.5": (epochs, {"epochs": 1, "factor": 1.5}),
    "a thread": (epochs, {"epochs": 1, "num_workers": 1}),
    "batches shuffled": (steps, {"batch_shuffle_buffer": 3}),
    "examples": (epochs, {"epochs": 1, "echo": "example_before_augmentation", "shuffle_buffer": 9}),
    "examples, factor 1.5": (
        steps, {"echo": "example_before_augmentation", "factor": 1.5, "shuffle_buffer": 9, "num_workers": 1}
    ),
}  # fmt: skip


def rows_of(batch: Any) -> list[int]:
    """Of a batch of any of these loaders, in plain numbers."""
    batch = batch["row"] if isinstance(batch, dict) else batch
    return [row for part in batch for row in (part if isinstance(part, list) else [part])]


def of_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def outcome(loop: str, loader: str, folder: Path) -> list[str]:
    """Of each stop: how the resumed run compares with the undisturbed one's rest."""
    drive, arguments = LOOPS[loop]
    size = None if "shuffle_buffer" in arguments else SIZE

    def make() -> EchoLoader:
        source = LOADERS[loader](folder, size)
        return EchoLoader(source, None if size else SIZE, **{"echo": "batch", "factor": 2, **arguments})

    of_seed(1)
    seen: list[Any] = []
    stops: list[tuple[Place, Any]] = []
    with make() as undisturbed:
        for epoch, batch in drive(undisturbed, Place()):
            seen.append((epoch, plain(batch)))
            if len(seen) in STOPS:
                place = Place(epoch, sum(other == epoch for other, _ in seen), len(seen))
                stops.append((place, through_torch_save(undisturbed.state_dict())))
    return [compared(make, drive, seen, place, state) for place, state in stops]


def compared(make: Callable[[], EchoLoader], drive: Loop, seen: list[Any], at: Place, state: Any) -> str:
    of_seed(2)
    with make() as resumed:
        try:
            resumed.load_state_dict(state)
        except ValueError as error:
            return f"refused: {error}"
        got = [(epoch, plain(batch)) for epoch, batch in drive(resumed, at)]
    rest = seen[at.of_all :]
    same = next((n for n, (one, other) in enumerate(zip(got, rest, strict=False)) if one != other), len(rest))
    return "exact" if got == rest else f"{same} of {len(rest)}, {len(got)} came, in epoch {at.epoch}"


CASES = list(itertools.product(LOOPS, LOADERS))
# Their workers are started for each of many passes: the gate has a loop of each kind around them.
DEAR = list(
    itertools.product(
        LOOPS.keys() - {"epochs, left early", "steps", "examples, factor 1.5"},
        ["DataLoader, batch_sampler and workers"],
    )
)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:'set_vital'")
@pytest.mark.parametrize(
    "case",
    first_form(*(case for case in CASES if case not in DEAR), also=(case for case in CASES if case in DEAR)),
    ids="-".join,
)
def test_the_rest_comes_or_is_refused(case: tuple[str, str], tmp_path: Path) -> None:
    loop, loader = case
    outcomes = outcome(loop, loader, tmp_path)
    assert len(outcomes) == len(STOPS)
    if loader in REFUSED:
        assert all(re.match(f"refused: load_state_dict: .*{REMEDY}", one) for one in outcomes), outcomes
    else:
        assert outcomes == ["exact"] * len(STOPS)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:'set_vital'")
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("loader", sorted(LOADERS.keys() - {"nodes, drawn anew"}))  # with nothing to compare
def test_after_an_epochs_end_the_next_comes(loader: str, told: bool, tmp_path: Path) -> None:
    def make() -> EchoLoader:
        return EchoLoader(LOADERS[loader](tmp_path, SIZE), None, epochs=1, echo="batch", factor=2)

    drive = told_epochs if told else epochs
    of_seed(1)
    seen: list[Any] = []
    with make() as undisturbed:
        for number, (epoch, batch) in enumerate(drive(undisturbed, Place()), start=1):
            seen.append((epoch, plain(batch)))
            if number == EACH_EPOCH:
                state = through_torch_save(undisturbed.state_dict())
    assert len(seen) == EPOCHS * EACH_EPOCH
    of_seed(2)
    with make() as resumed:
        if loader in REFUSED:
            with pytest.raises(ValueError, match=REMEDY):
                resumed.load_state_dict(state)
            return
        resumed.load_state_dict(state)
        got = [(epoch, plain(batch)) for epoch, batch in drive(resumed, Place(epoch=1))]
    assert got == seen[EACH_EPOCH:]
    for epoch in range(1, EPOCHS):
        used = Counter(row for number, batch in got if number == epoch for row in rows_of(batch))
        assert sum(used.values()) == 2 * ROWS
        assert loader.endswith("weighted") or set(used.values()) == {2}
