"""States told by playing forward, against one item at a time in plain Python."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from adaecho.echo.order import stage as stages
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.items import Bad, Fresh, StageState
from adaecho.echo.order.stage import EchoStage, NoPool
from tests.echo import reference
from tests.echo.reference import SLOT


def state(
    next_index: int, buffer: list[int], item: int = 0, repeats: int = 0, draining: bool = False
) -> StageState:
    return StageState(next_index, np.array(buffer, np.int64), item, repeats, draining)


def slow_states(
    start: StageState, *, seed: int, size: int, factors: dict[int, float], bad: set[int], end: int,
    rank: int, world: int,
) -> Iterator[StageState]:  # fmt: skip
    """The state before the first output and after each, up to the end of the pass."""
    yield start
    buffer: list[int] = list(start.buffer.tolist())
    echo_in_progress = start.pending_item, start.pending_repeats
    index = start.next_index
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
        yield state(next_index, buffer, *echo_in_progress)
    drained = sorted(
        buffer, key=lambda one: reference.bits(reference.key(seed, one >> 16, one & 0xFFFF), reference.DRAIN)
    )
    for left in range(len(drained)):
        yield state(end, drained[left + 1 :], draining=True)


def same(one: StageState, other: StageState) -> bool:
    return one.buffer.tolist() == other.buffer.tolist() and all(
        getattr(one, name) == getattr(other, name) for name in set(vars(one)) - {"buffer"}
    )


@pytest.mark.parametrize("number", range(40))
def test_states_are_those_of_a_slow_stage(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_PLAYED", 7)
    rng = random.Random(number)
    world, seed, size = rng.choice([1, 3]), rng.choice([0, -4, 1 << 66]), rng.choice([0, 1, 6, 30])
    rank, end = rng.randrange(world), rng.choice([0, 3, 25, 60])
    factors = {
        0: rng.choice([1.0, 2.0, 2.4]),
        **{rng.randrange(1, 40): rng.choice([1.0, 1.5, 4.0]) for _ in "ab"},
    }
    bad = {index for index in range(60) if rng.random() < rng.choice([0, 0.3])}
    common: dict[str, Any] = {"seed": seed, "size": size, "rank": rank, "world": world}
    expected = list(slow_states(state(0, []), factors=factors, bad=bad, end=end, **common))
    first = rng.randrange(len(expected))  # as if this state had been loaded
    begun = expected[first]

    def upstream(count: int) -> Fresh | None:
        """The next ones, in chunks of any size, with the changes of the factor where they fall."""
        start = stage.next_index
        stop = min(start + rng.randint(1, count), end, *(index for index in (*factors, 99) if index > start))
        if stop <= start:
            return None
        if stop in factors:
            factor.change(factors[stop])
        chunk = range(start, stop)
        good = np.array([index for index in chunk if index not in bad], np.int64)
        errors = [Bad(index, "", ValueError(), None) for index in chunk if index in bad]
        return Fresh(good * world + rank, None, stop, errors, world)

    factor = Factor(seed, factors[0], world=world)
    factor.set_changes(sorted((at, value) for at, value in factors.items() if 0 < at <= begun.next_index))
    stage = EchoStage(upstream, NoPool(), factor, apart=5, block=rng.choice([1, 9]), **common)
    stage.begin(begun)
    forgotten = 0
    while len(stage.take(rng.randint(1, 9))):
        assert stage.state().draining or same(stage.state(), expected[first + stage.emitted])
        for asked in (rng.randint(forgotten, stage.emitted) for _ in range(3)):  # also one before another
            assert same(stage.state_at(asked), expected[first + asked])
        forgotten = rng.randint(forgotten, stage.emitted)
        stage.forget(forgotten)
    assert first + stage.emitted == len(expected) - 1
    for output in range(forgotten, stage.emitted + 1):
        assert same(stage.state_at(output), expected[first + output])


def test_few_marks_are_kept_and_states_are_played_from_the_last() -> None:
    def make(apart: int) -> EchoStage:
        def upstream(count: int) -> Fresh:
            return Fresh(stage.next_index + np.arange(count), None, stage.next_index + count)

        stage = EchoStage(upstream, NoPool(), Factor(3, 2.5, world=1), seed=3, size=4, apart=apart)
        for _ in range(30):
            stage.take(2)
        return stage

    marked, other = make(10), make(1000)
    assert [output for output, _ in marked._marks] == [0, 10, 20, 30, 40, 50, 60]
    assert marked.forget(25)
    assert not marked.forget(29)
    assert [output for output, _ in marked._marks] == [20, 30, 40, 50, 60]
    for output in (29, 30, 41, 60):
        assert same(marked.state_at(output), other.state_at(output))


def test_what_is_interrupted_while_it_waits_goes_on() -> None:
    """Whatever upstream raises, before the buffer is full or after, nothing is lost."""

    def outputs(raises: set[int]) -> list[int]:
        calls = 0

        def upstream(count: int) -> Fresh:  # noqa: ARG001
            nonlocal calls
            calls += 1
            if calls in raises:
                raise TimeoutError
            return Fresh(np.array([stage.next_index]), None, stage.next_index + 1)

        stage = EchoStage(upstream, NoPool(), Factor(0, 2, world=1), seed=0, size=20)
        items: list[int] = []
        while len(items) < 50:
            try:
                items += stage.take(5).items.tolist()
            except TimeoutError:
                continue
        return items

    assert outputs(set()) == outputs({1, 2, 7, 12, 13, 20})


def test_what_a_state_holds() -> None:
    held = state(9, [5 << 16, 3 << 16 | 1, 5 << 16 | 2], item=8 << 16 | 1, repeats=2)
    assert held.items.tolist() == [5 << 16, 3 << 16 | 1, 5 << 16 | 2, 8 << 16 | 1, 8 << 16 | 2]
    assert held.serials.tolist() == [3, 5, 8]
