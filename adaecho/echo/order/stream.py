"""The stream: what enters, is held, leaves and drains, as a function of seed and number.

Paper, section 3: for the example echoing variants "we omitted the baseline's 'shuffle examples' buffer and
inserted a shuffle buffer after the echoing stage with the same size as the baseline's buffer". Here the slot
that an item takes in that buffer is a hash of the item. So

1. what enters is every good example in serial order, each as often as the factor says;
2. the item that leaves as another enters is the last one before it that took the same slot;
3. hence what leaves, and what is held, follow from the seed and how many have entered, without any history
   but the bad examples and the changes of the factor.

So a cursor is three numbers, and whatever else there is, buffers too, is a cache of what it tells.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed

REPEATS, SLOT, DRAIN = keyed.STAGE_PURPOSES, keyed.STAGE_PURPOSES + 1, keyed.STAGE_PURPOSES + 2
_EVERY_STEPS = 20
_COUNTED = 1 << 16  # examples at once, whose arrays stay in the processor's cache
_LEAST_CHANGE = 0.05  # relative: measurement noise alone should not change the factor
_LEAST_LOOK = 1 << 12  # fresh examples looked back over at once

Rows = NDArray[np.int64]

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


class Cursor(NamedTuple):
    """Where a stream stands, counted since its iteration began.

    Attributes:
        entered: items that have entered the buffer.
        last: the last of them; -1 for none.
        drained: outputs since the pass ended.
    """

    entered: int = 0
    last: int = -1
    drained: int = 0

    def outputs(self, size: int) -> int:
        """How many have left a buffer of so many slots."""
        return max(0, self.entered - size) + self.drained


BEGINNING = Cursor()


class Contents(NamedTuple):
    """What a cursor holds: the buffer, by slot or as it drains, and the last example's repeats to come."""

    buffer: keyed.Items = keyed.NO_ITEMS
    pending: keyed.Items = keyed.NO_ITEMS

    @property
    def items(self) -> keyed.Items:
        """All of them, int64 [n]."""
        return np.concatenate(self)


NOTHING = Contents()


class ShuffleBuffer:
    """A true one: for each item that enters, the one in a uniformly random slot leaves and it takes its slot.

    It fills before anything leaves; at the end of a pass it drains in random order.

    Args:
        seed: of its draws.
        size: slots; 0 passes everything on in order.
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
        """The slot that each item will take, uniform, int64 [n]."""
        if size <= 1:
            return np.zeros(len(items), dtype=np.int64)
        return keyed.integers(keyed.item_keys(seed, items), SLOT, 0, size)

    @staticmethod
    def drain_order(seed: int, items: keyed.Items) -> NDArray[np.int64]:
        """The slots of what is held at the end of a pass, in the order in which they leave."""
        return np.argsort(keyed.bits(keyed.item_keys(seed, items), DRAIN), kind="stable")

    @property
    def space(self) -> int:
        """Slots that have not been filled yet."""
        return self.size - self._filled

    @property
    def draining(self) -> bool:
        """Whether the pass has ended and nothing enters any more."""
        return self._drain is not None

    def fill(self, items: keyed.Items, rows: Rows) -> None:
        """Store items, with their rows in the pool, in slots that are still empty."""
        end = self._filled + len(items)
        self._items[self._filled : end] = items
        self._rows[self._filled : end] = rows
        self._filled = end

    def swap(
        self, entering: keyed.Items, entering_rows: Rows, slots: NDArray[np.int64]
    ) -> tuple[keyed.Items, Rows]:
        """Exchange each entering item, in turn, for the one in its slot; items and rows that leave, [n] each.

        Several may draw one slot in a block: then each but the first pushes out its predecessor, and the
        last stays. A stable sort by slot finds them (NumPy doesn't promise which of two writes wins).
        """
        if not self.size or not len(entering):
            return entering, entering_rows
        items = self._items[slots]  # [n], what leaves
        rows = self._rows[slots]
        # 16-bit keys are sorted by radix.
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
        """Nothing enters any more: what is left leaves in random order."""
        if self._drain is None:
            self._drain = self.drain_order(self._seed, self._items[: self._filled])
            self._drained = 0

    def drain(self, count: int) -> tuple[keyed.Items, Rows]:
        """Up to ``count`` items, and their rows, of what is left."""
        assert self._drain is not None
        slots = self._drain[self._drained : self._drained + count]
        self._drained += len(slots)
        return self._items[slots], self._rows[slots]

    def load(self, items: keyed.Items, rows: Rows, *, draining: bool) -> None:
        """Hold what it held at a cursor, by slot or in the order in which it drains, and nothing else."""
        self._filled, self._drained = len(items), 0
        self._items[: len(items)] = items
        self._rows[: len(items)] = rows
        self._drain = np.arange(len(items)) if draining else None


class Stream:
    """The items of one iteration of one stage, of examples or of batches.

    Args:
        seed: of its draws.
        size: slots of the buffer; 0 passes everything on in order.
        factor: how often each is repeated.
        rank, world: the serial of local number i is ``i * world + rank``.
        begin: local number at which the iteration begins.
        bad: local numbers that gave no example, rising; only appended to.
    """

    def __init__(
        self, seed: int, size: int, factor: Factor, *, rank: int, world: int, begin: int, bad: list[int]
    ) -> None:
        self.seed, self.size, self.factor = seed, size, factor
        self.rank, self.world, self.begin, self.bad = rank, world, begin, bad

    def number(self, item: int) -> int:
        """The local number of the fresh example of an item."""
        return (item >> keyed.ECHO_BITS) // self.world

    def numbers(self, items: keyed.Items) -> Rows:
        """The local numbers of the fresh examples of items, int64 [n]."""
        return (items >> keyed.ECHO_BITS) // self.world

    def item_of(self, number: int) -> int:
        """The first use of a local number."""
        return (number * self.world + self.rank) << keyed.ECHO_BITS

    def entering(self, start: int, stop: int) -> keyed.Items:
        """All uses of the good ones among the local numbers from ``start`` to before ``stop``."""
        numbers = np.arange(start, stop, dtype=np.int64)  # [stop - start], less the bad ones
        bad = self.bad[bisect_left(self.bad, start) : bisect_left(self.bad, stop)]
        if bad:
            numbers = np.setdiff1d(numbers, bad, assume_unique=True)
        return keyed.uses(numbers * self.world + self.rank, self.factor.counts(numbers))

    def contents(self, cursor: Cursor) -> Contents:
        """What is held at a cursor."""
        return Contents(self.held(cursor), self.pending(cursor))

    def pending(self, cursor: Cursor) -> keyed.Items:
        """The repeats of the last example to enter that have not."""
        if cursor.last < 0:
            return keyed.NO_ITEMS
        number = self.number(cursor.last)
        repeats = self.entering(number, number + 1)
        return repeats[repeats > cursor.last]

    def _block_before(self, stop: int, last: int) -> tuple[keyed.Items, int]:
        """What entered up to an item, of a block of local numbers before one, and where that block begins."""
        if stop <= self.begin:
            raise ValueError(
                "load_state_dict: it lies before the beginning of its iteration: the state is of another "
                "loader; load the one that was saved by this"
            )
        start = max(self.begin, stop - max(self.size, _LEAST_LOOK))
        items = self.entering(start, stop)
        return items[: np.searchsorted(items, last, side="right")], start

    def _after_last(self, cursor: Cursor) -> int:
        """Local number of the first example of which no use has entered."""
        return self.begin if cursor.last < 0 else self.number(cursor.last) + 1

    def held(self, cursor: Cursor) -> keyed.Items:
        """What the buffer holds, by slot, or where some have drained in the order in which the rest will."""
        buffer = np.full(min(self.size, cursor.entered), -1, dtype=np.int64)  # [slots filled]
        entered, stop = cursor.entered, self._after_last(cursor)
        while len(buffer) and buffer.min() < 0:
            items, stop = self._block_before(stop, cursor.last)  # the latest block first
            entered -= len(items)  # before these
            slots = ShuffleBuffer.slots(self.seed, self.size, items)  # [items]
            filling = min(max(self.size - entered, 0), len(items))
            # The first ones filled the slots in order. A resume's log lacks what was bad before the oldest
            # item held: counted here, it only moves items from before that, which are in no slot any more.
            slots[:filling] = np.maximum(entered + np.arange(filling), 0)
            empty = buffer[slots] < 0
            # Items rise: of several in one slot the last is the largest.
            np.maximum.at(buffer, slots[empty], items[empty])
        if cursor.drained:
            buffer = buffer[ShuffleBuffer.drain_order(self.seed, buffer)][cursor.drained :]
        return buffer

    def oldest(self, cursor: Cursor) -> int:
        """The oldest item that is held, or where none is, the next to enter."""
        following = self.item_of(self._after_last(cursor))
        return int(np.append(self.contents(cursor).items, following).min())

    def leaving(self, cursor: Cursor, first: int, stop: int) -> keyed.Items:
        """The outputs from number ``first`` to before ``stop``, all of which had left at a cursor."""
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
        """The cursor at which so many outputs had left, no later than another."""
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
        """Up to ``count`` outputs between two cursors, as others enter."""
        left, entered = [keyed.NO_ITEMS], self.begin if start.last < 0 else self.number(start.last)
        count = min(count, end.entered - start.entered)
        while count > 0:
            stop = min(entered + _LEAST_LOOK, self.number(end.last) + 1)
            items = self.entering(entered, stop)
            items = items[(items > start.last) & (items <= end.last)][:count]
            left.append(buffer.swap(items, items, ShuffleBuffer.slots(self.seed, self.size, items))[0])
            entered, count = stop, count - len(items)
        return np.concatenate(left)
