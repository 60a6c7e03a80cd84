"""The echo stage of a running loader, which repeats examples and shuffles the repeats."""

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
        index: local number of the example, which counts the fresh examples of this rank.
        origin: name of the example in messages.
        error: the error. An error from a worker process is one that pickle can send.
        reason: class and message of the error as text.
        row: row of the example in the source, which is the same in every epoch; None if unknown.
        where: text of the traceback if the error comes from a worker process.
    """

    index: int
    origin: str
    error: Exception
    reason: str
    row: int | None
    where: str = ""

    def noted(self, note: str) -> Exception:
        """Return the error with a note, and with the traceback text if a worker process raised it."""
        self.error.add_note(note)
        if self.where:
            self.error.add_note(f"in a worker of the loader:\n{self.where}")
        return self.error


@dataclass
class FreshBlock:
    """A block of consecutive fresh examples (or batches), without those that could not be read or decoded.

    Attributes:
        serials: serial numbers over all ranks, ascending, int64 [n].
        examples: the input of the pool: a stack or list of n examples, or row numbers if the pool reads from
            the source itself.
        next_index: local number of the first fresh example after the block.
        bad: the bad examples of the block.
        draws: whether reading the first example drew random numbers from a global generator.
    """

    serials: NDArray[np.int64]
    examples: Any
    next_index: int
    bad: list[BadExample] = field(default_factory=list)
    draws: bool = False


class Pool(Protocol):
    """Storage for the examples (or batches) to which items refer."""

    def insert(self, examples: Any, repeats: NDArray[np.int64]) -> Rows:
        """Insert examples, each with the number of times that it will be used; return their rows."""


@dataclass
class Outputs:
    """Consecutive outputs of an echo stage.

    Attributes:
        items, rows: the items and the rows of their examples in the pool; int64 [n] each.
        before: the cursor of the stream before the first output.
        entering: the items that entered the buffer in exchange for the first m outputs, int64 [m]. The other
            n - m outputs left while the buffer drained.
        end: local number of the next fresh example that the stage will request.
        world: number of ranks.
    """

    items: keyed.Items
    rows: Rows
    before: Cursor
    entering: keyed.Items
    end: int
    world: int

    def __len__(self) -> int:
        return len(self.items)

    def cursor(self, count: int) -> Cursor:
        """Return the cursor of the stream after the first ``count`` outputs."""
        before, exchanged = self.before, len(self.entering)
        if count <= exchanged:
            return Cursor(before.entered + count, int(self.entering[count - 1]))
        last = int(self.entering[-1]) if exchanged else before.last
        return Cursor(before.entered + exchanged, last, before.drained + count - exchanged)

    def next_index(self, count: int) -> int:
        """Return the local number of the first fresh example that the first ``count`` outputs do not need."""
        if count > len(self.entering):
            return self.end
        return (int(self.entering[count - 1]) >> keyed.ECHO_BITS) // self.world + 1


class EchoStage:
    """The stage that repeats each fresh example (or batch) and then shuffles the repeats in a buffer.

    Args:
        upstream: function that returns a block of the next fresh examples in serial order, at most as many as
            its argument says; None at the end of the iteration.
        pool: stores the examples.
        stream: the stream that the stage must follow.
        block: largest number of items that enter in one step while the buffer fills.
        lookahead: smallest number of fresh examples to request. It exceeds 1 only for arrays in memory. For
            other sources, early requests would delay the output.

    Attributes:
        cursor: the cursor of the stream after the last output.
        next_index: local number of the next fresh example to request. The examples before it may not have
            entered the buffer yet.
    """

    def __init__(
        self,
        upstream: Callable[[int], FreshBlock | None],
        pool: Pool,
        stream: Stream,
        *,
        block: int = 1024,
        lookahead: int = 1,
    ) -> None:
        self.stream, self.cursor, self.next_index = stream, Cursor(), stream.begin
        self._upstream, self._pool = upstream, pool
        self._buffer = ShuffleBuffer(stream.seed, stream.size)
        self._block, self._lookahead = block, lookahead
        # The items that wait to enter the buffer, ascending, with their rows and slots; int64 [n] each.
        self._items, self._rows, self._slots = 3 * [keyed.NO_ITEMS]

    def resume(self, cursor: Cursor, next_index: int, contents: Contents, rows_of: RowsOf) -> None:
        """Continue from a cursor instead of the start.

        Args:
            cursor: the cursor of the stream.
            next_index: local number of the next fresh example at the cursor.
            contents: contents of the buffer at the cursor.
            rows_of: maps items to the rows of their examples in the pool.
        """
        self._buffer.load(contents.buffer, rows_of(contents.buffer), draining=cursor.drained > 0)
        self.cursor, self.next_index = cursor, next_index
        self._wait(contents.pending, rows_of(contents.pending))

    def take(self, count: int) -> Outputs:
        """Return the next ``count`` outputs, or fewer only at the end of the iteration."""
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
        """Return the next items, each with the cursor after it, or an empty list at the end of the iteration.

        With a shuffle buffer this is one item, otherwise all repeats of the next fresh batch.
        """
        buffer, fresh = self._buffer, None
        if buffer.size or buffer.draining or len(self._items):
            outputs = self.take(1)
            return list(zip(outputs.items.tolist(), [self.cursor], strict=False))
        # For small batches this is faster than ``take``, which builds index arrays.
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
        """Return the next ``count`` repeated items with rows and slots, or fewer at the end of the input."""
        self._gather(count)
        items, rows, slots = self._items, self._rows, self._slots
        self._items, self._rows, self._slots = items[count:], rows[count:], slots[count:]  # views, not copies
        return items[:count], rows[:count], slots[:count]

    def _gather(self, count: int) -> None:
        """Request fresh examples until ``count`` items wait to enter the buffer, or until the input ends."""
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
        """Append items to those that wait to enter the buffer."""
        slots = ShuffleBuffer.slots(self.stream.seed, self.stream.size, items)  # [items]
        if len(self._items):  # each array then holds the waiting entries, followed by the new ones
            items, rows = np.concatenate([self._items, items]), np.concatenate([self._rows, rows])
            slots = np.concatenate([self._slots, slots])
        self._items, self._rows, self._slots = items, rows, slots
