"""Where the examples behind a buffer of identities lie: each fresh example once, however often it repeats."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.memory.budget import check_memory
from adaecho.echo.memory.tree import Columns, Rows, duplicate, num_bytes, same_layout
from adaecho.echo.order import keyed

Examples = Columns | list[Any]


class ResidentPool:
    """Examples of a source that lies in memory as arrays: nothing is copied in, rows are the source's."""

    def __init__(self, source: Columns) -> None:
        self._source, self.rows = source, len(source)

    def insert(self, examples: Rows, repeats: NDArray[np.int64]) -> Rows:  # noqa: ARG002 (as of others)
        return examples

    def take(self, rows: Rows) -> Examples:
        return self._source.take(rows)


class ExamplePool:
    """Each example once, with a count of the repeats still to leave: in arrays while all have one shape.

    Args:
        slots: of the buffer before it.
        spare: rows to have ready beyond these.
    """

    rows = 0  # no more than memory holds

    def __init__(self, slots: int, spare: int) -> None:
        self._slots, self._spare = slots, spare
        self._pool: ColumnsPool | ListPool | None = None

    def insert(self, examples: Examples, repeats: NDArray[np.int64]) -> Rows:
        """Put examples in, each of which will leave so many times; the row of each."""
        if self._pool is None:
            self._pool = self._chosen(examples)
        elif isinstance(self._pool, ColumnsPool) and not self._pool.fits(examples):
            self._pool = self._pool.as_list_pool()
        if isinstance(self._pool, ColumnsPool):
            assert isinstance(examples, Columns)
            return self._pool.insert(examples, repeats)
        if isinstance(examples, Columns):
            # Not views, the last of which would keep the whole chunk alive.
            examples = [duplicate(example) for example in examples.examples()]
        return self._pool.insert(examples, repeats)

    def _chosen(self, examples: Examples) -> "ColumnsPool | ListPool":
        if isinstance(examples, Columns):
            check_memory(self._slots * examples.example_bytes)
            return ColumnsPool(examples, self._slots + self._spare)
        check_memory(self._slots * (num_bytes(examples) // len(examples)))
        return ListPool()

    def take(self, rows: Rows) -> Examples:
        """One use of each row, sharing no memory with later uses; a row used up is free again."""
        return [] if self._pool is None else self._pool.take(rows)


class FreeRows:
    """Row numbers handed out last in, first out, so that a pool touches no more memory than it needs."""

    def __init__(self) -> None:
        self.capacity = 0
        self._stack = np.empty(0, dtype=np.int32)  # [capacity], of which the first _free are free
        self._free = 0

    def __len__(self) -> int:
        return self._free

    def grow(self, capacity: int) -> None:
        # Below what is free already, and falling: the lowest of the new rows leave first, and pages of the
        # highest may never be touched.
        added = np.arange(capacity - 1, self.capacity - 1, -1, dtype=np.int32)  # [new rows]
        stack = np.empty(capacity, dtype=np.int32)
        stack[: len(added)] = added
        stack[len(added) : len(added) + self._free] = self._stack[: self._free]
        self._stack, self._free, self.capacity = stack, self._free + len(added), capacity

    def pop(self, count: int) -> Rows:
        self._free -= count
        return self._stack[self._free : self._free + count].astype(np.int64)

    def push(self, rows: Rows) -> None:
        self._stack[self._free : self._free + len(rows)] = rows
        self._free += len(rows)


class ColumnsPool:
    """Fixed-shape examples in preallocated arrays, [capacity, ...] for each leaf.

    Args:
        layout: any examples of the form and shape to come.
        capacity: rows reserved. The operating system commits a page when it is first written, so rows never
            used cost nothing.
    """

    def __init__(self, layout: Columns, capacity: int) -> None:
        self._form = layout.form
        self._arrays = [np.empty((capacity, *array.shape[1:]), array.dtype) for array in layout.arrays]
        self._repeats = np.zeros(capacity, dtype=np.uint16)  # [capacity], still to leave
        self._free = FreeRows()
        self._free.grow(capacity)

    def fits(self, examples: Examples) -> bool:
        """Whether examples have this pool's form, shape and types."""
        return isinstance(examples, Columns) and same_layout(examples, Columns(self._form, self._arrays))

    def insert(self, examples: Columns, repeats: NDArray[np.int64]) -> Rows:
        if len(examples) > len(self._free):
            self._grow(len(examples))
        rows = self._free.pop(len(examples))
        self._repeats[rows] = repeats
        for array, values in zip(self._arrays, examples.arrays, strict=True):
            array[rows] = values  # [n, ...] into [capacity, ...]
        return rows

    def take(self, rows: Rows) -> Columns:
        examples = Columns(self._form, self._arrays).take(rows)  # [n, ...] for each leaf
        np.subtract.at(self._repeats, rows, 1)  # rows [n] may hold one several times
        spent = rows[self._repeats[rows] == 0]
        if len(spent):
            self._free.push(keyed.distinct(spent))  # each once, or it would be handed out twice
        return examples

    def _grow(self, needed: int) -> None:
        # By a quarter at least: to copy all rows for each block would take a time quadratic in the buffer.
        capacity = max(self._free.capacity + needed, self._free.capacity * 5 // 4)
        for index, array in enumerate(self._arrays):
            grown = np.empty((capacity, *array.shape[1:]), array.dtype)  # array: [old capacity, ...]
            grown[: len(array)] = array
            self._arrays[index] = grown
        self._repeats = np.concatenate(
            [self._repeats, np.zeros(capacity - self._free.capacity, dtype=np.uint16)]
        )
        self._free.grow(capacity)

    def as_list_pool(self) -> "ListPool":
        """Its rows, unchanged, in a pool that takes examples of any shape."""
        pool = ListPool()
        pool.adopt(Columns(self._form, self._arrays), self._repeats, self._free)
        return pool


class ListPool:
    """Examples of any kind, one object a row."""

    def __init__(self) -> None:
        self._examples: list[Any] = []
        self._repeats: list[int] = []
        self._free: list[int] = []

    def adopt(self, examples: Columns, repeats: NDArray[np.uint16], free: FreeRows) -> None:
        """Take over the rows of a stack pool."""
        self._free = [int(row) for row in free.pop(len(free))]
        self._repeats = [int(count) for count in repeats]
        used = np.flatnonzero(repeats)
        self._examples = [None] * len(repeats)
        for row, example in zip(used, examples.take(used).examples(), strict=True):
            self._examples[row] = duplicate(example)

    def insert(self, examples: Sequence[Any], repeats: NDArray[np.int64]) -> Rows:
        rows = np.empty(len(examples), dtype=np.int64)  # [n]
        for index, (example, count) in enumerate(zip(examples, repeats.tolist(), strict=True)):
            if self._free:
                row = self._free.pop()
                self._examples[row], self._repeats[row] = example, count
            else:
                row = len(self._examples)
                self._examples.append(example)
                self._repeats.append(count)
            rows[index] = row
        return rows

    def take(self, rows: Rows) -> list[Any]:
        return [self.use(row) for row in rows.tolist()]

    def use(self, row: int) -> Any:
        """One use of a row, as of ``take``."""
        self._repeats[row] -= 1
        if self._repeats[row]:
            # The original stays for later repeats: writing into this one must not change them.
            return self._copied(row)
        example, self._examples[row] = self._examples[row], None
        self._free.append(row)
        return example

    def _copied(self, row: int) -> Any:
        return duplicate(self._examples[row])


def interleaved(first: Examples, second: Examples, of_second: NDArray[np.bool_]) -> Examples:
    """Two parts as one, in the order that tells for each place [n] whether it is of the second."""
    if not len(first) or not len(second):
        return first if len(first) else second
    places = np.empty(len(of_second), dtype=np.int64)  # [n], in the one part behind the other
    places[~of_second] = np.arange(len(first))
    places[of_second] = len(first) + np.arange(len(second))
    if isinstance(first, Columns) and isinstance(second, Columns) and same_layout(first, second):
        both = zip(first.arrays, second.arrays, strict=True)
        return Columns(first.form, [np.concatenate(pair) for pair in both]).take(places)
    one_by_one = [part.examples() if isinstance(part, Columns) else part for part in (first, second)]
    in_turn = [*one_by_one[0], *one_by_one[1]]
    return [in_turn[place] for place in places.tolist()]
