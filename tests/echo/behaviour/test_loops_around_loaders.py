"""Ten loops around many loaders: after a resume the rest of the undisturbed run comes, or it is refused."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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


def epochs(loader: EchoLoader, at: Place, *, told: bool = False) -> Iterator[Any]:
    for epoch in range(at.epoch, EPOCHS):
        if told:
            loader.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


def short_epochs(loader: EchoLoader, at: Place) -> Iterator[Any]:
    taken = at.of_epoch
    for epoch in range(at.epoch, 2 * EPOCHS):
        for batch in loader:
            taken += 1
            yield epoch, batch
            if taken == 9:
                break
        taken = 0


def steps(loader: EchoLoader, at: Place) -> Iterator[Any]:
    """As many as three epochs take, or the loader's own end."""
    for batch in islice(loader, TOTAL - at.of_all):
        yield 0, batch


LOADERS = others.LOADERS | others.MORE
LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "epochs": (epochs, {"epochs": 1}),
    "epochs, told": (partial(epochs, told=True), {"epochs": 1}),
    "epochs, left early": (short_epochs, {"epochs": 1}),
    "epochs at once": (steps, {"epochs": EPOCHS}),
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
    batch = batch["row"] if isinstance(batch, dict) else batch
    return [row for part in batch for row in (part if isinstance(part, list) else [part])]


def of_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def outcome(loop: str, loader: str, folder: Path, stops: Sequence[int]) -> tuple[list[str], list[Any]]:
    """Of each stop: how the resumed run compares with the undisturbed one's rest; and that run."""
    drive, arguments = LOOPS[loop]
    size = None if "shuffle_buffer" in arguments else SIZE

    def make() -> EchoLoader:
        source = LOADERS[loader](folder, size)
        return EchoLoader(source, None if size else SIZE, **{"echo": "batch", "factor": 2, **arguments})

    def resumed(at: Place, state: Any) -> str:
        of_seed(2)
        with make() as other:
            try:
                other.load_state_dict(state)
            except ValueError as error:
                return f"refused: {error}"
            got, rest = [(epoch, plain(batch)) for epoch, batch in drive(other, at)], seen[at.of_all :]
        pairs = enumerate(zip(got, rest, strict=False))
        same = next((number for number, (one, other) in pairs if one != other), len(rest))
        return "exact" if got == rest else f"{same} of {len(rest)}, {len(got)} came, in epoch {at.epoch}"

    of_seed(1)
    seen: list[Any] = []
    stopped: list[tuple[Place, Any]] = []
    with make() as undisturbed:
        for epoch, batch in drive(undisturbed, Place()):
            seen.append((epoch, plain(batch)))
            if len(seen) in stops:
                of_epoch = sum(other == epoch for other, _ in seen)
                # At its end the loop that goes on is in the next.
                ended = "epochs" in arguments and drive is not steps and of_epoch == EACH_EPOCH
                place = Place(epoch + 1, 0, len(seen)) if ended else Place(epoch, of_epoch, len(seen))
                stopped.append((place, through_torch_save(undisturbed.state_dict())))
    return [resumed(*stop) for stop in stopped], seen


CASES = list(itertools.product(LOOPS, LOADERS))
# Workers are started for each of many passes: the gate has a loop of each kind around them.
OF_THE_GATE = {"epochs, left early", "steps", "examples, factor 1.5"}
DEAR = [(loop, "DataLoader, batch_sampler and workers") for loop in LOOPS if loop not in OF_THE_GATE]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:'set_vital'")
@pytest.mark.parametrize(
    "case",
    first_form(*(case for case in CASES if case not in DEAR), also=(case for case in CASES if case in DEAR)),
    ids="-".join,
)
def test_the_rest_comes_or_is_refused(case: tuple[str, str], tmp_path: Path) -> None:
    outcomes, _ = outcome(*case, tmp_path, STOPS)
    if case[1] in REFUSED:
        assert all(re.match(f"refused: load_state_dict: .*{REMEDY}", one) for one in outcomes), outcomes
        assert len(outcomes) == len(STOPS)
    else:
        assert outcomes == ["exact"] * len(STOPS)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:'set_vital'")
@pytest.mark.parametrize("loop", ["epochs", "epochs, told"])
@pytest.mark.parametrize("loader", sorted(LOADERS.keys() - {"nodes, drawn anew"}))  # with nothing to compare
def test_after_an_epochs_end_the_next_comes(loader: str, loop: str, tmp_path: Path) -> None:
    (resumed,), seen = outcome(loop, loader, tmp_path, [EACH_EPOCH])
    assert len(seen) == EPOCHS * EACH_EPOCH
    assert re.match(f"refused: load_state_dict: .*{REMEDY}" if loader in REFUSED else "exact", resumed), (
        resumed
    )
    for epoch in range(EPOCHS):
        used = Counter(row for number, batch in seen if number == epoch for row in rows_of(batch))
        assert sum(used.values()) == 2 * ROWS
        assert loader.endswith("weighted") or set(used.values()) == {2}
