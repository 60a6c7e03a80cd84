"""How often each fresh example leaves an echo stage: a number, or what follows the measured R."""

import math
import sys
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed

REPEATS = keyed.STAGE_PURPOSES

_EVERY_STEPS = 20
_COUNTED = 1 << 16  # examples at once, whose arrays stay in the processor's cache
_LEAST_CHANGE = 0.05  # relative: measurement noise alone should not change the factor


def repeats(seed: int, numbers: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    """How often each fresh example leaves the echo stage: floor or ceil of the factor, right in expectation.

    Paper, section 2: a factor that is not whole is reached by repeating probabilistically, here per item.
    """
    whole = math.floor(factor)
    counts = np.full(len(numbers), whole, dtype=np.int64)  # [n]
    if factor > whole:
        drawn = keyed.uniform(keyed.item_keys(seed, numbers << keyed.ECHO_BITS), REPEATS)
        counts += drawn < factor - whole
    return counts


class Factor:
    """The echoing factor of a stage and its history.

    Args:
        seed: of the draws where a factor is not whole. They are keyed by local number, not by serial, so that
            ranks that read equally many examples put out equally many items.
        first: the factor until it is changed.
        world: the local number of a serial is ``serial // world``.

    Attributes:
        value: in force for the next fresh example.
        changes: local number of the first fresh example under each other factor since, and that factor.
    """

    def __init__(self, seed: int, first: float, *, world: int) -> None:
        self.value = self._first = first
        self.changes: list[tuple[int, float]] = []
        self._asked_for: float | None = None
        self._seed, self._world = seed, world

    def repeats(self, serials: NDArray[np.int64], factor: float | None = None) -> NDArray[np.int64]:
        """How often each of these leaves the stage, under the factor in force or an earlier one."""
        return repeats(self._seed, serials // self._world, self.value if factor is None else factor)

    def totals(self, serials: NDArray[np.int64]) -> NDArray[np.int64]:
        """How often each of these leaves the stage, each under the factor that was in force for it."""
        totals = self.repeats(serials, self._first)
        for first, value in self.changes:
            later = serials // self._world >= first
            totals[later] = self.repeats(serials[later], value)
        return totals

    def repeats_of(self, serial: int) -> int:
        """How often this one leaves the stage."""
        if self.value == math.floor(self.value):
            return int(self.value)
        return int(self.repeats(np.array([serial]))[0])

    def total(self, first: int, count: int) -> int:
        """How often consecutive fresh examples leave the stage, together: so many from a local number on."""
        if self.value == math.floor(self.value):
            return count * int(self.value)
        end = first + count
        blocks = (np.arange(start, min(start + _COUNTED, end)) for start in range(first, end, _COUNTED))
        return sum(int(repeats(self._seed, numbers, self.value).sum()) for numbers in blocks)

    def fresh_needed(self, items: int, next_index: int) -> int:
        """The fewest fresh examples from a local number on whose repeats make that many items."""
        most = math.ceil(items / math.floor(self.value))
        if self.value == math.floor(self.value):
            return most
        numbers = next_index + np.arange(most, dtype=np.int64)
        return int(np.searchsorted(np.cumsum(repeats(self._seed, numbers, self.value)), items)) + 1

    def change(self, value: float) -> None:
        """Ask for another factor for what has not reached the stage yet; any thread may."""
        self._asked_for = value

    def settle(self, next_index: int) -> None:
        """Put what was asked for in force from a local number on."""
        if self._asked_for is not None:
            self.value, self._asked_for = self._asked_for, None
            self.changes.append((next_index, self.value))

    def at(self, index: int) -> tuple[float, list[tuple[int, float]]]:
        """The factor in force at an upstream position, and the changes up to there."""
        changes = [change for change in self.changes if change[0] <= index]
        return (changes[-1][1] if changes else self._first), changes

    def span(self, index: int) -> tuple[float, int]:
        """The factor at a local number, and the number from which on it is another one."""
        after = bisect_right(self.changes, index, key=lambda change: change[0])
        until = self.changes[after][0] if after < len(self.changes) else sys.maxsize
        return (self.changes[after - 1][1] if after else self._first), until

    def set_changes(self, changes: list[tuple[int, float]]) -> None:
        """Go back to a history of changes."""
        self.changes, self._asked_for = changes, None
        self.value = changes[-1][1] if changes else self._first


class PastFactor(Factor):
    """The factor of another stage, as it was at each local number."""

    def __init__(self, of: Factor) -> None:
        super().__init__(of._seed, of._first, world=of._world)
        self._of = of

    def settle(self, next_index: int) -> None:
        self.value = self._of.span(next_index)[0]


class AutoFactor:
    """``factor="auto"``: sets e = R, the largest whose repeats are free (paper, section 2, after equation 1).

    Args:
        max_factor: bound from above; from below it is 1.
    """

    def __init__(self, max_factor: float) -> None:
        self._max_factor = max_factor
        self._steps = 0

    def due(self) -> bool:
        """Called at each step: whether it is time to look at the ratio."""
        self._steps += 1
        return not self._steps % _EVERY_STEPS

    def follow(self, ratio: float | None, factor: Factor) -> None:
        """Set the factor to the ratio; None where that isn't known yet."""
        if ratio is None:
            return
        wanted = round(min(max(ratio, 1.0), self._max_factor), 2)
        if abs(wanted - factor.value) > _LEAST_CHANGE * factor.value:
            factor.change(wanted)
