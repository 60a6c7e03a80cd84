"""Batches that the source made (``batch_size=None``): their counts, order, states, and who may write."""

from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.batch.device import batch_length
from adaecho.echo.memory.pytree import duplicate
from tests.helpers import through_torch_save

RAGGED = [torch.zeros(10 + row, 12, 3) for row in range(8)]  # as a detection collate leaves them
BATCHES: dict[str, Any] = {
    "tensor": torch.zeros(8, 5),
    "detection": (tuple(RAGGED), tuple({"boxes": torch.zeros(row, 4)} for row in range(8))),
    "pairs": [(torch.zeros(3, 4, 4), row) for row in range(8)],
    "dicts": [{"image": torch.zeros(3, 4, 4), "label": row} for row in range(8)],
    "UserDict": UserDict(input_ids=torch.zeros(8, 5), labels=torch.zeros(8)),
    "scalar first": {"epoch": 3, "x": torch.zeros(8, 5)},
    "0-d first": OrderedDict(loss=torch.zeros(()), x=np.zeros((8, 5))),
    "text first": ("train", torch.zeros(8, 5)),
    "default collate": [torch.zeros(8, 5), torch.zeros(8)],
    "two views": [[torch.zeros(8, 5), torch.zeros(8, 5)], torch.zeros(8)],
    "two views as tuples": ((torch.zeros(8, 5), torch.zeros(8, 5)), torch.zeros(8)),
    "ragged": RAGGED,
    "nested": {"inputs": {"ids": torch.zeros(8, 5)}, "weights": None},
    "words": {"text": ["word"] * 8, "set": "train"},
    "numbers": list(range(8)),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_eight_examples_are_eight(kind: str) -> None:
    assert batch_length(BATCHES[kind]) == 8
    loader = EchoLoader([BATCHES[kind]] * 3, None, epochs=1)
    next(iter(loader))
    assert loader.fresh_examples == 8


@pytest.mark.parametrize("batch", ["text", 3, ("train", 3), {"epoch": 3}, torch.zeros(()), object()])
def test_what_tells_nothing_needs_a_function(batch: Any) -> None:
    with pytest.raises(ValueError, match="pass batch_length="):
        next(iter(EchoLoader([batch], None)))
    loader = EchoLoader([batch], None, batch_length=lambda given: 7 if given is not None else 0)
    list(islice(loader, 2))
    assert loader.fresh_examples == 14


def batches(number: int) -> list[torch.Tensor]:
    return [torch.arange(8) + 100 * index for index in range(number)]


def test_examples_of_held_batches_are_counted_also_after_a_resume() -> None:
    def make(state: Any = None) -> EchoLoader:
        loader = EchoLoader(batches(9).__iter__, None, echo="batch", factor=3, batch_shuffle_buffer=4, seed=1)
        if state is not None:
            loader.load_state_dict(through_torch_save(state))
        return loader

    loader = make()
    iterator = iter(loader)
    for _ in range(12):
        next(iterator)
        held = loader.fresh_examples_in_buffer
        assert held % 8 == 0
        assert 8 <= held <= 4 * 8
        restored = make(loader.state_dict())
        assert restored.fresh_examples_in_buffer == held
        next(iter(restored))
        assert make(restored.state_dict()).fresh_examples_in_buffer == restored.fresh_examples_in_buffer
    whole = EchoLoader(batches(9), None, echo="batch", factor=3)
    next(iter(whole))
    assert whole.fresh_examples_in_buffer == 8


@pytest.mark.parametrize("echo", [{}, {"echo": "batch", "factor": 2}], ids=["none", "batch"])
def test_a_consumer_that_writes_spoils_no_later_pass(echo: dict[str, Any]) -> None:
    source = batches(3)
    loader, restored = (EchoLoader(source, None, epochs=1, **echo) for _ in range(2))
    for batch in loader:
        batch.fill_(-1)
        restored.load_state_dict(loader.state_dict())
        for other in restored:
            other.fill_(-2)
    assert torch.equal(torch.stack(source), torch.stack(batches(3)))


def test_resumes_after_a_bad_batch() -> None:
    def decode(row: int) -> torch.Tensor:
        return torch.full((4,), 12 // (row - 1))

    loader, restored = (
        EchoLoader(range(6), None, decode=decode, echo="batch", factor=2, max_bad_examples=1, shuffle=False)
        for _ in range(2)
    )
    assert [int(batch[0]) for batch in islice(loader, 3)] == [-12, -12, 12]
    restored.load_state_dict(loader.state_dict())
    assert [int(batch[0]) for batch in islice(restored, 3)] == [12, 6, 6]


@dataclass
class Fields:
    x: Any


class Opaque:
    """Shows nothing of what it holds."""

    __slots__ = ("x",)
    __init__ = Fields.__init__


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a dict": lambda memory: {"x": memory},
    "a UserDict": lambda memory: UserDict(x=memory.numpy()),
    "a dataclass": Fields,
    "an object": lambda memory: SimpleNamespace(x=memory, more=[memory]),
    "an opaque object": Opaque,
}


class OneMemory:
    """Goes round through the memory of so many batches, which may overlap."""

    def __init__(self, form: str, ring: int, overlap: int) -> None:
        memory = torch.zeros(4 * ring)
        self.parts = [memory[(4 - overlap) * one :][:4] for one in range(ring)]
        self.make = HOLDERS[form]

    def __iter__(self) -> Any:
        for number in range(24):
            yield self.make(self.parts[number % len(self.parts)].fill_(number))


@pytest.mark.parametrize("form", HOLDERS)
@pytest.mark.parametrize(
    ("buffer", "num_workers", "ring", "overlap"), [(0, 0, 1, 0), (3, 1, 3, 0), (0, 1, 8, 0), (3, 0, 2, 3)]
)
def test_batches_that_lie_in_one_memory_are_echoed_as_they_were(
    form: str, buffer: int, num_workers: int, ring: int, overlap: int
) -> None:
    common: dict[str, Any] = {"echo": "batch", "factor": 2, "batch_shuffle_buffer": buffer, "epochs": 1}

    def taken(source: Any) -> list[float]:
        with EchoLoader(source, None, num_workers=num_workers, batch_length=lambda _: 4, **common) as loader:
            given = [batch["x"] if isinstance(batch, Mapping) else batch.x for _ in "12" for batch in loader]
            return [float(np.asarray(x)[0]) for x in given]

    each_its_own = [Fields(torch.full((4,), number)) for number in range(24)]
    assert taken(OneMemory(form, ring, overlap)) == taken(lambda: iter(each_its_own))


def test_a_length_that_is_known_once_it_is_iterated() -> None:
    class CombinedLoader:
        """As Lightning's."""

        given: list[Any] | None = None

        def __iter__(self) -> Any:
            self.given = batches(5)
            return iter(self.given)

        def __len__(self) -> int:
            if self.given is None:
                raise RuntimeError("call iter() first")
            return len(self.given)

    loader = EchoLoader(CombinedLoader(), None, epochs=1)
    with pytest.raises(TypeError, match="is unknown"):
        len(loader)
    next(iter(loader))
    assert len(loader) == 5


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sparse_tensors_are_repeated(num_workers: int) -> None:
    source = [{"x": torch.ones(3), "edges": torch.eye(3).to_sparse() * number} for number in (1, 2)]
    with EchoLoader(source, None, echo="batch", factor=2, epochs=1, num_workers=num_workers) as loader:
        assert [int(batch["edges"].to_dense()[0, 0]) for batch in loader] == [1, 1, 2, 2]


@pytest.mark.parametrize("buffer", [0, 3])
@pytest.mark.parametrize("factor", [1.5, 3])
def test_batches_of_all_sizes(factor: float, buffer: int) -> None:
    common: dict[str, Any] = {"echo": "batch", "factor": factor, "epochs": 2, "batch_shuffle_buffer": buffer}
    sizes = enumerate([2, 3, 90, 4, 70, 1, 5, 80])
    source = [torch.arange(number, number + length) for number, length in sizes].__iter__
    expected = [batch.tolist() for batch in EchoLoader(source, None, **common)]
    with EchoLoader(source, None, num_workers=1, **common) as loader:
        states = []
        for batch, one in zip(loader, expected, strict=True):
            assert batch.tolist() == one
            batch.fill_(-1)
            states.append(loader.state_dict())
        for position, state in enumerate(states[:-1], start=1):
            loader.load_state_dict(through_torch_save(state))
            assert [batch.tolist() for batch in islice(loader, 4)] == expected[position : position + 4]


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


FORMS: dict[str, Callable[[], Any]] = {
    "nested": lambda: {"x": (torch.ones(3, 3), [torch.zeros(3, dtype=torch.int8)]), "n": 3},
    "named": lambda: Pair(torch.ones(3, 2), torch.zeros(3)),
    "numpy": lambda: {"x": np.ones((3, 2)), "y": torch.ones(3, dtype=torch.float64)},
    "sparse": lambda: torch.eye(3).to_sparse(),
    "scalars": lambda: torch.tensor(3.0),
    "empty": lambda: {"x": torch.ones(3), "nothing": [[], {}, ()]},
    "list": lambda: [torch.ones(2) for _ in range(3)],
    "gradients": lambda: torch.ones(3, 2, requires_grad=True),
    "recycled": lambda: torch.arange(3 << 16).reshape(3, -1),
    "no elements": lambda: torch.ones(3, 0, dtype=torch.bfloat16),
    "bfloat16": lambda: torch.arange(3 << 16, dtype=torch.bfloat16).reshape(3, -1),
    "channels last": lambda: torch.ones(3, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "conjugated": lambda: torch.full((3, 2), 1 + 2j).conj(),
}


def leaves(value: Any) -> list[torch.Tensor]:
    parts = list(value.values()) if isinstance(value, dict) else value
    if isinstance(parts, list | tuple):
        return [leaf for part in parts for leaf in leaves(part)]
    return [torch.as_tensor(value)] if isinstance(value, torch.Tensor | np.ndarray) else []


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_is_of_the_same_form_and_shares_nothing(form: str) -> None:
    batch, expected = FORMS[form](), FORMS[form]()
    copied = duplicate(batch)
    assert type(copied) is type(batch)
    torch.testing.assert_close(copied, expected)
    for one in leaves(copied):
        assert not one.requires_grad
        if one.layout == torch.strided:
            one += 1  # into the copy, not into what it was made of
    torch.testing.assert_close(batch, expected)


def test_decode_takes_a_whole_batch_and_what_it_gives_is_counted() -> None:
    def make() -> EchoLoader:
        return EchoLoader(lambda: iter(batches(3)), None, decode=lambda batch: batch[:2] + 1)

    loader = make()
    assert int(next(iter(loader))[0]) == 1
    assert loader.fresh_examples == 2
    restored = make()
    restored.load_state_dict(loader.state_dict())
    assert restored.reread_examples == 2


def test_resumes_after_an_abandoned_pass() -> None:
    def make() -> EchoLoader:
        return EchoLoader(batches(5), None, echo="batch", factor=2, epochs=1)

    loader = make()
    list(islice(loader, 4))
    iterator = iter(loader)
    assert int(next(iterator)[0]) == 0
    restored = make()
    restored.load_state_dict(loader.state_dict())
    expected = [int(batch[0]) for batch in islice(iterator, 4)]
    assert [int(batch[0]) for batch in islice(restored, 4)] == expected == [0, 100, 100, 200]
