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


def gone_on(make: Make, state: Any, *counts: int | None) -> tuple[list[Any], Any]:
    """Of a loader from a state on: the batches of iterations, up to so many of each; and its state then."""
    with make() as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [labels(loader, count) for count in counts], through_torch_save(loader.state_dict())


def wrong_or_repeated_examples(make: Make) -> None:
    """huggingface/datasets #7901."""
    ((expected,), _) = gone_on(make, None, None)
    for number in range(1, len(expected), 3):
        _, state = gone_on(make, None, number)
        assert gone_on(make, state, None)[0] == [expected[number:]]


def short_epochs(make: Make) -> None:
    """huggingface/datasets #7447."""
    passes, _ = gone_on(make, None, None, None, None)
    _, state = gone_on(make, None, 3)
    assert gone_on(make, state, None, None, None)[0] == [passes[0][3:], *passes[1:]]


def position_without_order(make: Make) -> None:
    """huggingface/accelerate #4195: at the end of an epoch, and within a later one."""
    passes, _ = gone_on(make, None, None, None, None, None)
    for counts in ([None, 0], [None, None, 2]):
        whole, within = len(counts) - 1, counts[-1]
        _, state = gone_on(make, None, *counts)
        assert gone_on(make, state, None, None)[0] == [passes[whole][within:], passes[whole + 1]]


def the_first_epoch_again(make: Make) -> None:
    """huggingface/accelerate #2016: resumed in the second epoch as if in the first."""
    (first, second), _ = gone_on(make, None, None, None)
    _, state = gone_on(make, None, None, 3)
    assert gone_on(make, state, None)[0] == [second[3:]]
    assert second != first


def a_load_after_iter_is_ignored(make: Make) -> None:
    """PrimeIntellect-ai/prime-rl #3332: threads have read ahead from the beginning."""
    _, state = gone_on(make, None, 4)
    (expected,), _ = gone_on(make, state, None)
    for ahead in (0, 2):
        with make() as other:
            iterator = iter(other)
            labels(iterator, ahead)
            other.next_fresh_examples()
            other.load_state_dict(state)
            assert labels(iterator) == expected


def a_second_resume(make: Make) -> None:
    """KempnerInstitute/KempnerForge #57: the second counted from the first."""
    (expected,), _ = gone_on(make, None, None)
    state, taken = None, []
    while len(taken) < len(expected):
        (more,), state = gone_on(make, state, 3)
        taken += more
    assert taken == expected


def a_state_taken_at_once(make: Make) -> None:
    """meta-pytorch/data #1251: before the first batch, and just after a load."""
    (expected,), _ = gone_on(make, None, None)
    for counts in ((), (3,)):
        _, state = gone_on(make, None, *counts)
        _, again = gone_on(make, state)
        for one in (state, again):
            assert gone_on(make, one, None)[0] == [expected[sum(counts) :]]


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
    if kind == "echoed rows":
        common |= {"echo": "example_before_augmentation", "factor": 1.5}
    if kind != "stream":
        return lambda: EchoLoader(Dataset(LENGTH), BATCH_SIZE, rank=rank, world_size=world_size, **common)

    def stream() -> EchoLoader:  # shared out here: how many examples a rank gets of a stream isn't known
        source = Reordered(LENGTH)
        source.examples = source.examples[rank::world_size]
        return EchoLoader(source, BATCH_SIZE, **common)

    return stream


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["rows", "echoed rows", "stream"])
@pytest.mark.parametrize(
    "bug",
    [wrong_or_repeated_examples, short_epochs, position_without_order, the_first_epoch_again,
     a_load_after_iter_is_ignored, a_second_resume, a_state_taken_at_once],
    ids=lambda bug: bug.__name__,
)  # fmt: skip
def test_a_bug_of_a_peer(bug: Callable[[Make], None], kind: str, num_workers: int, world_size: int) -> None:
    for rank in range(world_size):
        bug(maker(kind, num_workers, rank, world_size))
