"""The order of examples after repeating and shuffling.

The echoing factor determines how often each example enters a shuffle buffer. Once the buffer is full, each
repeat that enters pushes out the repeat in a random slot. All random choices are computed from the seed, so a
resumed loader can recompute the buffer's contents at any position. No state has to store them.
"""

import math
from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed

REPEATS, SLOT, DRAIN = keyed.STAGE_PURPOSES, keyed.STAGE_PURPOSES + 1, keyed.STAGE_PURPOSES + 2
_EVERY_STEPS = 20  # number of steps between two updates of the automatic factor
_COUNTED = 1 << 16  # number of examples counted at once, so that their arrays fit in the CPU cache
_LEAST_CHANGE = 0.05  # smallest relative change of the factor; smaller ones are measurement noise
_LEAST_LOOK = 1 << 12  # smallest number of fresh examples to search at once

Rows = NDArray[np.int64]

History = list[tuple[int, float]]
"""Pairs (number, factor): each echoing factor so far, after the number of the first example it applies to."""


def repeats(seed: int, numbers: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    """Return how often each example is used: ``factor`` times on average, randomly rounded up or down."""
    # ``numbers`` are the examples' positions in this rank's reading order, int64 [n].
    whole = math.floor(factor)
    counts = np.full(len(numbers), whole, dtype=np.int64)  # [n]
    if factor > whole:
        # Keyed by local number, so that ranks with the same number of examples have the same number of uses.
        drawn = keyed.uniform(keyed.item_keys(seed, numbers << keyed.ECHO_BITS), REPEATS)  # [n]
        counts += drawn < factor - whole
    return counts


class Factor:
    """The echoing factor (the mean number of uses per example), and its changes so far."""

    def __init__(self, seed: int, first: float) -> None:
        self.history: History = [(0, first)]  # iteration only appends to it, so any thread may read it
        self._seed = seed  # for the random rounding of a factor that is not an integer
        self._asked_for: float | None = None

    @property
    def value(self) -> float:
        """The factor that applies to the next fresh example."""
        return self.history[-1][1]

    def counts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how often each example is used, int64 [n]. ``numbers`` must be ascending."""
        first, value = self.history[-1]
        if not len(numbers) or numbers[0] >= first:
            return repeats(self._seed, numbers, value)
        counts = np.empty(len(numbers), dtype=np.int64)  # [n]
        for first, value in self.history:
            later = int(np.searchsorted(numbers, first))
            counts[later:] = repeats(self._seed, numbers[later:], value)
        return counts

    def total(self, first: int, count: int) -> int:
        """Return the total number of uses of ``count`` examples, starting with example number ``first``."""
        if first >= self.history[-1][0] and self.value == math.floor(self.value):
            return count * int(self.value)
        end = first + count
        blocks = (np.arange(start, min(start + _COUNTED, end)) for start in range(first, end, _COUNTED))
        return sum(int(self.counts(numbers).sum()) for numbers in blocks)

    def fresh_needed(self, items: int, next_index: int) -> int:
        """Return how many examples, starting with number ``next_index``, give at least ``items`` repeats."""
        most = math.ceil(items / math.floor(self.value))
        if self.value == math.floor(self.value):
            return most
        numbers = next_index + np.arange(most, dtype=np.int64)  # [most]
        return int(np.searchsorted(np.cumsum(self.counts(numbers)), items)) + 1

    def change(self, value: float) -> None:
        """Request another factor for later examples. Any thread may call this."""
        self._asked_for = value

    def settle(self, next_index: int) -> None:
        """Apply a requested factor to all examples from number ``next_index`` on."""
        if self._asked_for is not None:
            value, self._asked_for = self._asked_for, None
            self.history.append((next_index, value))

    def begun(self, index: int) -> "Factor":
        """Return the factor for an iteration that begins with example ``index``, at the current value."""
        begun, history = Factor(self._seed, self.value), self.history
        if history[-1][0] > index:
            history = [*(change for change in history if change[0] < index), (index, self.value)]
        begun.go_back(history)
        return begun

    def before(self, index: int) -> History:
        """Return the history up to example number ``index``."""
        return [change for change in self.history if change[0] <= index or change is self.history[0]]

    def go_back(self, history: History) -> None:
        """Restore an earlier history and discard any requested change."""
        self.history, self._asked_for = list(history), None


class AutoFactor:
    """The rule of ``factor="auto"``, which sets the echoing factor to the measured ratio R.

    R is the loading time of a batch divided by the time of a training step. With this factor, training on
    repeats fills the time until the next fresh batch (paper, section 2, after equation 1).
    """

    def __init__(self, max_factor: float) -> None:
        self._max_factor = max_factor
        self._steps = 0

    def due(self) -> bool:
        """Count a training step and return whether the factor should be updated now."""
        self._steps += 1
        return not self._steps % _EVERY_STEPS

    def follow(self, ratio: float | None, factor: Factor) -> None:
        """Set the echoing factor to the ratio of loading time to step time, but ignore small changes."""
        if ratio is None:  # not known yet
            return
        wanted = round(float(min(max(ratio, 1.0), self._max_factor)), 2)  # a Python float, for states
        if abs(wanted - factor.value) > _LEAST_CHANGE * factor.value:
            factor.change(wanted)


class Cursor(NamedTuple):
    """How far one iteration has progressed in repeating and shuffling its examples."""

    entered: int = 0  # repeats that have entered the shuffle buffer
    last: int = -1  # the repeat that entered last, encoded as in order/keyed.py; -1 if none has entered
    drained: int = 0  # repeats that have left the buffer since the last example of the iteration entered

    def outputs(self, size: int) -> int:
        """Return how many repeats have left the buffer, if the buffer has ``size`` slots."""
        return max(0, self.entered - size) + self.drained


BEGINNING = Cursor()


class Contents(NamedTuple):
    """The repeats of examples that are in the shuffle buffer or waiting to enter it."""

    # The repeats in the buffer, int64 [n], in the order of their slots. Once no more repeats enter and some
    # have left, they are in the order in which they will leave.
    buffer: keyed.Items = keyed.NO_ITEMS
    pending: keyed.Items = keyed.NO_ITEMS  # the latest example's repeats that are waiting to enter, int64 [m]

    @property
    def items(self) -> keyed.Items:
        """All repeats, int64 [n + m]."""
        return np.concatenate(self)


NOTHING = Contents()


# Paper, section 3: "we omitted the baseline's 'shuffle examples' buffer and inserted a shuffle buffer after
# the echoing stage with the same size as the baseline's buffer".
class ShuffleBuffer:
    """A shuffle buffer with a fixed number of slots.

    Once all slots are filled, each item that enters pushes out the item in a random slot. At the end of an
    iteration, the remaining items leave in random order.

    Args:
        size: number of slots. A buffer of size 0 passes items on in order.
    """

    def __init__(self, seed: int, size: int) -> None:
        self.size = size
        self._seed = seed
        self._items = np.zeros(size, dtype=np.int64)  # [size], by slot
        self._rows = np.zeros(size, dtype=np.int64)  # [size], the row of each item's example in the pool
        self._filled = 0
        self._drain: NDArray[np.int64] | None = None  # slots in the order in which they leave
        self._drained = 0

    @staticmethod
    def slots(seed: int, size: int, items: keyed.Items) -> NDArray[np.int64]:
        """Return the slot that each item enters once the buffer is full: uniform in [0, size), int64 [n]."""
        if size <= 1:
            return np.zeros(len(items), dtype=np.int64)
        return keyed.integers(keyed.item_keys(seed, items), SLOT, 0, size)

    @staticmethod
    def drain_order(seed: int, items: keyed.Items) -> NDArray[np.int64]:
        """Return the slots in the random order in which they are emptied at the end of the iteration."""
        return np.argsort(keyed.bits(keyed.item_keys(seed, items), DRAIN), kind="stable")

    @property
    def space(self) -> int:
        """Number of empty slots."""
        return self.size - self._filled

    @property
    def draining(self) -> bool:
        """Whether the input has ended, so that the buffer only empties."""
        return self._drain is not None

    def fill(self, items: keyed.Items, rows: Rows) -> None:
        """Put items, with their storage rows, into empty slots."""
        end = self._filled + len(items)
        self._items[self._filled : end] = items
        self._rows[self._filled : end] = rows
        self._filled = end

    def swap(
        self, entering: keyed.Items, entering_rows: Rows, slots: NDArray[np.int64]
    ) -> tuple[keyed.Items, Rows]:
        """Put items into their slots of the full buffer; return the items that leave, and their rows."""
        if not self.size or not len(entering):
            return entering, entering_rows
        items = self._items[slots]  # [n], the items that leave
        rows = self._rows[slots]
        # If several items enter one slot, each pushes out the one before it, and the last stays. NumPy does
        # not define which write to a repeated index wins, so a stable sort groups the items by slot.
        # NumPy has a fast radix sort for 16-bit keys.
        order = np.argsort(slots.astype(np.uint16) if self.size <= 1 << 16 else slots, kind="stable")
        in_order = slots[order]  # [n], rising
        again = in_order[1:] == in_order[:-1]  # [n - 1], whether the slot equals the one before it
        if again.any():
            later, earlier = order[1:][again], order[:-1][again]
            items[later], rows[later] = entering[earlier], entering_rows[earlier]
            last = order[np.append(~again, True)]  # [distinct slots]
            slots = slots[last]
            self._items[slots], self._rows[slots] = entering[last], entering_rows[last]
        else:
            self._items[slots], self._rows[slots] = entering, entering_rows
        return items, rows

    def begin_drain(self) -> None:
        """Start to empty the buffer in random order, because the input has ended."""
        if self._drain is None:
            self._drain = self.drain_order(self._seed, self._items[: self._filled])
            self._drained = 0

    def drain(self, count: int) -> tuple[keyed.Items, Rows]:
        """Remove and return up to ``count`` remaining items, with their storage rows."""
        assert self._drain is not None
        slots = self._drain[self._drained : self._drained + count]
        self._drained += len(slots)
        return self._items[slots], self._rows[slots]

    def load(self, items: keyed.Items, rows: Rows, *, draining: bool) -> None:
        """Refill the buffer with the repeats that it contained at a saved position."""
        # Usually, the items are in slot order. If ``draining``, no more items enter, and they are in the
        # order in which they will leave.
        self._filled, self._drained = len(items), 0
        self._items[: len(items)] = items
        self._rows[: len(items)] = rows
        self._drain = np.arange(len(items)) if draining else None


class Stream:
    """Computes from the seed the order in which one iteration outputs the repeats of its examples."""

    def __init__(
        self, seed: int, size: int, factor: Factor, *, rank: int, world: int, begin: int, bad: list[int]
    ) -> None:
        # ``size`` is the number of slots of the shuffle buffer; 0 means no shuffling.
        self.seed, self.size, self.factor = seed, size, factor
        # Example i of this rank is example ``i * world + rank`` of all ranks together. The iteration starts
        # with this rank's example ``begin``. ``bad`` contains the ascending numbers of this rank's unreadable
        # examples, which have no repeats.
        self.rank, self.world, self.begin, self.bad = rank, world, begin, bad

    def number(self, item: Any) -> Any:
        """Return this rank's number of the example that an item, or each item of an array, repeats."""
        return (item >> keyed.ECHO_BITS) // self.world

    def item_of(self, number: int) -> int:
        """Return the item for the first use of this rank's example with the given number."""
        return (number * self.world + self.rank) << keyed.ECHO_BITS

    def entering(self, start: int, stop: int) -> keyed.Items:
        """Return all repeats of this rank's readable examples with numbers in [start, stop), in order."""
        numbers = np.arange(start, stop, dtype=np.int64)  # [stop - start], before the bad ones are removed
        bad = self.bad[bisect_left(self.bad, start) : bisect_left(self.bad, stop)]
        if bad:
            numbers = np.setdiff1d(numbers, bad, assume_unique=True)
        return keyed.uses(numbers * self.world + self.rank, self.factor.counts(numbers))

    def contents(self, cursor: Cursor) -> Contents:
        """Compute which repeats have been made but not yet output at a position."""
        return Contents(self.held(cursor), self.pending(cursor))

    def pending(self, cursor: Cursor) -> keyed.Items:
        """Return the repeats of the latest example that have not entered the buffer at a position."""
        if cursor.last < 0:
            return keyed.NO_ITEMS
        number = self.number(cursor.last)
        repeats = self.entering(number, number + 1)
        return repeats[repeats > cursor.last]

    def _block_before(self, stop: int, last: int) -> tuple[keyed.Items, int]:
        """Return the repeats of the block of examples before number ``stop``, and where the block starts."""
        if stop <= self.begin:
            raise ValueError(
                "load_state_dict: the cursor lies before the start of its iteration, so the state belongs "
                "to another loader; load a state of this loader"
            )
        start = max(self.begin, stop - max(self.size, _LEAST_LOOK))
        items = self.entering(start, stop)
        # Repeats after ``last`` have not entered the buffer yet.
        return items[: np.searchsorted(items, last, side="right")], start

    def _after_last(self, cursor: Cursor) -> int:
        """Return the number of the first example whose repeats have not entered the buffer at a position."""
        return self.begin if cursor.last < 0 else self.number(cursor.last) + 1

    def held(self, cursor: Cursor) -> keyed.Items:
        """Compute the repeats in the shuffle buffer at a position, in the order of ``Contents.buffer``."""
        # A slot holds the last item that entered it, so search backwards until every slot has an item.
        buffer = np.full(min(self.size, cursor.entered), -1, dtype=np.int64)  # [slots filled]
        entered, stop = cursor.entered, self._after_last(cursor)
        while len(buffer) and buffer.min() < 0:
            items, stop = self._block_before(stop, cursor.last)  # the latest block first
            entered -= len(items)
            slots = ShuffleBuffer.slots(self.seed, self.size, items)  # [items]
            filling = min(max(self.size - entered, 0), len(items))
            # The first ``size`` items filled the slots in order, not at random. A state does not list bad
            # examples older than the oldest item in the buffer. Without them, the search counts too many
            # items, but this only shifts items that have already left the buffer.
            slots[:filling] = np.maximum(entered + np.arange(filling), 0)
            empty = buffer[slots] < 0
            # Items ascend, so the item that entered a slot last is the largest of those with this slot.
            np.maximum.at(buffer, slots[empty], items[empty])
        if cursor.drained:
            buffer = buffer[ShuffleBuffer.drain_order(self.seed, buffer)][cursor.drained :]
        return buffer

    def oldest(self, cursor: Cursor) -> int:
        """Return the oldest repeat that is needed to continue from a position."""
        following = self.item_of(self._after_last(cursor))
        return int(np.append(self.contents(cursor).items, following).min())

    def leaving(self, cursor: Cursor, first: int, stop: int) -> keyed.Items:
        """Compute the outputs ``first`` to ``stop - 1`` of the iteration, given any later position."""
        start = self.position_after(first, cursor)
        buffer = ShuffleBuffer(self.seed, self.size)
        held = self.held(start)
        buffer.load(held, held, draining=start.drained > 0)
        left = [keyed.NO_ITEMS]
        if not start.drained:
            left.append(self._outputs_between(buffer, start, cursor, stop - first))
        if cursor.drained:
            buffer.begin_drain()
            left.append(buffer.drain(stop - first)[0])
        return np.concatenate(left)[: stop - first]

    def position_after(self, outputs: int, later: Cursor) -> Cursor:
        """Return the position after the first ``outputs`` outputs, given any later position."""
        exchanged = max(0, later.entered - self.size)
        if outputs > exchanged:
            return later._replace(drained=outputs - exchanged)
        entered = min(self.size, later.entered) + outputs
        if not entered:
            return BEGINNING
        further, stop = later.entered - entered, self._after_last(later)
        items, stop = self._block_before(stop, later.last)  # search backwards from the known position
        while len(items) <= further:
            further -= len(items)
            items, stop = self._block_before(stop, later.last)
        return Cursor(entered, int(items[len(items) - 1 - further]))

    def _outputs_between(self, buffer: ShuffleBuffer, start: Cursor, end: Cursor, count: int) -> keyed.Items:
        """Return up to ``count`` repeats that are pushed out of the buffer between two positions."""
        # ``buffer`` must have the contents of position ``start``. Each repeat that enters changes them.
        left, entered = [keyed.NO_ITEMS], self.begin if start.last < 0 else self.number(start.last)
        count = min(count, end.entered - start.entered)
        while count > 0:
            stop = min(entered + _LEAST_LOOK, self.number(end.last) + 1)
            items = self.entering(entered, stop)
            items = items[(items > start.last) & (items <= end.last)][:count]
            left.append(buffer.swap(items, items, ShuffleBuffer.slots(self.seed, self.size, items))[0])
            entered, count = stop, count - len(items)
        return np.concatenate(left)
