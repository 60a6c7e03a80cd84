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


@pytest.fixture(params=["rows", "echoed rows", "stream"])
def makers(request: pytest.FixtureRequest) -> list[Make]:
    """Of each kind: alone and of each of two ranks, without and with threads."""
    ranks = ((0, 1), (0, 2), (1, 2))
    return [maker(request.param, num_workers, *rank) for num_workers in (0, 2) for rank in ranks]


def gone_on(make: Make, state: Any, *counts: int | None) -> tuple[list[Any], Any]:
    """Of a loader from a state on: the batches of iterations, up to so many of each; and its state then."""
    with make() as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [labels(loader, count) for count in counts], through_torch_save(loader.state_dict())


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([(1,), (2,), (4,)], id="wrong or repeated examples, huggingface/datasets #7901"),
        pytest.param([(3,)], id="short epochs, huggingface/datasets #7447"),
        pytest.param([(None, 0), (None, None, 2)], id="no order in a position, huggingface/accelerate #4195"),
        pytest.param([(None, 3)], id="the first epoch again, huggingface/accelerate #2016"),
        pytest.param([(), (3,)], id="a state taken at once, meta-pytorch/data #1251"),
    ],
)
def test_the_rest_of_the_pass_and_the_next_come(places: list[Any], makers: list[Make]) -> None:
    """After so many batches of each pass, where None takes all, by a state that is handed on."""
    for make in makers:
        passes, _ = gone_on(make, None, *[None] * (max(map(len, places)) + 1))
        assert passes[0] != passes[1]
        for counts in places:
            _, state = gone_on(make, None, *counts)
            _, again = gone_on(make, state)
            *whole, within = counts or (0,)
            rest, following = passes[len(whole)][within:], passes[len(whole) + 1]
            assert gone_on(make, again, None, None)[0] == [rest, following]


def test_a_load_after_iter_is_not_ignored(makers: list[Make]) -> None:
    """PrimeIntellect-ai/prime-rl #3332: threads have read ahead from the beginning."""
    for make in makers:
        _, state = gone_on(make, None, 4)
        (expected,), _ = gone_on(make, state, None)
        for ahead in (0, 2):
            with make() as other:
                iterator = iter(other)
                labels(iterator, ahead)
                other.next_fresh_examples()
                other.load_state_dict(state)
                assert labels(iterator) == expected


def test_a_second_resume_counts_on(makers: list[Make]) -> None:
    """KempnerInstitute/KempnerForge #57: it counted from the first."""
    for make in makers:
        (expected,), _ = gone_on(make, None, None)
        state, taken = None, []
        while len(taken) < len(expected):
            (more,), state = gone_on(make, state, 3)
            taken += more
        assert taken == expected
