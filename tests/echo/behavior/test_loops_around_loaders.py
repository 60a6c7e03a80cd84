"""Training loops around loaders of other libraries: a resume is exact, or it is refused."""

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

PER_EPOCH = 12  # batches: six, twice each
EPOCHS, TOTAL, STOPS = 3, 40, (5, 13, 20)  # none at the end of an epoch of any loop


class Progress(NamedTuple):
    """Progress of a training loop: the epoch, and the batches of this epoch and of all epochs."""

    epoch: int = 0
    of_epoch: int = 0
    of_all: int = 0


Loop = Callable[[EchoLoader, Progress], Iterator[Any]]


def epochs(loader: EchoLoader, at: Progress, *, sets_epoch: bool = False) -> Iterator[Any]:
    for epoch in range(at.epoch, EPOCHS):
        if sets_epoch:
            loader.set_epoch(epoch)
        for batch in loader:
            yield epoch, batch


def short_epochs(loader: EchoLoader, at: Progress) -> Iterator[Any]:
    taken = at.of_epoch
    for epoch in range(at.epoch, 2 * EPOCHS):
        for batch in loader:
            taken += 1
            yield epoch, batch
            if taken == 9:
                break
        taken = 0


def steps(loader: EchoLoader, at: Progress) -> Iterator[Any]:
    """Take the batches of about three epochs in one iteration."""
    for batch in islice(loader, TOTAL - at.of_all):
        yield 0, batch


LOADERS = others.LOADERS | others.MORE
LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "set_epoch": (partial(epochs, sets_epoch=True), {"epochs": 1}),
    "short epochs": (short_epochs, {"epochs": 1}),
    "several epochs": (steps, {"epochs": EPOCHS}),
    "shuffled batches": (steps, {"batch_shuffle_buffer": 3, "num_workers": 1}),
    "examples, factor 1.5": (
        steps, {"echo": "example_before_augmentation", "factor": 1.5, "shuffle_buffer": 9, "num_workers": 1}
    ),
}  # fmt: skip


def rows_of(batch: Any) -> list[int]:
    batch = batch["row"] if isinstance(batch, dict) else batch
    return [row for part in batch for row in (part if isinstance(part, list) else [part])]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def outcome(loop: str, loader: str, folder: Path, stops: Sequence[int]) -> tuple[list[str], list[Any]]:
    """Compare a resume at each stop with the uninterrupted run. Returns the outcomes and that run."""
    drive, arguments = LOOPS[loop]
    size = None if "shuffle_buffer" in arguments else SIZE

    def make() -> EchoLoader:
        source = LOADERS[loader](folder, size)
        return EchoLoader(source, None if size else SIZE, **{"echo": "batch", "factor": 2, **arguments})

    def resumed(at: Progress, state: Any) -> str:
        seed_all(2)
        with make() as other:
            try:
                other.load_state_dict(state)
            except ValueError as error:
                return f"refused: {error}"
            got, rest = [(epoch, plain(batch)) for epoch, batch in drive(other, at)], seen[at.of_all :]
        pairs = enumerate(zip(got, rest, strict=False))
        same = next((number for number, (one, other) in pairs if one != other), len(rest))
        return "exact" if got == rest else f"{same} of {len(rest)}, {len(got)} came, in epoch {at.epoch}"

    seed_all(1)
    seen: list[Any] = []
    stopped: list[tuple[Progress, Any]] = []
    with make() as uninterrupted:
        for epoch, batch in drive(uninterrupted, Progress()):
            seen.append((epoch, plain(batch)))
            if len(seen) in stops:
                of_epoch = sum(other == epoch for other, _ in seen)
                # A loop that resumes at the end of an epoch begins the next one
                ended = "epochs" in arguments and drive is not steps and of_epoch == PER_EPOCH
                progress = (
                    Progress(epoch + 1, 0, len(seen)) if ended else Progress(epoch, of_epoch, len(seen))
                )
                stopped.append((progress, through_torch_save(uninterrupted.state_dict())))
    return [resumed(*stop) for stop in stopped], seen


# Workers start slowly
SLOW = {"DataLoader, batch_sampler and workers", "DataLoader, persistent workers"}
CASES = [
    case for case in itertools.product(LOOPS, LOADERS) if case[1] not in SLOW or case[0] == "short epochs"
]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:'set_vital'")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_resume_is_exact_or_refused(case: tuple[str, str], tmp_path: Path) -> None:
    outcomes, _ = outcome(*case, tmp_path, STOPS)
    if case[1] in REFUSED:
        assert all(re.match(f"refused: load_state_dict: .*{REMEDY}", one) for one in outcomes), outcomes
        assert len(outcomes) == len(STOPS)
    else:
        assert outcomes == ["exact"] * len(STOPS)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore:'set_vital'")
@pytest.mark.parametrize("loader", sorted(LOADERS.keys() - SLOW - {"nodes, unseeded"}))
def test_a_resume_at_the_end_of_an_epoch_begins_the_next(loader: str, tmp_path: Path) -> None:
    (resumed,), seen = outcome("set_epoch", loader, tmp_path, [PER_EPOCH])
    assert len(seen) == EPOCHS * PER_EPOCH
    assert re.match(f"refused: load_state_dict: .*{REMEDY}" if loader in REFUSED else "exact", resumed), (
        resumed
    )
    for epoch in range(EPOCHS):
        used = Counter(row for number, batch in seen if number == epoch for row in rows_of(batch))
        assert sum(used.values()) == 2 * ROWS
        assert loader.endswith("weighted") or set(used.values()) == {2}
