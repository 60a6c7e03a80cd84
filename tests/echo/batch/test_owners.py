"""What an owner keeps, and for how long."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from adaecho.echo.batch.process_workers import WorkerStore
from adaecho.echo.order import keyed
from adaecho.echo.order.stage import FreshBlock


class Reader:
    """Examples are lists of their serial; tells what it has read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def go_alone(self) -> None:
        pass

    def work(self, claim: Any) -> FreshBlock:
        self.read += claim[0].tolist()
        return FreshBlock(claim[0], [[serial] for serial in claim[0].tolist()], 0)

    def again(self, serials: Any) -> Any:
        return (serials,)


def contents(reader: Reader, *, resident: bool = False) -> Any:
    making: Any = SimpleNamespace(length=1, augmented=lambda _, examples: examples)
    return WorkerStore(reader, making, resident=resident)  # type: ignore[arg-type]


def use(owner: Any, serials: list[int], last: list[int]) -> Any:
    return owner("made", np.array(serials) << keyed.ECHO_BITS, np.array(last, dtype=bool))


def test_an_example_is_read_once_and_kept_until_its_last_use() -> None:
    reader = Reader()
    owner = contents(reader)
    owner("read", (np.arange(3),))
    made = use(owner, [2, 1], [0, 0]) + use(owner, [1, 0, 2], [0, 1, 0]) + use(owner, [2, 1, 2], [0, 1, 1])
    assert made == [[2], [1], [1], [0], [2], [2], [1], [2]]
    assert len({id(one) for one in made}) == 8, "no two uses share memory"
    assert reader.read == [0, 1, 2]
    assert not owner._examples


def test_rows_in_memory_are_read_for_each_use_and_not_kept() -> None:
    reader = Reader()
    owner = contents(reader, resident=True)
    assert use(owner, [1, 0, 1], [0, 1, 1]) == [[1], [0], [1]]
    assert reader.read == [1, 0, 1]
    assert not owner._examples
