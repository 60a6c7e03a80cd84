"""The order of examples after repeating and shuffling, computed from the seed for any position.

Each example enters a shuffle buffer as often as the echoing factor says. One use of an example is called an
item. Once the buffer is full, each item that enters pushes out the item in a random slot.

All random choices are computed from the seed. A resumed loader can therefore compute which items were in the
buffer at a position, so no state has to store the buffer. The position takes three numbers (``Cursor``).
"""

import math
from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed

REPEATS, SLOT, DRAIN = keyed.STAGE_PURPOSES, keyed.STAGE_PURPOSES + 1, keyed.STAGE_PURPOSES + 2
_EVERY_STEPS = 20  # number of steps between two updates of the automatic factor
_COUNTED = 1 << 16  # number of examples counted at once, so that their arrays fit into the CPU cache
_LEAST_CHANGE = 0.05  # smallest relative change of the factor; smaller ones are measurement noise
_LEAST_LOOK = 1 << 12  # smallest number of fresh examples to search at once

Rows = NDArray[np.int64]

History = list[tuple[int, float]]
"""Pairs (number, factor): each echoing factor so far, after the number of the first example it applies to."""


def repeats(seed: int, numbers: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    """Return how often each fresh example is used: floor(e) or ceil(e) times, at random with mean e.

    e is the echoing factor (paper, section 2).

    Args:
        seed: seed of the random numbers.
        numbers: numbers of the examples in this rank's reading order, int64 [n].
        factor: the echoing factor e.

    Returns:
        Numbers of uses, int64 [n].
    """
    whole = math.floor(factor)
    counts = np.full(len(numbers), whole, dtype=np.int64)  # [n]
    if factor > whole:
        # Keyed by local number, so that ranks with equally many examples have equally many uses.
        drawn = keyed.uniform(keyed.item_keys(seed, numbers << keyed.ECHO_BITS), REPEATS)  # [n]
        counts += drawn < factor - whole
    return counts


class Factor:
    """The echoing factor e, the mean number of uses of each example, with its changes during training.

    If e is not an integer, each example is used floor(e) or ceil(e) times, at random with mean e.

    Args:
        seed: seed of the random numbers of uses.
        first: the factor at the start of training.

    Attributes:
        history: the factors so far, each with the number of the first example that it applies to. Iteration
            only appends to this list, so any thread may read it.
    """

    def __init__(self, seed: int, first: float) -> None:
        self.history: History = [(0, first)]
        self._seed = seed
        self._asked_for: float | None = None

    @property
    def value(self) -> float:
        """The factor that applies to the next fresh example."""
        return self.history[-1][1]

    def counts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how often each example is used, int64 [n].

        Args:
            numbers: numbers of the examples in this rank's reading order, ascending, int64 [n].
        """
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
        """Return the smallest number of next fresh examples that are used at least ``items`` times in total.

        Args:
            items: required total number of uses.
            next_index: number of the first of these examples in this rank's reading order. The result depends
                on it, because the number of uses differs between examples unless the factor is an integer.
        """
        most = math.ceil(items / math.floor(self.value))
        if self.value == math.floor(self.value):
            return most
        numbers = next_index + np.arange(most, dtype=np.int64)  # [most]
        return int(np.searchsorted(np.cumsum(self.counts(numbers)), items)) + 1

    def change(self, value: float) -> None:
        """Request another factor for later examples. Any thread may call this."""
        self._asked_for = value

    def settle(self, next_index: int) -> None:
        """Apply the requested factor, if there is one, to all examples from number ``next_index`` on."""
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
        """Return the part of the history up to example number ``index``."""
        return [change for change in self.history if change[0] <= index or change is self.history[0]]

    def go_back(self, history: History) -> None:
        """Restore an earlier history and discard any requested change."""
        self.history, self._asked_for = list(history), None


class AutoFactor:
    """The rule of ``factor="auto"``, which sets the echoing factor e to the measured ratio R.

    R is the loading time of a batch divided by the time of a training step. With e = R, training on repeats
    fills the time until the next fresh batch (paper, section 2, after equation 1).

    Args:
        max_factor: upper bound of the factor. The lower bound is 1.
    """

    def __init__(self, max_factor: float) -> None:
        self._max_factor = max_factor
        self._steps = 0

    def due(self) -> bool:
        """Count a training step and return whether the factor should be updated now."""
        self._steps += 1
        return not self._steps % _EVERY_STEPS

    def follow(self, ratio: float | None, factor: Factor) -> None:
        """Request a factor equal to the ratio R, limited to [1, ``max_factor``].

        Nothing is requested if R is not known yet (None), or if the factor would change by 5 % or less.
        """
        if ratio is None:
            return
        wanted = round(float(min(max(ratio, 1.0), self._max_factor)), 2)  # a Python float, for states
        if abs(wanted - factor.value) > _LEAST_CHANGE * factor.value:
            factor.change(wanted)


class Cursor(NamedTuple):
    """Position in the output of an echo stage, counted from the start of the iteration.

    The stage repeats examples (or batches). The repeats, called items, pass through a shuffle buffer.

    Attributes:
        entered: number of items that have entered the buffer.
        last: the item that entered last, packed as in ``order.keyed``; -1 if none has entered.
        drained: number of items that have left since the input ended. From then on, the buffer only empties.
    """

    entered: int = 0
    last: int = -1
    drained: int = 0

    def outputs(self, size: int) -> int:
        """Return the number of items that have left the buffer, if the buffer has ``size`` slots."""
        return max(0, self.entered - size) + self.drained


BEGINNING = Cursor()


class Contents(NamedTuple):
    """The uses of examples that an echo stage holds at one position.

    They have been created by repeating examples, but have not been output yet.

    Attributes:
        buffer: the uses in the shuffle buffer, int64 [n], ordered by slot. After the input has ended, they
            are in the order in which they will leave.
        pending: further uses of the example that entered last, which still wait to enter the buffer;
            int64 [m].
    """

    buffer: keyed.Items = keyed.NO_ITEMS
    pending: keyed.Items = keyed.NO_ITEMS

    @property
    def items(self) -> keyed.Items:
        """All uses, first ``buffer`` and then ``pending``; int64 [n + m]."""
        return np.concatenate(self)


NOTHING = Contents()


# Paper, section 3: "we omitted the baseline's 'shuffle examples' buffer and inserted a shuffle buffer after
# the echoing stage with the same size as the baseline's buffer".
class ShuffleBuffer:
    """A shuffle buffer with a fixed number of slots.

    Once all slots are filled, each item that enters pushes out the item in a random slot. At the end of an
    iteration, the remaining items leave in random order. An item is one use of an example, packed in an
    int64.

    Args:
        seed: seed of the random slots.
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
        """Put items, with the storage rows of their examples, into empty slots."""
        end = self._filled + len(items)
        self._items[self._filled : end] = items
        self._rows[self._filled : end] = rows
        self._filled = end

    def swap(
        self, entering: keyed.Items, entering_rows: Rows, slots: NDArray[np.int64]
    ) -> tuple[keyed.Items, Rows]:
        """Put each item into its slot of the full buffer, and return the items that were in these slots.

        Args:
            entering: the items that enter (one item is one use of an example), int64 [n].
            entering_rows: storage rows of their examples, int64 [n].
            slots: the slot that each item enters, int64 [n].

        Returns:
            The items that leave and the storage rows of their examples, int64 [n] each.
        """
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
        """Record the end of the input. The remaining items then leave the buffer in random order."""
        if self._drain is None:
            self._drain = self.drain_order(self._seed, self._items[: self._filled])
            self._drained = 0

    def drain(self, count: int) -> tuple[keyed.Items, Rows]:
        """Remove and return up to ``count`` remaining items, with the storage rows of their examples."""
        assert self._drain is not None
        slots = self._drain[self._drained : self._drained + count]
        self._drained += len(slots)
        return self._items[slots], self._rows[slots]

    def load(self, items: keyed.Items, rows: Rows, *, draining: bool) -> None:
        """Replace the contents of the buffer, in order to continue from a saved position.

        Args:
            items: the uses of examples to put into the buffer, int64 [n]. They are in the order of the slots,
                or if ``draining``, in the order in which they will leave.
            rows: storage rows of their examples, int64 [n].
            draining: whether the input has already ended, so that the buffer only empties.
        """
        self._filled, self._drained = len(items), 0
        self._items[: len(items)] = items
        self._rows[: len(items)] = rows
        self._drain = np.arange(len(items)) if draining else None


class Stream:
    """The sequence of outputs of an echo stage in one iteration, computed from the seed.

    An output is one use of an example (or of a batch, if the stage repeats batches). The stage repeats each
    example and passes the repeats through a shuffle buffer. Each rank numbers its examples in reading order.

    Args:
        seed: seed of the shuffle buffer.
        size: number of slots of the shuffle buffer; with size 0, the outputs are not shuffled.
        factor: the echoing factor, with its changes.
        rank, world: this rank and the number of ranks. Example number i of this rank is example number
            ``i * world + rank`` of all ranks together, which is its serial number.
        begin: number of this rank's first example in the iteration.
        bad: numbers of this rank's examples that could not be read, ascending. They have no outputs.
    """

    def __init__(
        self, seed: int, size: int, factor: Factor, *, rank: int, world: int, begin: int, bad: list[int]
    ) -> None:
        self.seed, self.size, self.factor = seed, size, factor
        self.rank, self.world, self.begin, self.bad = rank, world, begin, bad

    def number(self, item: Any) -> Any:
        """Return the number of an item's example in this rank's reading order; also for an array of items."""
        return (item >> keyed.ECHO_BITS) // self.world

    def item_of(self, number: int) -> int:
        """Return the packed int64 for the first use of this rank's example with the given number."""
        return (number * self.world + self.rank) << keyed.ECHO_BITS

    def entering(self, start: int, stop: int) -> keyed.Items:
        """Return all uses of this rank's good examples with numbers in [start, stop), in reading order."""
        numbers = np.arange(start, stop, dtype=np.int64)  # [stop - start], before the bad ones are removed
        bad = self.bad[bisect_left(self.bad, start) : bisect_left(self.bad, stop)]
        if bad:
            numbers = np.setdiff1d(numbers, bad, assume_unique=True)
        return keyed.uses(numbers * self.world + self.rank, self.factor.counts(numbers))

    def contents(self, cursor: Cursor) -> Contents:
        """Compute the uses of examples that are in the buffer, or wait to enter it, at a position."""
        return Contents(self.held(cursor), self.pending(cursor))

    def pending(self, cursor: Cursor) -> keyed.Items:
        """Return the remaining uses of the example that is entering the buffer at a position."""
        if cursor.last < 0:
            return keyed.NO_ITEMS
        number = self.number(cursor.last)
        repeats = self.entering(number, number + 1)
        return repeats[repeats > cursor.last]

    def _block_before(self, stop: int, last: int) -> tuple[keyed.Items, int]:
        """Return the uses of a block of examples, as one step of a search backwards through the stream.

        Args:
            stop: number of the first example after the block, in this rank's reading order.
            last: the last use to return, at which the search began.

        Returns:
            The uses, and the number of the first example in the block.

        Raises:
            ValueError: the search has passed the start of the iteration, so the position is not from this
                loader.
        """
        if stop <= self.begin:
            raise ValueError(
                "load_state_dict: the cursor lies before the start of its iteration, so the state is of "
                "another loader; load a state of this loader"
            )
        start = max(self.begin, stop - max(self.size, _LEAST_LOOK))
        items = self.entering(start, stop)
        return items[: np.searchsorted(items, last, side="right")], start

    def _after_last(self, cursor: Cursor) -> int:
        """Return the number of the first example of which no use has entered the buffer at a position."""
        return self.begin if cursor.last < 0 else self.number(cursor.last) + 1

    def held(self, cursor: Cursor) -> keyed.Items:
        """Compute the uses of examples that are in the buffer at a position.

        They are ordered by slot, or after the input has ended, in the order in which they will leave.
        """
        # A slot holds the last item that entered it, so search backwards until every slot has an item.
        buffer = np.full(min(self.size, cursor.entered), -1, dtype=np.int64)  # [slots filled]
        entered, stop = cursor.entered, self._after_last(cursor)
        while len(buffer) and buffer.min() < 0:
            items, stop = self._block_before(stop, cursor.last)  # the latest block first
            entered -= len(items)
            slots = ShuffleBuffer.slots(self.seed, self.size, items)  # [items]
            filling = min(max(self.size - entered, 0), len(items))
            # The first ``size`` items filled the slots in order, not at random. A state does not list bad
            # examples older than the oldest item in the buffer. Without them the search counts too many
            # items, but this only shifts items that have already left the buffer.
            slots[:filling] = np.maximum(entered + np.arange(filling), 0)
            empty = buffer[slots] < 0
            # Items ascend, so the item that entered a slot last is the largest of those with this slot.
            np.maximum.at(buffer, slots[empty], items[empty])
        if cursor.drained:
            buffer = buffer[ShuffleBuffer.drain_order(self.seed, buffer)][cursor.drained :]
        return buffer

    def oldest(self, cursor: Cursor) -> int:
        """Return the oldest item in the buffer, or waiting to enter it, at a position.

        An item is one use of an example. If there is none, return the next item to enter.
        """
        following = self.item_of(self._after_last(cursor))
        return int(np.append(self.contents(cursor).items, following).min())

    def leaving(self, cursor: Cursor, first: int, stop: int) -> keyed.Items:
        """Compute the outputs ``first`` to ``stop - 1`` of the iteration, given any later position."""
        start = self.earlier(cursor, first)
        buffer = ShuffleBuffer(self.seed, self.size)
        held = self.held(start)
        buffer.load(held, held, draining=start.drained > 0)
        left = [keyed.NO_ITEMS]
        if not start.drained:
            left.append(self._replayed(buffer, start, cursor, stop - first))
        if cursor.drained:
            buffer.begin_drain()
            left.append(buffer.drain(stop - first)[0])
        return np.concatenate(left)[: stop - first]

    def earlier(self, cursor: Cursor, output: int) -> Cursor:
        """Return the stream position after the first ``output`` outputs of the iteration.

        Args:
            cursor: a known position, at or after the requested one. The method searches backwards from it.
            output: number of outputs since the start of the iteration.
        """
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

    def _replayed(self, buffer: ShuffleBuffer, start: Cursor, end: Cursor, count: int) -> keyed.Items:
        """Compute the outputs between two stream positions by moving items through the full buffer again.

        Outputs after the end of the input are not included.

        Args:
            buffer: the buffer with its contents at ``start``. This method changes its contents.
            start, end: the two positions.
            count: largest number of outputs to return.
        """
        left, entered = [keyed.NO_ITEMS], self.begin if start.last < 0 else self.number(start.last)
        count = min(count, end.entered - start.entered)
        while count > 0:
            stop = min(entered + _LEAST_LOOK, self.number(end.last) + 1)
            items = self.entering(entered, stop)
            items = items[(items > start.last) & (items <= end.last)][:count]
            left.append(buffer.swap(items, items, ShuffleBuffer.slots(self.seed, self.size, items))[0])
            entered, count = stop, count - len(items)
        return np.concatenate(left)
