"""Storage for the examples in a shuffle buffer."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.memory.pytree import Columns, Rows, duplicate, num_bytes, same_layout
from adaecho.echo.order import keyed

Examples = Columns | list[Any]


class ResidentPool:
    """A substitute for ``ExamplePool`` that stores nothing, because the source is in memory."""

    def __init__(self, source: Columns) -> None:
        self._source = source

    def insert(self, examples: Rows, repeats: NDArray[np.int64]) -> Rows:  # noqa: ARG002 (as of others)
        return examples

    def take(self, rows: Rows, items: keyed.Items) -> Examples:  # noqa: ARG002 (as of others)
        return self._source.take(rows)


class ExamplePool:
    """Stores each example in a shuffle buffer once, and deletes the example after its last use."""

    def __init__(self, slots: int, spare: int) -> None:
        # The buffer has ``slots`` places, and the uses of one example can occupy several. ``spare`` rows are
        # added for examples that have not entered the buffer yet.
        self._slots, self._spare = slots, spare
        self._columns: Columns | None = None  # [capacity, ...] for each leaf
        self._singles: list[Any] = []  # [capacity], used if examples differ in shape or type
        self._repeats = np.zeros(0, dtype=np.uint16)  # [capacity], remaining
        # The most recently freed row is reused first, so that the pool touches no more memory than it needs.
        self._free = np.empty(0, dtype=np.int32)  # [capacity]; the first ``_num_free`` rows are free
        self._num_free = 0

    def insert(self, examples: Examples, repeats: NDArray[np.int64]) -> Rows:
        """Store examples that will be taken ``repeats`` times each, and return their row numbers."""
        columns = examples if isinstance(examples, Columns) else None
        if not len(self._free):
            self._begin(examples)
        elif self._columns is not None and (columns is None or not same_layout(columns, self._columns)):
            self._unstack()
        if len(examples) > self._num_free:
            # The pool grows by at least a quarter, because copying all rows for each block of examples would
            # take quadratic time.
            self._grow(max(len(self._free) + len(examples), len(self._free) * 5 // 4))
        self._num_free -= len(examples)
        rows = self._free[self._num_free : self._num_free + len(examples)].astype(np.int64)  # [n]
        self._repeats[rows] = repeats
        if self._columns is not None:
            assert columns is not None
            for array, values in zip(self._columns.arrays, columns.arrays, strict=True):
                array[rows] = values  # [n, ...] into [capacity, ...]
        else:
            # Views are copied, because a view would keep the memory of the whole block in use.
            singles: Any = examples if columns is None else map(duplicate, columns.examples())
            for row, example in zip(rows.tolist(), singles, strict=True):
                self._singles[row] = example
        return rows

    def _begin(self, examples: Examples) -> None:
        """Create storage for examples like these first ones."""
        if isinstance(examples, Columns):
            check_memory(self._slots * examples.example_bytes)
            self._columns = examples[:0]
            self._grow(self._slots + self._spare)
        else:
            check_memory(self._slots * (num_bytes(examples) // len(examples)))
            self._grow(self._spare)

    def _grow(self, capacity: int) -> None:
        more = capacity - len(self._free)
        if self._columns is None:
            self._singles += [None] * more
        else:
            for index, array in enumerate(self._columns.arrays):
                # Unused rows need no memory: the operating system allocates a page only when it is first
                # written.
                grown = np.empty((capacity, *array.shape[1:]), array.dtype)  # array: [old capacity, ...]
                grown[: len(array)] = array
                self._columns.arrays[index] = grown
        self._repeats = np.concatenate([self._repeats, np.zeros(more, dtype=np.uint16)])  # [capacity]
        # The lowest new rows are used first, so the memory of the highest rows may never be touched.
        added = np.arange(capacity - 1, len(self._free) - 1, -1, dtype=np.int32)  # [new rows]
        self._free = np.concatenate([added, self._free])  # [capacity]
        self._num_free += more

    def _unstack(self) -> None:
        """Store all examples as separate objects from now on, under the same row numbers."""
        assert self._columns is not None
        used = np.flatnonzero(self._repeats)  # [rows in use]
        self._singles = [None] * len(self._free)
        for row, example in zip(used.tolist(), self._columns.take(used).examples(), strict=True):
            self._singles[row] = duplicate(example)
        self._columns = None

    def take(self, rows: Rows, items: keyed.Items) -> Examples:  # noqa: ARG002 (as of others)
        """Return the examples in the given rows, and delete those that were used for the last time."""
        # ``insert`` stored how often each example will be used.
        taken: Any = [] if self._columns is None else self._columns.take(rows)
        np.subtract.at(self._repeats, rows, 1)  # this also counts rows that occur several times
        spent = rows[self._repeats[rows] == 0]
        if len(spent):
            spent = keyed.distinct(spent)  # a row freed twice would be given to two examples
        if self._columns is None:
            originals = set(spent.tolist())
            # All uses but the last are copied, because augmentation may write into them.
            for row in rows.tolist():
                taken.append(self._singles[row] if row in originals else duplicate(self._singles[row]))
                originals.discard(row)
            for row in spent.tolist():
                self._singles[row] = None
        self._free[self._num_free : self._num_free + len(spent)] = spent
        self._num_free += len(spent)
        return taken  # type: ignore[no-any-return]


def singles_of(examples: Examples) -> list[Any]:
    """Return the examples as a list. Stacked examples are not copied."""
    return examples.examples() if isinstance(examples, Columns) else examples


def check_memory(needed_bytes: int, key: str = "shuffle_buffer") -> None:
    """Raise ValueError if a buffer would need more memory than is free on this machine."""
    # ``key`` is the argument of EchoLoader that sets the size of this buffer.
    free = free_bytes()
    if free is not None and needed_bytes > free:
        needed_gib, free_gib = needed_bytes / 2**30, free / 2**30
        raise ValueError(
            f"{key}: needs {needed_gib:,.1f} GiB, but only {free_gib:,.1f} GiB are free; reduce {key} or the "
            "size of the examples, or keep them encoded with decode= and buffer_format='encoded'"
        )


def free_bytes() -> int | None:
    """Return the available memory of the machine in bytes, or None if it is unknown."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
