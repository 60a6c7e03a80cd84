"""The echo stage of the pipeline, which repeats examples and shuffles the repeats."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed
from adaecho.echo.order.stream import Contents, Cursor, Rows, ShuffleBuffer, Stream

RowsOf = Callable[[keyed.Items], Rows]


@dataclass(frozen=True)
class BadExample:
    """An example that could not be read or decoded.

    Attributes:
        index: number of the example in this rank's reading order, counted from 0 over all epochs.
        origin: name of the example in messages, such as "example 5 of MyDataset".
        error: the exception. A RuntimeError replaces an exception that a worker process could not pickle.
        reason: class and message of the exception as text.
        row: row of the example in the source; None if unknown.
        where: traceback text if a worker process raised the exception, otherwise empty.
    """

    index: int
    origin: str
    error: Exception
    reason: str
    row: int | None
    where: str = ""

    def noted(self, note: str) -> Exception:
        """Return the exception, with a note and any traceback from a worker process added."""
        self.error.add_note(note)
        if self.where:
            self.error.add_note(f"in a worker of the loader:\n{self.where}")
        return self.error


@dataclass
class FreshBlock:
    """Consecutive examples (or batches) from the source, before they are repeated."""

    # Ascending numbers of the readable examples, int64 [n], counted in reading order over all ranks.
    serials: NDArray[np.int64]
    # The readable examples as stacked arrays, a list or row numbers; None if worker processes keep them.
    examples: Any
    next_index: int  # number of the first example after the block, counted on this rank only
    bad: list[BadExample] = field(default_factory=list)  # examples that could not be read or decoded
    draws: bool = False  # whether reading an example is known to draw from the global random generators


class Pool(Protocol):
    """Interface of the storage that keeps each example (or batch) once for all its repeats."""

    def insert(self, examples: Any, repeats: NDArray[np.int64]) -> Rows:
        """Store n examples, and return the row in which each of them is stored, int64 [n].

        Args:
            repeats: how often each example will be used, int64 [n]. Its row is free after the last use.
        """


@dataclass
class Outputs:
    """Repeats of examples, in the order in which they left the shuffle buffer."""

    items: keyed.Items  # the repeats, int64 [n], encoded as in order/keyed.py
    rows: Rows  # the storage row of each repeat's example, int64 [n]
    before: Cursor  # position before the first of these repeats
    # The repeats that pushed the first m outputs out of the buffer, int64 [m]. The other outputs left after
    # the input had ended.
    entering: keyed.Items
    end: int  # number of the next example that the stage will request, in this rank's reading order
    world: int  # number of ranks

    def __len__(self) -> int:
        return len(self.items)

    def cursor(self, count: int) -> Cursor:
        """Return the position after the first ``count`` outputs."""
        before, exchanged = self.before, len(self.entering)
        if count <= exchanged:
            return Cursor(before.entered + count, int(self.entering[count - 1]))
        last = int(self.entering[-1]) if exchanged else before.last
        return Cursor(before.entered + exchanged, last, before.drained + count - exchanged)

    def next_index(self, count: int) -> int:
        """Return this rank's number of the next fresh example after the first ``count`` outputs."""
        if count > len(self.entering):
            return self.end
        return (int(self.entering[count - 1]) >> keyed.ECHO_BITS) // self.world + 1


class EchoStage:
    """Pipeline stage that repeats each example or batch and shuffles the repeats in a buffer."""

    def __init__(
        self,
        # Returns about as many new examples as requested, or None at the end of the iteration.
        upstream: Callable[[int], FreshBlock | None],
        pool: Pool,
        stream: Stream,  # the order of the repeats, with the echoing factor and the size of the buffer
        *,
        block: int = 1024,  # maximum number of repeats that enter the buffer in one step while it fills
        lookahead: int = 1,  # smallest number of examples to request at once
    ) -> None:
        # ``cursor`` is the position after the last output. ``next_index`` is the number of the next example
        # to request, in this rank's reading order.
        self.stream, self.cursor, self.next_index = stream, Cursor(), stream.begin
        self._upstream, self._pool = upstream, pool
        self._buffer = ShuffleBuffer(stream.seed, stream.size)
        # A lookahead above 1 would delay the output of slow sources, so only arrays in memory use it.
        self._block, self._lookahead = block, lookahead
        # The items waiting to enter the buffer, ascending, with their rows and slots; int64 [n] each.
        self._items, self._rows, self._slots = 3 * [keyed.NO_ITEMS]

    def resume(self, cursor: Cursor, next_index: int, contents: Contents, rows_of: RowsOf) -> None:
        """Restore the shuffle buffer and continue the iteration from a saved position."""
        # The pool already stores the examples of these repeats, and ``rows_of`` returns their storage rows.
        self._buffer.load(contents.buffer, rows_of(contents.buffer), draining=cursor.drained > 0)
        self.cursor, self.next_index = cursor, next_index
        self._wait(contents.pending, rows_of(contents.pending))

    def take(self, count: int) -> Outputs:
        """Return the next ``count`` outputs, or fewer at the end of the iteration."""
        buffer = self._buffer
        while buffer.space and not buffer.draining:
            items, rows, _ = self._draw(min(buffer.space, self._block))
            if not len(items):
                buffer.begin_drain()
                break
            buffer.fill(items, rows)
            self.cursor = Cursor(self.cursor.entered + len(items), int(items[-1]))
        before = self.cursor
        items = rows = entering = keyed.NO_ITEMS
        if not buffer.draining:
            entering, entering_rows, slots = self._draw(count)  # [m] each, m < count at the end of the input
            items, rows = buffer.swap(entering, entering_rows, slots)  # [m] each
            if len(items) < count:
                buffer.begin_drain()
        if len(items) < count:
            drained, their_rows = buffer.drain(count - len(items))
            items, rows = np.concatenate([items, drained]), np.concatenate([rows, their_rows])  # [count]
        outputs = Outputs(items, rows, before, entering, self.next_index, self.stream.world)
        if len(items):
            self.cursor = outputs.cursor(len(items))
        return outputs

    def take_repeats(self) -> list[tuple[int, Cursor]]:
        """Return the next repeats, each with the position after it, or an empty list after the last one."""
        # With a shuffle buffer, this is one repeat; without one, it is all repeats of the next batch.
        buffer, fresh = self._buffer, None
        # After a resume, repeats may be waiting even without a buffer; they then leave one by one.
        if buffer.size or buffer.draining or len(self._items):
            outputs = self.take(1)
            return list(zip(outputs.items.tolist(), [self.cursor], strict=False))
        # For small batches, this is faster than ``take``, which builds index arrays.
        self.stream.factor.settle(self.next_index)
        while fresh is None or not len(fresh.serials):
            fresh = self._upstream(1)
            if fresh is None:
                buffer.begin_drain()
                return []
            self.next_index = fresh.next_index
        counts = self.stream.factor.counts(fresh.serials // self.stream.world)  # [1]
        self._pool.insert(fresh.examples, counts)
        first, entered = int(fresh.serials[0]) << keyed.ECHO_BITS, self.cursor.entered
        self.cursor = Cursor(entered + int(counts[0]), first + int(counts[0]) - 1)
        return [(first + n, Cursor(entered + n + 1, first + n)) for n in range(int(counts[0]))]

    def _draw(self, count: int) -> tuple[keyed.Items, Rows, NDArray[np.int64]]:
        """Remove up to ``count`` waiting repeats; return them, their storage rows and their buffer slots."""
        self._gather(count)
        items, rows, slots = self._items, self._rows, self._slots
        self._items, self._rows, self._slots = items[count:], rows[count:], slots[count:]  # views, not copies
        return items[:count], rows[:count], slots[:count]

    def _gather(self, count: int) -> None:
        """Request fresh examples until ``count`` repeats wait to enter the buffer, or the input ends."""
        factor = self.stream.factor
        while len(self._items) < count:
            factor.settle(self.next_index)
            needed = factor.fresh_needed(count - len(self._items), self.next_index)
            fresh = self._upstream(max(needed, self._lookahead))
            if fresh is None:
                break
            self.next_index = fresh.next_index
            if len(fresh.serials):
                counts = factor.counts(fresh.serials // self.stream.world)  # [n]
                rows = self._pool.insert(fresh.examples, counts)  # [n]
                if factor.value == 1:
                    self._wait(fresh.serials << keyed.ECHO_BITS, rows)
                else:
                    # [sum of counts] each; all repeats of an example follow one another
                    self._wait(keyed.uses(fresh.serials, counts), np.repeat(rows, counts))

    def _wait(self, items: keyed.Items, rows: Rows) -> None:
        """Append repeats to those waiting to enter the buffer."""
        slots = ShuffleBuffer.slots(self.stream.seed, self.stream.size, items)  # [items]
        if len(self._items):  # each array then holds the waiting entries, followed by the new ones
            items, rows = np.concatenate([self._items, items]), np.concatenate([self._rows, rows])
            slots = np.concatenate([self._slots, slots])
        self._items, self._rows, self._slots = items, rows, slots
