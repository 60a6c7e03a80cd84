"""States told by playing forward, against one item at a time in plain Python."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from adaecho.echo.order import plan as plans
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.plan import Plan, pending, serials_in, state
from tests.echo import reference
from tests.echo.reference import SLOT


def slow_states(
    start: dict[str, Any], *, seed: int, size: int, factors: dict[int, float], bad: set[int], end: int,
    rank: int, world: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The state before the first output and after each, up to the end of the pass."""
    yield start
    buffer: list[int] = list(start["buffer"].tolist())
    echo_in_progress = start["pending_item"], start["pending_repeats"]
    index = start["next_index"]
    factor = [value for first, value in sorted(factors.items()) if first <= index][-1]
    while True:
        item, repeats = echo_in_progress
        while not repeats and index < end:
            factor = factors.get(index, factor)
            if index not in bad:
                serial = index * world + rank
                item, repeats = serial << 16, reference.repeats(seed, index, factor)
            index += 1
        if not repeats:
            break
        echo_in_progress = (item + 1, repeats - 1) if repeats > 1 else (0, 0)
        if len(buffer) < size:
            buffer.append(item)
            continue
        if size:
            key = reference.key(seed, item >> 16, item & 0xFFFF)
            buffer[int(reference.uniform(key, SLOT) * size)] = item
        next_index = (item >> 16) // world + 1
        yield state(next_index, np.array(buffer, np.int64), *echo_in_progress)
    drained = sorted(
        buffer, key=lambda one: reference.bits(reference.key(seed, one >> 16, one & 0xFFFF), reference.DRAIN)
    )
    for left in range(len(drained)):
        yield state(end, np.array(drained[left + 1 :], np.int64), draining=True)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["buffer"].tolist() == other["buffer"].tolist() and all(
        one[name] == other[name] for name in set(one) - {"buffer"}
    )


@pytest.mark.parametrize("number", range(40))
def test_states_are_those_of_a_slow_stage(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_BLOCK", 7)
    monkeypatch.setattr(plans, "_LEAST_APART", 5)
    rng = random.Random(number)
    world, seed, size = rng.choice([1, 3]), rng.choice([0, -4, 1 << 66]), rng.choice([0, 1, 6, 30])
    rank, end = rng.randrange(world), rng.choice([0, 3, 25, 60])
    factors = {
        0: rng.choice([1.0, 2.0, 2.4]),
        **{rng.randrange(1, 40): rng.choice([1.0, 1.5, 4.0]) for _ in "ab"},
    }
    bad = {index for index in range(60) if rng.random() < rng.choice([0, 0.3])}
    common: dict[str, Any] = {"seed": seed, "size": size, "rank": rank, "world": world}
    expected = list(slow_states(state(0, np.empty(0, np.int64)), factors=factors, bad=bad, end=end, **common))
    factor = Factor(seed, factors[0], world=world)
    factor.set_changes(sorted((index, value) for index, value in factors.items() if index))

    begun = rng.randrange(len(expected))  # as if this state had been loaded, after 100 outputs
    plan = Plan(seed, size, factor, rank=rank, world=world)
    plan.begin(100, expected[begun])
    plan.skip(sorted(bad))
    plan.end(end)
    for position in sorted(rng.choices(range(begun, len(expected)), k=12)):
        assert same(plan.state_at(100 + position - begun), expected[position])


def test_a_mark_is_played_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_LEAST_APART", 10)
    factor = Factor(3, 2.5, world=1)
    marked, other = (Plan(3, 4, factor, rank=0, world=1) for _ in range(2))
    assert not marked.due(9)
    assert marked.due(10)
    at = other.state_at(17)
    index = (
        at["next_index"] - 1
    )  # of the last thing to enter, all repeats of which have entered but those pending
    repeats = int(factor.repeats(np.array([index]))[0]) - at["pending_repeats"]
    marked.begin(
        5, state(1000, np.array([999 << 16] * 4))
    )  # from where no playing would come to these states
    marked.mark(17, at["buffer"], (index << 16) + repeats - 1)
    for output in (17, 20, 21, 40):
        assert same(marked.state_at(output), other.state_at(output))


def test_what_a_state_holds() -> None:
    held = state(
        9, np.array([5 << 16, 3 << 16 | 1, 5 << 16 | 2]), pending_item=8 << 16 | 1, pending_repeats=2
    )
    assert pending(held).tolist() == [8 << 16 | 1, 8 << 16 | 2]
    assert serials_in(held).tolist() == [3, 5, 8]
