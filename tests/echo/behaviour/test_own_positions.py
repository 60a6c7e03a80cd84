"""Sources that tell and take their own position: a resume begins there, and reads next to nothing again."""

import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from adaecho import EchoLoader
from tests.echo.sources import held_serials
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

    def plain(self) -> dict[str, Any]:
        version, words, gauss = self.rng.getstate()
        return {"rng": [version, list(words), gauss], "rows": list(self.rows), "next": self.next}

    def load(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["rng"]
        self.rng.setstate((version, tuple(words), gauss))
        self.rows, self.next = list(state["rows"]), state["next"]


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
        return self.numbers.plain()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers.load(state)
        self.restored = True


class TellingIterator(Numbers):
    """Its position is bytes, as of some of Grain's."""

    def get_state(self) -> bytes:
        return repr(self.plain()).encode()

    def set_state(self, state: bytes) -> None:
        self.load(eval(state.decode()))


class OfTellingIterators:
    """Its iterators tell and take positions."""

    number = 0

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        iterator = TellingIterator()
        for _ in range(self.number + 1):
            iterator.begin()
        return iterator


def inner() -> Any:
    return EchoLoader(np.arange(LENGTH), 1, epochs=1, shuffle_buffer=20)


SOURCES: dict[str, Callable[[], Any]] = {
    "source": LoaderOfItsOwn,
    "iterators": OfTellingIterators,
    "EchoLoader": inner,
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("echo", ["example_before_augmentation", "batch"])
@pytest.mark.parametrize("name", SOURCES)
def test_a_resume_anywhere_gives_the_same_batches_and_reads_little_again(
    name: str, echo: str, num_workers: int
) -> None:
    torch.manual_seed(0)
    whole = name == "EchoLoader"
    common: dict[str, Any] = {"echo": echo, "factor": 2, "num_workers": num_workers, "prefetch": 1}
    if whole:
        common["echo"] = "batch"
    else:
        common["shuffle_buffer"] = 10
    batch_size = None if whole else 4

    def make() -> EchoLoader:
        return EchoLoader(SOURCES[name](), batch_size, **common)

    def take(loader: EchoLoader, count: int) -> list[Any]:
        return [torch.as_tensor(batch).flatten().tolist() for batch in islice(loader, count)]

    per_pass = LENGTH * 2 if whole else LENGTH // 2
    stops = sorted({1, 7, per_pass // 2, per_pass - 1, per_pass, per_pass + 9, 2 * per_pass + 3})
    batches: list[Any] = []
    states = []
    with make() as loader:
        for stop in stops:
            batches += take(loader, stop - len(batches))
            states.append(through_torch_save(loader.state_dict()))
        batches += take(loader, 12)
    for stop, state in zip(stops, states, strict=True):
        torch.manual_seed(1)  # what draws from the global generators draws otherwise
        with make() as restored:
            restored.load_state_dict(state)
            if not whole:
                oldest = min([*held_serials(restored), state["next_index"]])
                # To the oldest in the buffer, and a mark's distance.
                assert restored.reread_examples <= state["next_index"] - oldest + 20
            assert take(restored, 12) == batches[stop : stop + 12], stop


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
def test_an_order_that_a_position_leaves_out_is_noticed_also_just_at_that_position(
    batch_size: int | None,
) -> None:
    def make() -> EchoLoader:
        return EchoLoader(LeavesOutItsOrder(), batch_size, epochs=1, num_workers=1, prefetch=20)

    for batches in (7, 8, 16, 19, 25):  # about every 16th example, or batch, has a position
        with make() as loader, make() as restored:
            iterator = iter(loader)
            for _ in range(batches):
                next(iterator)
            while loader.examples_read < loader.fresh_examples + 16:  # a position has been asked for there
                time.sleep(0.001)
            with pytest.raises(ValueError, match="is another one than when the state was saved"):
                restored.load_state_dict(loader.state_dict())


class EndsAtItsEnd:
    """After a pass it tells its end, and beginning there gives the rest of that pass: nothing."""

    def __init__(self) -> None:
        self.start = self.next = self.number = 0

    def __iter__(self) -> Iterator[Any]:
        rows = np.random.default_rng(self.number).permutation(40)
        self.next, self.start = self.start, 0
        while self.next < 40:
            self.next += 1
            yield rows[self.next - 1 : self.next]
        self.number += 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, "number": self.number - (self.next == 40)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start, self.number = state["next"], state["number"]


@pytest.mark.parametrize("epochs", [1, None])
def test_the_rest_of_a_pass_that_had_ended_is_passed_over(epochs: int | None) -> None:
    loader, resumed = (EchoLoader(EndsAtItsEnd(), 10, epochs=epochs) for _ in range(2))
    first = [batch.tolist() for batch in islice(loader, 4)]
    if epochs:
        assert list(loader) != [], "the pass after"
    state = through_torch_save(loader.state_dict())
    expected = [batch.tolist() for batch in islice(loader, 4)]
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in islice(resumed, 4)] == expected != first


def test_an_iterator_that_tells_its_position_goes_back_although_it_is_read_once() -> None:
    def make() -> EchoLoader:
        iterator = TellingIterator()
        iterator.begin()
        return EchoLoader(iterator, 4, shuffle_buffer=8)

    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    expected = [batch.tolist() for batch in islice(loader, 5)]
    for other in (loader, make()):
        other.load_state_dict(through_torch_save(state))
        assert [batch.tolist() for batch in islice(other, 5)] == expected


def test_a_position_is_of_no_use_to_what_takes_none() -> None:
    loader = EchoLoader(OfTellingIterators(), 4)
    next(iter(loader))
    with pytest.raises(ValueError, match="told its own position when the state was saved"):
        EchoLoader(lambda: map(np.array, range(40)), 4).load_state_dict(loader.state_dict())
    loader = EchoLoader(DataLoader(TensorDataset(torch.arange(40)), 4), None)
    list(islice(loader, 2))
    with pytest.raises(ValueError, match="told its own position when the state was saved"):
        EchoLoader(OfTellingIterators(), None).load_state_dict(loader.state_dict())
