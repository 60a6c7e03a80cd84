"""Seven resume bugs of other loaders, each as a test."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from tests.echo.sources import Dataset, Stream, labels
from tests.helpers import through_torch_save

LENGTH, BATCH_SIZE = 41, 4
Make = Callable[[], EchoLoader]


class Reordered(Stream):
    """Another order for each epoch, by ``set_epoch``."""

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

    def stream() -> EchoLoader:  # sharded here, because the loader does not know the length of a stream
        source = Reordered(LENGTH)
        source.examples = source.examples[rank::world_size]
        return EchoLoader(source, BATCH_SIZE, **common)

    return stream


@pytest.fixture(params=["rows", "echoed rows", "stream"])
def makers(request: pytest.FixtureRequest) -> list[Make]:
    """Without ranks, with two threads, and on the second of two ranks."""
    return [maker(request.param, *given) for given in ((0, 0, 1), (2, 0, 1), (0, 1, 2))]


def resumed(make: Make, state: Any, *counts: int | None) -> tuple[list[Any], Any]:
    """Load a state and take batches of several epochs. Returns the batches and the new state."""
    with make() as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [labels(loader, count) for count in counts], through_torch_save(loader.state_dict())


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([(1,), (2,), (4,)], id="wrong or repeated examples, huggingface/datasets #7901"),
        pytest.param([(3,)], id="short epochs, huggingface/datasets #7447"),
        pytest.param([(None, 0), (None, None, 2)], id="state without order, huggingface/accelerate #4195"),
        pytest.param([(None, 3)], id="first epoch repeated, huggingface/accelerate #2016"),
        pytest.param([(), (3,)], id="state before the first batch, meta-pytorch/data #1251"),
    ],
)
def test_a_resume_continues_with_the_next_batch(places: list[Any], makers: list[Make]) -> None:
    """Stop after these numbers of batches in each epoch, where None is all, and resume twice."""
    for make in makers:
        passes, _ = resumed(make, None, *[None] * (max(map(len, places)) + 1))
        assert passes[0] != passes[1]
        for counts in places:
            _, state = resumed(make, None, *counts)
            _, again = resumed(make, state)
            *whole, within = counts or (0,)
            rest, following = passes[len(whole)][within:], passes[len(whole) + 1]
            assert resumed(make, again, None, None)[0] == [rest, following]


def test_a_state_loaded_after_iter_takes_effect(makers: list[Make]) -> None:
    """PrimeIntellect-ai/prime-rl #3332: threads have prefetched from the start."""
    for make in makers:
        _, state = resumed(make, None, 4)
        (expected,), _ = resumed(make, state, None)
        for ahead in (0, 2):
            with make() as other:
                iterator = iter(other)
                labels(iterator, ahead)
                other.next_fresh_examples()
                other.load_state_dict(state)
                assert labels(iterator) == expected


def test_a_second_resume_continues(makers: list[Make]) -> None:
    """KempnerInstitute/KempnerForge #57: the second resume counted from the first one."""
    for make in makers:
        (expected,), _ = resumed(make, None, None)
        state, taken = None, []
        while len(taken) < len(expected):
            (more,), state = resumed(make, state, 3)
            taken += more
        assert taken == expected
