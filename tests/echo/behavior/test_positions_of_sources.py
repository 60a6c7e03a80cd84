"""Sources with their own state or position: a resume rereads few examples."""

import itertools
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from adaecho import EchoLoader
from tests.echo.others import plain, stateful_data_loader
from tests.echo.sources import held_serials
from tests.helpers import through_torch_save

LENGTH = 200


class Numbers:
    """An iterator with a state that shuffles each epoch with its own generator."""

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
        """Bytes, like the state of some Grain iterators."""
        return repr((self.rng.getstate(), self.rows, self.next)).encode()

    def set_state(self, state: bytes) -> None:
        words, self.rows, self.next = eval(state.decode())
        self.rng.setstate(words)


class StatefulSource:
    """Saves and loads its own state like a StatefulDataLoader. No epoch repeats an order."""

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


class StatefulIterators:
    number = 0

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        iterator = Numbers()
        for _ in range(self.number + 1):
            iterator.begin()
        return iterator


SOURCES: dict[str, Callable[[], Any]] = {
    "source": StatefulSource,
    "iterators": StatefulIterators,
    "EchoLoader": lambda: EchoLoader(np.arange(LENGTH), 4, epochs=1, shuffle_buffer=20),
}
EXAMPLE_SOURCES = itertools.product(("source", "iterators"), ("example_before_augmentation", "batch"))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("name", "echo"), [*EXAMPLE_SOURCES, ("EchoLoader", "batch")])
def test_a_resume_is_exact_and_rereads_few_examples(name: str, echo: str, num_workers: int) -> None:
    torch.manual_seed(0)
    whole = name == "EchoLoader"
    given: dict[str, Any] = {"batch_size": None} if whole else {"batch_size": 4, "shuffle_buffer": 10}

    def make() -> EchoLoader:
        return EchoLoader(SOURCES[name](), echo=echo, factor=2, num_workers=num_workers, prefetch=1, **given)

    epoch = LENGTH // 2  # batches of four, and each example or batch twice
    stops = (1, 7, epoch // 2, epoch - 1, epoch, epoch + 9, 2 * epoch + 3)
    batches: list[Any] = []
    states = []
    with make() as loader:
        for stop in stops:
            batches += plain(list(islice(loader, stop - len(batches))))
            states.append(through_torch_save(loader.state_dict()))
        batches += plain(list(islice(loader, 12)))
    for stop, state in zip(stops, states, strict=True):
        torch.manual_seed(1)
        with make() as restored:
            restored.load_state_dict(state)
            if not whole:
                oldest = min([*held_serials(restored), state["next_index"]])
                # As far back as the oldest example in the buffer, plus the distance of two marks
                assert restored.reread_examples <= state["next_index"] - oldest + 20
            assert plain(list(islice(restored, 12))) == batches[stop : stop + 12], stop


class RandomRows(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> tuple[int, float]:
        return row, random.random()


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_a_stateful_loader_with_unseeded_examples_is_refused() -> None:
    def make() -> EchoLoader:
        inner = stateful_data_loader(RandomRows(), 4, shuffle=True)
        return EchoLoader(inner, batch_size=None, echo="batch", factor=2, epochs=1)

    with make() as loader, make() as restored:
        list(islice(iter(loader), 13))
        with pytest.raises(ValueError, match=r"differs from the example in .*pass a torch DataLoader"):
            restored.load_state_dict(loader.state_dict())


class Seekable:
    """Numbers from any start, with a position in integers of NumPy."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> "SeekablePass":
        return self.iterate_from([0])

    def iterate_from(self, position: Sequence[int]) -> "SeekablePass":
        return SeekablePass(position[0], self.length)


class SeekablePass:
    def __init__(self, next_: int, length: int) -> None:
        self._next, self._length = next_, length

    @property
    def position(self) -> Any:
        return np.array([self._next], dtype=np.int32)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next >= self._length:
            raise StopIteration
        self._next += 1
        return np.array(self._next - 1)


@pytest.mark.parametrize(
    ("batch_size", "buffer", "num_workers", "steps", "length"),
    [(1, 1000, 0, 9000, 700), (32, 5000, 8, 700, 1 << 40)],
    ids=["short passes", "one long pass"],
)
def test_a_large_buffer_is_restored_with_few_reads(
    batch_size: int, buffer: int, num_workers: int, steps: int, length: int
) -> None:
    common: dict[str, Any] = {"batch_size": batch_size, "shuffle_buffer": buffer, "num_workers": num_workers}
    with EchoLoader(Seekable(length), **common) as loader:
        iterator = iter(loader)
        for _ in range(4):  # each state drops marks that are no longer needed
            list(islice(iterator, steps // 4))
            state = loader.state_dict()
        assert len(pickle.dumps(state)) < 10_000
        expected = plain(list(islice(iterator, 5)))
    with EchoLoader(Seekable(length), **common) as restored:
        restored.load_state_dict(through_torch_save(state))
        needed = state["next_index"] - min(held_serials(restored))
        assert plain(list(islice(restored, 5))) == expected
        assert needed > 3 * buffer
        assert needed <= restored.reread_examples <= 1.2 * needed + 2 * batch_size
