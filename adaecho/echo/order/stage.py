"""The pipeline stage that repeats examples and shuffles the repeats, called the echo stage."""

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
    """An example that could not be read or decoded, with its error.

    Attributes:
        index: number of the example in this rank's reading order, counted from 0 over all epochs.
        origin: name of the example in messages, such as "example 5 of MyDataset".
        error: the exception. A RuntimeError replaces an exception from a worker process that pickle cannot
            send.
        reason: class and message of the exception as text.
        row: row of the example in the source, which is the same in every epoch; None if unknown.
        where: text of the traceback if a worker process raised the exception, otherwise empty.
    """

    index: int
    origin: str
    error: Exception
    reason: str
    row: int | None
    where: str = ""

    def noted(self, note: str) -> Exception:
        """Return the exception with a note, and with the worker process's traceback if there is one."""
        self.error.add_note(note)
        if self.where:
            self.error.add_note(f"in a worker of the loader:\n{self.where}")
        return self.error


@dataclass
class FreshBlock:
    """Consecutive examples (or batches) from the source that have not been repeated yet.

    Attributes:
        serials: numbers of the good examples in reading order, over all ranks and epochs; ascending,
            int64 [n].
        examples: the n good examples, in the form that ``Pool.insert`` accepts: stacked arrays, a list, or
            row numbers if the pool reads from the source itself. None if worker processes keep the examples.
        next_index: number of the first example after the block, in this rank's reading order.
        bad: the examples of the block that could not be read or decoded.
        draws: whether the dataset is known to draw from the global random generators when it reads an
            example.
    """

    serials: NDArray[np.int64]
    examples: Any
    next_index: int
    bad: list[BadExample] = field(default_factory=list)
    draws: bool = False


class Pool(Protocol):
    """Interface of the storage that keeps each example (or batch) once for all its repeats."""

    def insert(self, examples: Any, repeats: NDArray[np.int64]) -> Rows:
        """Store n examples and return the storage row of each, int64 [n].

        Args:
            repeats: how often each example will be used, int64 [n]. The storage may free it after its last
                use.
        """


@dataclass
class Outputs:
    """Consecutive outputs of an echo stage, with the data to find the stream position after each of them.

    An output is one use of an example. While the input lasts, each use that enters the shuffle buffer pushes
    out another. This yields the first m of the n outputs. The others leave after the input has ended.

    Attributes:
        items, rows: the outputs, packed as in ``order.keyed``, and the storage rows of their examples;
            int64 [n] each.
        before: position in the stream before the first output.
        entering: the uses that entered the buffer and pushed out the first m outputs, int64 [m].
        end: number of the next example that the stage will request, in this rank's reading order.
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
        """Return the position in the stream after the first ``count`` outputs."""
        before, exchanged = self.before, len(self.entering)
        if count <= exchanged:
            return Cursor(before.entered + count, int(self.entering[count - 1]))
        last = int(self.entering[-1]) if exchanged else before.last
        return Cursor(before.entered + exchanged, last, before.drained + count - exchanged)

    def next_index(self, count: int) -> int:
        """Return the number of the first example that the first ``count`` outputs do not need.

        The number counts the examples in this rank's reading order.
        """
        if count > len(self.entering):
            return self.end
        return (int(self.entering[count - 1]) >> keyed.ECHO_BITS) // self.world + 1


class EchoStage:
    """Pipeline stage that repeats each fresh example (or batch) and shuffles the repeats in a buffer.

    A fresh example is one that comes from the source, not from a repeat.

    Args:
        upstream: function that returns the next fresh examples in reading order; None at the end of the
            iteration. Its argument is the number of examples requested, but it may return fewer or more.
        pool: storage of the examples.
        stream: the order that the stage must follow, with the echoing factor and the size of the buffer.
        block: largest number of repeats that enter the buffer in one step while it fills.
        lookahead: smallest number of fresh examples to request at once. It exceeds 1 only for arrays in
            memory, because requesting more from a slower source would delay the output.

    Attributes:
        cursor: position in the stream after the last output.
        next_index: number of the next example to request, in this rank's reading order. Uses of the examples
            before it may still wait to enter the buffer.
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
        """Continue from a saved position in the stream instead of the start.

        The pool must already contain the examples of ``contents``.

        Args:
            cursor: the saved position.
            next_index: number of the next example to read, in this rank's reading order.
            contents: the uses of examples that are in the buffer, or wait to enter it, at this position.
            rows_of: function that returns the storage row of the example for each of these uses.
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
        """Return the next outputs, each with the stream position after it; empty at the end of the iteration.

        With a shuffle buffer, the list has one output. Without a buffer, it has all repeats of the next fresh
        batch.
        """
        buffer, fresh = self._buffer, None
        # After a resume, repeats can wait to enter even without a buffer; they then leave one by one.
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
        """Take the next ``count`` uses that wait to enter the buffer, or fewer at the end of the input.

        Returns:
            The uses, the storage rows of their examples, and the buffer slots that they will enter.
        """
        self._gather(count)
        items, rows, slots = self._items, self._rows, self._slots
        self._items, self._rows, self._slots = items[count:], rows[count:], slots[count:]  # views, not copies
        return items[:count], rows[:count], slots[:count]

    def _gather(self, count: int) -> None:
        """Request fresh examples until ``count`` uses wait to enter the buffer, or until the input ends."""
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
        """Append uses of examples to those that wait to enter the buffer."""
        slots = ShuffleBuffer.slots(self.stream.seed, self.stream.size, items)  # [items]
        if len(self._items):  # each array then holds the waiting entries, followed by the new ones
            items, rows = np.concatenate([self._items, items]), np.concatenate([self._rows, rows])
            slots = np.concatenate([self._slots, slots])
        self._items, self._rows, self._slots = items, rows, slots
