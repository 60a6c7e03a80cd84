"""Sources that tell and take their own position: a resume begins there, and reads next to nothing again."""

import itertools
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from adaecho import EchoLoader
from tests.echo.others import plain, stateful_data_loader
from tests.echo.sources import held_serials, soon
from tests.helpers import through_torch_save

LENGTH = 200


class Numbers:
    """An iterator that shuffles each pass by a generator of its own, as a stream does; tells its state."""

    def __init__(self) -> None:
        self.rng, self.rows, self.next = random.Random(7), list(range(LENGTH)), LENGTH

    def begin(self) -> None:
        self.rng.shuffle(self.rows)
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.next == LENGTH:
            raise StopIteration
        self.next += 1
        return np.array([self.rows[self.next - 1]])

    def get_state(self) -> bytes:
        """Bytes, as of some of Grain's."""
        return repr((self.rng.getstate(), self.rows, self.next)).encode()

    def set_state(self, state: bytes) -> None:
        words, self.rows, self.next = eval(state.decode())
        self.rng.setstate(words)


class LoaderOfItsOwn:
    """Tells and takes positions itself, as a StatefulDataLoader does. No order of a pass comes again."""

    def __init__(self) -> None:
        self.numbers, self.restored = Numbers(), False

    def __iter__(self) -> Iterator[Any]:
        if not self.restored:
            self.numbers.begin()
        self.restored = False
        return iter(lambda: next(self.numbers, None), None)

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers.get_state().decode(), "next": self.numbers.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers.set_state(state["numbers"].encode())
        self.restored = True


class OfTellingIterators:
    number = 0

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        iterator = Numbers()
        for _ in range(self.number + 1):
            iterator.begin()
        return iterator


SOURCES: dict[str, Callable[[], Any]] = {
    "source": LoaderOfItsOwn,
    "iterators": OfTellingIterators,
    "EchoLoader": lambda: EchoLoader(np.arange(LENGTH), 4, epochs=1, shuffle_buffer=20),
}
OF_EXAMPLES = itertools.product(("source", "iterators"), ("example_before_augmentation", "batch"))
PER_PASS = LENGTH // 2  # batches: of four, each example twice or each batch


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("name", "echo"), [*OF_EXAMPLES, ("EchoLoader", "batch")])
def test_a_resume_anywhere_gives_the_same_batches_and_reads_little_again(
    name: str, echo: str, num_workers: int
) -> None:
    torch.manual_seed(0)
    whole = name == "EchoLoader"
    given: dict[str, Any] = {"batch_size": None} if whole else {"batch_size": 4, "shuffle_buffer": 10}

    def make() -> EchoLoader:
        return EchoLoader(SOURCES[name](), echo=echo, factor=2, num_workers=num_workers, prefetch=1, **given)

    stops = (1, 7, PER_PASS // 2, PER_PASS - 1, PER_PASS, PER_PASS + 9, 2 * PER_PASS + 3)
    batches: list[Any] = []
    states = []
    with make() as loader:
        for stop in stops:
            batches += plain(list(islice(loader, stop - len(batches))))
            states.append(through_torch_save(loader.state_dict()))
        batches += plain(list(islice(loader, 12)))
    for stop, state in zip(stops, states, strict=True):
        torch.manual_seed(1)  # what draws from the global generators draws otherwise
        with make() as restored:
            restored.load_state_dict(state)
            if not whole:
                oldest = min([*held_serials(restored), state["next_index"]])
                # To the oldest in the buffer, and a mark's distance.
                assert restored.reread_examples <= state["next_index"] - oldest + 20
            assert plain(list(islice(restored, 12))) == batches[stop : stop + 12], stop


class LeavesOutItsOrder:
    """Draws each pass anew, and tells only how far it has come."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        rows = np.random.permutation(LENGTH)
        while self.next < LENGTH:
            self.next += 1
            yield rows[self.next - 1 : self.next]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize("batch_size", [None, 6])
def test_an_order_that_a_position_leaves_out_is_noticed_also_just_at_that_position(batch_size: Any) -> None:
    for batches in (7, 8, 16, 19, 25):  # about every 16th example, or batch, has a position
        loader, restored = (
            EchoLoader(LeavesOutItsOrder(), batch_size, epochs=1, num_workers=1, prefetch=20)
            for _ in range(2)
        )
        with loader, restored:
            iterator = iter(loader)
            list(islice(iterator, batches))
            # A position has been asked for there.
            assert soon(lambda loader=loader: loader.examples_read >= loader.fresh_examples + 16)
            with pytest.raises(ValueError, match="differs from the example in the saved state"):
                restored.load_state_dict(loader.state_dict())


class EndsAtItsEnd:
    """After a pass it tells its end, and beginning there gives the rest of that pass: nothing."""

    def __init__(self) -> None:
        self.start = self.next = self.number = 0

    def __iter__(self) -> Iterator[Any]:
        self.next, self.start = self.start, 0
        while self.next < 40:
            self.next += 1
            yield np.random.default_rng(self.number).permutation(40)[self.next - 1 : self.next]
        self.number += 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, "number": self.number - (self.next == 40)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start, self.number = state["next"], state["number"]


@pytest.mark.parametrize("epochs", [1, None])
def test_the_rest_of_a_pass_that_had_ended_is_passed_over(epochs: int | None) -> None:
    loader, resumed = (EchoLoader(EndsAtItsEnd(), 10, epochs=epochs) for _ in range(2))
    first = plain(list(islice(loader, 4)))
    if epochs:
        assert list(loader) != [], "the pass after"
    state = through_torch_save(loader.state_dict())
    expected = plain(list(islice(loader, 4)))
    resumed.load_state_dict(state)
    assert plain(list(islice(resumed, 4))) == expected != first


def test_an_iterator_that_tells_its_position_goes_back_although_it_is_read_once() -> None:
    loaders = []
    for _ in range(2):
        iterator = Numbers()
        iterator.begin()
        loaders.append(EchoLoader(iterator, 4, shuffle_buffer=8))
    next(iter(loaders[0]))
    state = loaders[0].state_dict()
    expected = plain(list(islice(loaders[0], 5)))
    for loader in loaders:
        loader.load_state_dict(through_torch_save(state))
        assert plain(list(islice(loader, 5))) == expected


def test_a_position_is_of_no_use_to_what_takes_none() -> None:
    data_loader = DataLoader(TensorDataset(torch.arange(40)), 4)
    for told, untold, size in (
        (OfTellingIterators(), lambda: map(np.array, range(40)), 4),
        (data_loader, OfTellingIterators(), None),
    ):
        loader = EchoLoader(told, size)
        list(islice(loader, 2))
        with pytest.raises(ValueError, match="had a position when the state was saved"):
            EchoLoader(untold, size).load_state_dict(loader.state_dict())


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> tuple[int, float]:
        return row, random.random()


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_a_loader_that_tells_its_position_and_draws_otherwise_is_refused() -> None:
    def make() -> EchoLoader:
        inner = stateful_data_loader(Drawing(), 4, shuffle=True)
        return EchoLoader(inner, batch_size=None, echo="batch", factor=2, epochs=1)

    with make() as loader, make() as restored:
        list(islice(iter(loader), 13))
        with pytest.raises(ValueError, match=r"differs from the example in .*pass a DataLoader of torch"):
            restored.load_state_dict(loader.state_dict())
