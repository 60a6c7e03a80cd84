"""What an owner keeps, and for how long."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adaecho.echo.batch.owners import Contents, TokenPool
from adaecho.echo.order import keyed
from adaecho.echo.order.stage import Fresh


class Reader:
    """Examples are lists of their serial; tells what it has read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def go_alone(self) -> None:
        pass

    def work(self, claim: Any) -> Fresh:
        self.read += claim[0].tolist()
        return Fresh(claim[0], [[serial] for serial in claim[0].tolist()], 0)

    def keep_again(self, owned: Any) -> None:
        assert owned(0)

    def reread(self, serials: Any) -> Any:
        return self.work((serials,)).examples


def contents(reader: Reader) -> Any:
    making: Any = SimpleNamespace(length=1, augmented=lambda _, examples: examples)
    return Contents(reader, making, lambda _: True)  # type: ignore[arg-type]


def use(owner: Any, taken: Any) -> Any:
    tokens, totals = taken.T
    return owner("made", tokens << keyed.ECHO_BITS, totals)  # one owner: a token is its serial


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_an_example_is_read_once_and_kept_until_its_last_use_in_whatever_order_they_come(order: Any) -> None:
    reader, pool = Reader(), TokenPool()
    owner = contents(reader)
    tokens = np.arange(3)
    owner("read", (tokens,))
    pool.insert(tokens, np.array([1, 3, 4]))
    batches = [pool.take(np.array(rows)) for rows in ([2, 1], [1, 0, 2], [2, 1, 2])]
    made = [use(owner, batches[number]) for number in order]
    assert [example for number in (0, 1, 2) for example in made[order.index(number)]] == [
        [2], [1], [1], [0], [2], [2], [1], [2],
    ]  # fmt: skip
    assert reader.read == [0, 1, 2]
    assert not owner._examples
    assert not owner._left


def test_no_two_uses_share_memory_and_new_owners_read_what_they_lack() -> None:
    reader, pool = Reader(), TokenPool()
    owner = contents(reader)
    owner("read", (np.arange(2),))
    pool.insert(np.arange(2), np.array([4, 3]))
    made = use(owner, pool.take(np.array([0, 1, 0])))
    assert len({id(one) for one in made}) == 3
    owner = contents(reader)
    pool.begin_anew()
    assert use(owner, pool.take(np.array([1, 0, 1, 0]))) == [[1], [0], [1], [0]]
    assert reader.read == [0, 1, 0, 1]
    assert not owner._examples, "they let it go too"
