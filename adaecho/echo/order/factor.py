"""How often each fresh example leaves an echo: a number, or what follows the measured R."""

import math

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed

REPEATS = keyed.STAGE_PURPOSES

_EVERY_STEPS = 20
_COUNTED = 1 << 16  # examples at once, whose arrays stay in the processor's cache
_LEAST_CHANGE = 0.05  # relative: measurement noise alone should not change the factor

History = list[tuple[int, float]]
"""Local number of the first fresh example under each factor, and that factor."""


def repeats(seed: int, numbers: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    """How often each fresh example leaves the echo: floor or ceil of the factor, right in expectation.

    Paper, section 2: a factor that is not whole is reached by repeating probabilistically, here per item.
    """
    whole = math.floor(factor)
    counts = np.full(len(numbers), whole, dtype=np.int64)  # [n]
    if factor > whole:
        drawn = keyed.uniform(keyed.item_keys(seed, numbers << keyed.ECHO_BITS), REPEATS)  # [n]
        counts += drawn < factor - whole
    return counts


class Factor:
    """The echoing factor of a stage, which is history: a part of the log.

    Draws are keyed by local number, not by serial, so that ranks that read equally many examples put out
    equally many items.

    Args:
        seed: of the draws where a factor is not whole.
        first: the factor until it is changed.

    Attributes:
        history: only appended to, so that any thread may read it.
    """

    def __init__(self, seed: int, first: float) -> None:
        self.history: History = [(0, first)]
        self._seed = seed
        self._asked_for: float | None = None

    @property
    def value(self) -> float:
        """In force for the next fresh example."""
        return self.history[-1][1]

    def counts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """How often each of these leaves, under the factor in force for it; local numbers, rising, [n]."""
        first, value = self.history[-1]
        if not len(numbers) or numbers[0] >= first:
            return repeats(self._seed, numbers, value)
        counts = np.empty(len(numbers), dtype=np.int64)  # [n]
        for first, value in self.history:
            later = int(np.searchsorted(numbers, first))
            counts[later:] = repeats(self._seed, numbers[later:], value)
        return counts

    def total(self, first: int, count: int) -> int:
        """How often consecutive fresh examples leave, together: so many from a local number on."""
        if first >= self.history[-1][0] and self.value == math.floor(self.value):
            return count * int(self.value)
        end = first + count
        blocks = (np.arange(start, min(start + _COUNTED, end)) for start in range(first, end, _COUNTED))
        return sum(int(self.counts(numbers).sum()) for numbers in blocks)

    def fresh_needed(self, items: int, next_index: int) -> int:
        """The fewest fresh examples from a local number on whose repeats make that many items."""
        most = math.ceil(items / math.floor(self.value))
        if self.value == math.floor(self.value):
            return most
        numbers = next_index + np.arange(most, dtype=np.int64)  # [most]
        return int(np.searchsorted(np.cumsum(self.counts(numbers)), items)) + 1

    def change(self, value: float) -> None:
        """Ask for another factor for what has not reached the stage yet; any thread may."""
        self._asked_for = value

    def settle(self, next_index: int) -> None:
        """Put what was asked for in force from a local number on."""
        if self._asked_for is not None:
            value, self._asked_for = self._asked_for, None
            self.history.append((next_index, value))

    def begun(self, index: int) -> "Factor":
        """Of an iteration that begins at a local number, maybe an earlier one: what is in force now holds."""
        begun, history = Factor(self._seed, self.value), self.history
        if history[-1][0] > index:
            history = [*(change for change in history if change[0] < index), (index, self.value)]
        begun.go_back(history)
        return begun

    def before(self, index: int) -> History:
        """The history up to an upstream position."""
        return [change for change in self.history if change[0] <= index or change is self.history[0]]

    def go_back(self, history: History) -> None:
        """Forget what came after."""
        self.history, self._asked_for = list(history), None


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
        wanted = round(float(min(max(ratio, 1.0), self._max_factor)), 2)  # NumPy's own would stay in states
        if abs(wanted - factor.value) > _LEAST_CHANGE * factor.value:
            factor.change(wanted)
