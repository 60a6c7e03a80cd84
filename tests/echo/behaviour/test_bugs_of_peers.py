"""Seven bugs of other loaders' resumes, each as a test: docs/around-your-loader.md has them in a table."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from tests.echo.sources import Dataset, Stream, labels
from tests.helpers import through_torch_save

LENGTH, BATCH_SIZE = 41, 4
Make = Callable[[], EchoLoader]


def resumed(make: Make, state: dict[str, Any]) -> EchoLoader:
    loader = make()
    loader.load_state_dict(through_torch_save(state))
    return loader


def wrong_or_repeated_examples(make: Make) -> None:
    """huggingface/datasets #7901."""
    with make() as loader:
        states, taken = [], []
        for batch in loader:
            taken.append(batch["label"].tolist())
            states.append(loader.state_dict())
    for position, state in list(enumerate(states[:-1]))[::3]:
        with resumed(make, state) as other:
            assert labels(other) == taken[position + 1 :]


def short_epochs(make: Make) -> None:
    """huggingface/datasets #7447."""
    with make() as loader:
        labels(loader, 3)
        state = loader.state_dict()
    with make() as loader:
        passes = [labels(loader) for _ in range(3)]
    with resumed(make, state) as other:
        assert [labels(other) for _ in range(3)] == [passes[0][3:], *passes[1:]]


def position_without_order(make: Make) -> None:
    """huggingface/accelerate #4195: at the end of an epoch, and within a later one."""
    with make() as loader:
        passes = [labels(loader) for _ in range(4)]
    for whole, within in ((1, 0), (2, 2)):
        with make() as loader:
            for _ in range(whole):
                labels(loader)
            labels(loader, within)
            state = loader.state_dict()
        with resumed(make, state) as other:
            assert labels(other) == passes[whole][within:]
            assert labels(other) == passes[whole + 1]


def the_first_epoch_again(make: Make) -> None:
    """huggingface/accelerate #2016: resumed in the second epoch as if in the first."""
    with make() as loader:
        first = labels(loader)
        taken = labels(loader, 3)
        state = loader.state_dict()
    with make() as loader:
        labels(loader)
        second = labels(loader)
    with resumed(make, state) as other:
        assert [*taken, *labels(other)] == second != first


def a_load_after_iter_is_ignored(make: Make) -> None:
    """PrimeIntellect-ai/prime-rl #3332: threads have read ahead from the beginning."""
    with make() as loader:
        labels(loader, 4)
        state = loader.state_dict()
        expected = labels(resumed(make, state))
    for ahead in (0, 2):
        with make() as other:
            iterator = iter(other)
            labels(iterator, ahead)
            other.next_fresh_examples()
            other.load_state_dict(through_torch_save(state))
            assert labels(iterator) == expected


def a_second_resume(make: Make) -> None:
    """KempnerInstitute/KempnerForge #57: the second counted from the first."""
    with make() as loader:
        expected = labels(loader)
    state: dict[str, Any] | None = None
    taken = []
    while len(taken) < len(expected):
        with make() if state is None else resumed(make, state) as loader:
            taken += labels(loader, 3)
            state = loader.state_dict()
    assert taken == expected


def a_state_taken_at_once(make: Make) -> None:
    """meta-pytorch/data #1251: before the first batch, and just after a load."""
    with make() as loader:
        at_once = loader.state_dict()
        expected = labels(loader)
        labels(loader, 3)
        within = loader.state_dict()
        rest = labels(resumed(make, within))
    with resumed(make, at_once) as other:
        assert labels(resumed(make, other.state_dict())) == expected
        assert labels(other) == expected
    with resumed(make, within) as other:
        assert labels(resumed(make, other.state_dict())) == rest
        assert labels(other) == rest


BUGS = [
    wrong_or_repeated_examples,
    short_epochs,
    position_without_order,
    the_first_epoch_again,
    a_load_after_iter_is_ignored,
    a_second_resume,
    a_state_taken_at_once,
]


class Reordered(Stream):
    """Another order for each pass, from ``set_epoch``."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = torch.randperm(len(self.examples), generator=torch.Generator().manual_seed(self.epoch))
        return (self.examples[row] for row in order.tolist())


def maker(kind: str, num_workers: int, rank: int, world_size: int) -> Make:
    common: dict[str, Any] = {"epochs": 1, "num_workers": num_workers, "shuffle_buffer": 6}

    def rows() -> EchoLoader:
        echo = {"echo": "example_before_augmentation", "factor": 1.5} if kind == "echoed rows" else {}
        return EchoLoader(Dataset(LENGTH), BATCH_SIZE, rank=rank, world_size=world_size, **echo, **common)

    def stream() -> EchoLoader:  # shared out here: how many examples a rank gets of a stream isn't known
        source = Reordered(LENGTH)
        source.examples = source.examples[rank::world_size]
        return EchoLoader(source, BATCH_SIZE, **common)

    return stream if kind == "stream" else rows


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["rows", "echoed rows", "stream"])
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_of_a_peer(bug: Callable[[Make], None], kind: str, num_workers: int, world_size: int) -> None:
    for rank in range(world_size):
        bug(maker(kind, num_workers, rank, world_size))
