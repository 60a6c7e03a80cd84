"""A loader that is not closed is freed once nobody holds it, with its dataset and whatever was raised."""

import itertools
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

from adaecho import EchoLoader
from adaecho.echo.variants import VARIANTS
from tests.echo.sources import freed_soon

ROWS = 48
Kept = list["weakref.ref[Any]"]


class TornError(ValueError):
    """Of an example."""


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.array = np.arange(ROWS * 512, dtype=np.float32).reshape(ROWS, 512)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return self.array[row]


class Safe(Rows):
    thread_safe = True


class Raising:
    """Decodes, and remembers what it raised for every so many rows."""

    thread_safe = True

    def __init__(self, raised: Kept, every: int) -> None:
        self._raised, self._every = raised, every

    def __call__(self, example: Any) -> Any:
        if self._every and int(example[0]) // 512 % self._every == self._every - 1:
            error = TornError("torn")
            self._raised.append(weakref.ref(error))
            raise error
        return example + 1


def same(one: Any, _: Any) -> Any:
    return one


same.thread_safe = True  # type: ignore[attr-defined]


def drop(loader: EchoLoader) -> None:
    next(iter(loader))
    list(islice(loader, 4))


def resume(loader: EchoLoader) -> None:
    list(islice(loader, 5))
    loader.load_state_dict(loader.state_dict())
    list(islice(loader, 2))


def meet_error(loader: EchoLoader) -> None:
    with pytest.raises(TornError):
        list(islice(loader, 200))


def meet_bad_examples(loader: EchoLoader) -> None:
    list(islice(loader, 30))
    assert loader.bad_examples


SOURCES: dict[str, Callable[[], Any]] = {
    "rows": Rows,
    "thread-safe": Safe,
    "stream": lambda: (lambda rows: lambda: (rows[row] for row in range(ROWS)))(Rows()),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("use", "every", "budget"),
    [(drop, 0, 0), (resume, 0, 0), (meet_error, 20, 0), (meet_error, 5, 2), (meet_bad_examples, 20, 100)],
    ids=["iterator dropped", "resumed", "error", "error beyond the budget", "bad examples"],
)
def test_a_loader_that_is_not_closed_is_freed(use: Any, every: int, budget: int, num_workers: int) -> None:
    def make(echo: str, source: str) -> Kept:
        given = SOURCES[source]()
        loader = EchoLoader(
            given, 4, echo=echo, factor=1 if echo == "none" else 2, shuffle_buffer=9, num_workers=num_workers,
            decode=Raising(raised, every), augment=same, max_bad_examples=budget,
        )  # fmt: skip
        use(loader)
        return [weakref.ref(loader), weakref.ref(given)]

    raised: Kept = []
    kept: Kept = []
    for echo, source in itertools.product(VARIANTS, SOURCES):
        kept += make(echo, source)
    assert freed_soon(kept)
    assert [error() for error in raised if error() is not None] == []
    assert bool(raised) == bool(every)
