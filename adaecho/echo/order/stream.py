"""The stream as a function of seed and number: the items that enter, stay in, and leave the shuffle buffer.

Paper, section 3: for the example echoing variants "we omitted the baseline's 'shuffle examples' buffer and
inserted a shuffle buffer after the echoing stage with the same size as the baseline's buffer". Here the slot
of an item in that buffer is a hash of the item. Hence:

1. Every good example enters in serial order, repeated by the factor.
2. The item that leaves when another enters is the last earlier item with the same slot.
3. Outputs and contents follow from the seed and the number of items that entered. The only history is the
   bad examples and the changes of the factor.

A cursor is three numbers. Buffers are caches that the loader can rebuild from it.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed

REPEATS, SLOT, DRAIN = keyed.STAGE_PURPOSES, keyed.STAGE_PURPOSES + 1, keyed.STAGE_PURPOSES + 2
_EVERY_STEPS = 20
_COUNTED = 1 << 16  # examples counted at once, whose arrays fit into the CPU cache
_LEAST_CHANGE = 0.05  # relative; smaller changes are measurement noise
_LEAST_LOOK = 1 << 12  # fresh examples searched at once, backwards

Rows = NDArray[np.int64]

History = list[tuple[int, float]]
"""Local number of the first fresh example under each factor, and that factor."""


def repeats(seed: int, numbers: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    """Return the number of repeats of each fresh example: floor or ceil of the factor, at random.

    Paper, section 2: a non-integer factor is the expectation of random repeats, here per item.
    """
    whole = math.floor(factor)
    counts = np.full(len(numbers), whole, dtype=np.int64)  # [n]
    if factor > whole:
        drawn = keyed.uniform(keyed.item_keys(seed, numbers << keyed.ECHO_BITS), REPEATS)  # [n]
        counts += drawn < factor - whole
    return counts


class Factor:
    """The echoing factor of a stage and its history, a part of the log.

    Random numbers are keyed by local number, not by serial, so that ranks with equally many examples make
    equally many items.

    Args:
        seed: seed of the repeats for a non-integer factor.
        first: the factor until its first change.

    Attributes:
        history: changes of the factor. Iteration only appends, so that any thread may read it.
    """

    def __init__(self, seed: int, first: float) -> None:
        self.history: History = [(0, first)]
        self._seed = seed
        self._asked_for: float | None = None

    @property
    def value(self) -> float:
        """The factor of the next fresh example."""
        return self.history[-1][1]

    def counts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of repeats of each example; ``numbers`` are local, ascending, [n]."""
        first, value = self.history[-1]
        if not len(numbers) or numbers[0] >= first:
            return repeats(self._seed, numbers, value)
        counts = np.empty(len(numbers), dtype=np.int64)  # [n]
        for first, value in self.history:
            later = int(np.searchsorted(numbers, first))
            counts[later:] = repeats(self._seed, numbers[later:], value)
        return counts

    def total(self, first: int, count: int) -> int:
        """Return the total number of repeats of ``count`` fresh examples from a local number on."""
        if first >= self.history[-1][0] and self.value == math.floor(self.value):
            return count * int(self.value)
        end = first + count
        blocks = (np.arange(start, min(start + _COUNTED, end)) for start in range(first, end, _COUNTED))
        return sum(int(self.counts(numbers).sum()) for numbers in blocks)

    def fresh_needed(self, items: int, next_index: int) -> int:
        """Return the smallest number of fresh examples from a local number on that make ``items`` items."""
        most = math.ceil(items / math.floor(self.value))
        if self.value == math.floor(self.value):
            return most
        numbers = next_index + np.arange(most, dtype=np.int64)  # [most]
        return int(np.searchsorted(np.cumsum(self.counts(numbers)), items)) + 1

    def change(self, value: float) -> None:
        """Request another factor for later examples; any thread may call this."""
        self._asked_for = value

    def settle(self, next_index: int) -> None:
        """Apply a requested factor from a local number on."""
        if self._asked_for is not None:
            value, self._asked_for = self._asked_for, None
            self.history.append((next_index, value))

    def begun(self, index: int) -> "Factor":
        """Return the factor for an iteration from a local number on: the current one."""
        begun, history = Factor(self._seed, self.value), self.history
        if history[-1][0] > index:
            history = [*(change for change in history if change[0] < index), (index, self.value)]
        begun.go_back(history)
        return begun

    def before(self, index: int) -> History:
        """Return the history up to a local number."""
        return [change for change in self.history if change[0] <= index or change is self.history[0]]

    def go_back(self, history: History) -> None:
        """Restore an earlier history."""
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
        """Count a step; return whether to update the factor."""
        self._steps += 1
        return not self._steps % _EVERY_STEPS

    def follow(self, ratio: float | None, factor: Factor) -> None:
        """Set the factor to the ratio, which is None until known."""
        if ratio is None:
            return
        wanted = round(float(min(max(ratio, 1.0), self._max_factor)), 2)  # a Python float, for states
        if abs(wanted - factor.value) > _LEAST_CHANGE * factor.value:
            factor.change(wanted)


class Cursor(NamedTuple):
    """Cursor of a stream, counted from the start of its iteration.

    Attributes:
        entered: number of items that have entered the buffer.
        last: the last of these items; -1 for none.
        drained: number of outputs since the input ended.
    """

    entered: int = 0
    last: int = -1
    drained: int = 0

    def outputs(self, size: int) -> int:
        """Number of outputs of a buffer with ``size`` slots."""
        return max(0, self.entered - size) + self.drained


BEGINNING = Cursor()


class Contents(NamedTuple):
    """Contents at a cursor: the buffer, by slot or in drain order, and repeats that wait to enter."""

    buffer: keyed.Items = keyed.NO_ITEMS
    pending: keyed.Items = keyed.NO_ITEMS

    @property
    def items(self) -> keyed.Items:
        """All items, int64 [n]."""
        return np.concatenate(self)


NOTHING = Contents()


class ShuffleBuffer:
    """A shuffle buffer: each entering item replaces the item in a uniformly random slot, which leaves.

    It fills before any item leaves, and drains in random order at the end of an iteration.

    Args:
        seed: seed of the slots.
        size: number of slots; 0 passes items on in order.
    """

    def __init__(self, seed: int, size: int) -> None:
        self.size = size
        self._seed = seed
        self._items = np.zeros(size, dtype=np.int64)  # [size], by slot
        self._rows = np.zeros(size, dtype=np.int64)  # [size], the row of each in the pool
        self._filled = 0
        self._drain: NDArray[np.int64] | None = None  # slots in the order in which they leave
        self._drained = 0

    @staticmethod
    def slots(seed: int, size: int, items: keyed.Items) -> NDArray[np.int64]:
        """Return the slot of each item, uniform, int64 [n]."""
        if size <= 1:
            return np.zeros(len(items), dtype=np.int64)
        return keyed.integers(keyed.item_keys(seed, items), SLOT, 0, size)

    @staticmethod
    def drain_order(seed: int, items: keyed.Items) -> NDArray[np.int64]:
        """Return the slots in the order in which they drain."""
        return np.argsort(keyed.bits(keyed.item_keys(seed, items), DRAIN), kind="stable")

    @property
    def space(self) -> int:
        """Number of empty slots."""
        return self.size - self._filled

    @property
    def draining(self) -> bool:
        """Whether the input has ended."""
        return self._drain is not None

    def fill(self, items: keyed.Items, rows: Rows) -> None:
        """Store items and their rows in empty slots."""
        end = self._filled + len(items)
        self._items[self._filled : end] = items
        self._rows[self._filled : end] = rows
        self._filled = end

    def swap(
        self, entering: keyed.Items, entering_rows: Rows, slots: NDArray[np.int64]
    ) -> tuple[keyed.Items, Rows]:
        """Exchange each entering item for the one in its slot; return items and rows that leave, [n] each.

        If several items of a block share a slot, each pushes out the one before it, and the last stays. A
        stable sort by slot finds them, because NumPy does not define which of two writes wins.
        """
        if not self.size or not len(entering):
            return entering, entering_rows
        items = self._items[slots]  # [n], the items that leave
        rows = self._rows[slots]
        # NumPy sorts 16-bit keys by radix.
        order = np.argsort(slots.astype(np.uint16) if self.size <= 1 << 16 else slots, kind="stable")
        in_order = slots[order]  # [n], rising
        again = in_order[1:] == in_order[:-1]  # [n - 1]: the same slot as the one before
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
        """Begin to drain in random order."""
        if self._drain is None:
            self._drain = self.drain_order(self._seed, self._items[: self._filled])
            self._drained = 0

    def drain(self, count: int) -> tuple[keyed.Items, Rows]:
        """Return up to ``count`` of the remaining items, and their rows."""
        assert self._drain is not None
        slots = self._drain[self._drained : self._drained + count]
        self._drained += len(slots)
        return self._items[slots], self._rows[slots]

    def load(self, items: keyed.Items, rows: Rows, *, draining: bool) -> None:
        """Load the contents at a cursor, by slot or in drain order."""
        self._filled, self._drained = len(items), 0
        self._items[: len(items)] = items
        self._rows[: len(items)] = rows
        self._drain = np.arange(len(items)) if draining else None


class Stream:
    """The items of one iteration of one stage, of examples or of batches.

    Args:
        seed: seed of the buffer.
        size: slots of the buffer; 0 passes items on in order.
        factor: the echoing factor.
        rank, world: the serial of local number i is ``i * world + rank``.
        begin: first local number of the iteration.
        bad: local numbers of bad examples, ascending.
    """

    def __init__(
        self, seed: int, size: int, factor: Factor, *, rank: int, world: int, begin: int, bad: list[int]
    ) -> None:
        self.seed, self.size, self.factor = seed, size, factor
        self.rank, self.world, self.begin, self.bad = rank, world, begin, bad

    def number(self, item: int) -> int:
        """Return the local number of the fresh example of an item."""
        return (item >> keyed.ECHO_BITS) // self.world

    def numbers(self, items: keyed.Items) -> Rows:
        """Return the local numbers of the fresh examples of items, int64 [n]."""
        return (items >> keyed.ECHO_BITS) // self.world

    def item_of(self, number: int) -> int:
        """Return the first item of a local number."""
        return (number * self.world + self.rank) << keyed.ECHO_BITS

    def entering(self, start: int, stop: int) -> keyed.Items:
        """Return the items of all good examples with local numbers in [start, stop)."""
        numbers = np.arange(start, stop, dtype=np.int64)  # [stop - start], less the bad ones
        bad = self.bad[bisect_left(self.bad, start) : bisect_left(self.bad, stop)]
        if bad:
            numbers = np.setdiff1d(numbers, bad, assume_unique=True)
        return keyed.uses(numbers * self.world + self.rank, self.factor.counts(numbers))

    def contents(self, cursor: Cursor) -> Contents:
        """Return the contents at a cursor."""
        return Contents(self.held(cursor), self.pending(cursor))

    def pending(self, cursor: Cursor) -> keyed.Items:
        """Return the repeats of the last example that have not entered yet."""
        if cursor.last < 0:
            return keyed.NO_ITEMS
        number = self.number(cursor.last)
        repeats = self.entering(number, number + 1)
        return repeats[repeats > cursor.last]

    def _block_before(self, stop: int, last: int) -> tuple[keyed.Items, int]:
        """Return the items up to ``last`` of a block of local numbers before ``stop``, and its start."""
        if stop <= self.begin:
            raise ValueError(
                "load_state_dict: the cursor lies before the start of its iteration, so the state is of "
                "another loader; load a state of this loader"
            )
        start = max(self.begin, stop - max(self.size, _LEAST_LOOK))
        items = self.entering(start, stop)
        return items[: np.searchsorted(items, last, side="right")], start

    def _after_last(self, cursor: Cursor) -> int:
        """Return the local number of the first example without any item in the stream."""
        return self.begin if cursor.last < 0 else self.number(cursor.last) + 1

    def held(self, cursor: Cursor) -> keyed.Items:
        """Return the contents of the buffer, by slot, or in drain order once it drains."""
        buffer = np.full(min(self.size, cursor.entered), -1, dtype=np.int64)  # [slots filled]
        entered, stop = cursor.entered, self._after_last(cursor)
        while len(buffer) and buffer.min() < 0:
            items, stop = self._block_before(stop, cursor.last)  # the latest block first
            entered -= len(items)
            slots = ShuffleBuffer.slots(self.seed, self.size, items)  # [items]
            filling = min(max(self.size - entered, 0), len(items))
            # The first items filled the slots in order. The log of a state lacks bad examples before the
            # oldest item in the buffer. These would only shift items that have left already.
            slots[:filling] = np.maximum(entered + np.arange(filling), 0)
            empty = buffer[slots] < 0
            # Items ascend, so the last of several in one slot is the largest.
            np.maximum.at(buffer, slots[empty], items[empty])
        if cursor.drained:
            buffer = buffer[ShuffleBuffer.drain_order(self.seed, buffer)][cursor.drained :]
        return buffer

    def oldest(self, cursor: Cursor) -> int:
        """Return the oldest item in the contents, or the next to enter if they are empty."""
        following = self.item_of(self._after_last(cursor))
        return int(np.append(self.contents(cursor).items, following).min())

    def leaving(self, cursor: Cursor, first: int, stop: int) -> keyed.Items:
        """Return the outputs [first, stop), all before a cursor."""
        start = self.earlier(cursor, first)
        buffer = ShuffleBuffer(self.seed, self.size)
        held = self.held(start)
        buffer.load(held, held, draining=start.drained > 0)
        left = [keyed.NO_ITEMS]
        if not start.drained:
            left.append(self._exchanged(buffer, start, cursor, stop - first))
        if cursor.drained:
            buffer.begin_drain()
            left.append(buffer.drain(stop - first)[0])
        return np.concatenate(left)[: stop - first]

    def earlier(self, cursor: Cursor, output: int) -> Cursor:
        """Return the cursor after ``output`` outputs, no later than ``cursor``."""
        exchanged = max(0, cursor.entered - self.size)
        if output > exchanged:
            return cursor._replace(drained=output - exchanged)
        entered = min(self.size, cursor.entered) + output
        if not entered:
            return BEGINNING
        further, stop = cursor.entered - entered, self._after_last(cursor)
        items, stop = self._block_before(stop, cursor.last)
        while len(items) <= further:
            further -= len(items)
            items, stop = self._block_before(stop, cursor.last)
        return Cursor(entered, int(items[len(items) - 1 - further]))

    def _exchanged(self, buffer: ShuffleBuffer, start: Cursor, end: Cursor, count: int) -> keyed.Items:
        """Return up to ``count`` outputs between two cursors while the input continues."""
        left, entered = [keyed.NO_ITEMS], self.begin if start.last < 0 else self.number(start.last)
        count = min(count, end.entered - start.entered)
        while count > 0:
            stop = min(entered + _LEAST_LOOK, self.number(end.last) + 1)
            items = self.entering(entered, stop)
            items = items[(items > start.last) & (items <= end.last)][:count]
            left.append(buffer.swap(items, items, ShuffleBuffer.slots(self.seed, self.size, items))[0])
            entered, count = stop, count - len(items)
        return np.concatenate(left)
