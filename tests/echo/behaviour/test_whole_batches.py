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
from adaecho.echo.batch.whole import batch_length
from adaecho.echo.memory.tree import duplicate
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
    with pytest.raises(ValueError, match="give batch_length="):
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
    "an object": lambda memory: SimpleNamespace(x=[memory]),
    "an opaque object": Opaque,
    "bytes": lambda memory: {"x": memoryview(memory.numpy())},
}


class OneMemory:
    """Goes round through the memory of so many batches, which may overlap."""

    def __init__(self, form: str, ring: int, overlap: int) -> None:
        memory = torch.zeros(4 * ring)
        self.parts = [memory[(4 - overlap) * one :][:4] for one in range(ring)]
        self.make = HOLDERS[form]

    def __iter__(self) -> Any:
        for number in range(24):
            part = self.parts[number % len(self.parts)].fill_(number)
            yield self.make(part)


def first_number(batch: Any) -> float:
    x = batch["x"] if isinstance(batch, Mapping) else batch.x
    return float(np.asarray(x[0] if isinstance(x, list) else x)[0])


@pytest.mark.filterwarnings("ignore:state_dict. nothing in what the source gives can be compared")
@pytest.mark.parametrize("form", HOLDERS)
@pytest.mark.parametrize(
    ("buffer", "num_workers", "ring", "overlap"), [(0, 0, 1, 0), (3, 1, 3, 0), (0, 1, 8, 0), (3, 0, 2, 3)]
)
def test_batches_that_lie_in_one_memory_are_echoed_as_they_were(
    form: str, buffer: int, num_workers: int, ring: int, overlap: int
) -> None:
    def taken(source: Any) -> list[float]:
        common: dict[str, Any] = {"echo": "batch", "factor": 2, "batch_shuffle_buffer": buffer, "epochs": 1}
        with EchoLoader(source, None, num_workers=num_workers, batch_length=lambda _: 4, **common) as loader:
            return [first_number(batch) for _ in range(2) for batch in loader]

    assert taken(OneMemory(form, ring, overlap)) == taken(
        lambda: iter([{"x": torch.full((4,), n)} for n in range(24)])
    )


class LengthOnceIterated:
    """As Lightning's CombinedLoader."""

    length = 0

    def __iter__(self) -> Any:
        self.length = 5
        return iter(batches(5))

    def __len__(self) -> int:
        if not self.length:
            raise RuntimeError("call iter() first")
        return self.length


def test_a_length_that_is_known_once_it_is_iterated() -> None:
    loader = EchoLoader(LengthOnceIterated(), None, epochs=1)
    with pytest.raises(TypeError, match="isn't known"):
        len(loader)
    next(iter(loader))
    assert len(loader) == 5


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


FORMS: dict[str, Callable[[int], Any]] = {
    "tensors": lambda n: torch.arange(n * 6).reshape(n, 6).float(),
    "nested": lambda n: {"x": (torch.ones(n, 3), [torch.zeros(n, dtype=torch.int8)]), "n": n},
    "named": lambda n: Pair(torch.ones(n, 2), torch.zeros(n)),
    "ragged": lambda n: torch.ones(n, n),
    "numpy": lambda n: {"x": np.ones((n, 2)), "y": torch.ones(n, dtype=torch.float64)},
    "sparse": lambda n: torch.eye(n).to_sparse(),
    "scalars": lambda n: torch.tensor(float(n)),
    "empty": lambda n: {"x": torch.ones(n), "nothing": [[], {}, ()]},
    "keys": lambda n: {"x": torch.ones(n), **({"mask": torch.zeros(n)} if n == 3 else {})},
    "lengths": lambda n: [torch.ones(2) for _ in range(n)],
    "types": lambda n: torch.ones(n) if n == 4 else [torch.ones(n)],
    "gradients": lambda n: torch.ones(n, 2, requires_grad=True),
    "recycled": lambda n: torch.arange(n << 16).reshape(n, -1),
    "no elements": lambda n: torch.ones(n, 0, dtype=torch.bfloat16),
    "bfloat16": lambda n: torch.arange(n << 16, dtype=torch.bfloat16).reshape(n, -1),
    "channels last": lambda n: torch.ones(n, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "conjugated": lambda n: torch.full((n, 2), 1 + 2j).conj(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_is_of_the_same_form_and_shares_nothing(form: str) -> None:
    batch, expected = FORMS[form](3), FORMS[form](3)
    copied = duplicate(batch)
    assert type(copied) is type(batch)
    torch.testing.assert_close(copied, expected)
    for one in leaves(copied):
        assert not one.requires_grad
        if one.layout == torch.strided:
            one += 1  # into the copy, not into what it was made of
    torch.testing.assert_close(batch, expected)


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    return [value] if isinstance(value, torch.Tensor) else []
