"""Pools that hold each fresh example of a buffer once, for all its repeats, and the check of free memory."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.memory.pytree import Columns, Rows, duplicate, num_bytes, same_layout
from adaecho.echo.order import keyed

Examples = Columns | list[Any]


class ResidentPool:
    """Examples of a source of arrays in memory. Rows are those of the source; nothing is copied in."""

    def __init__(self, source: Columns) -> None:
        self._source = source

    def insert(self, examples: Rows, repeats: NDArray[np.int64]) -> Rows:  # noqa: ARG002 (as of others)
        return examples

    def take(self, rows: Rows, items: keyed.Items) -> Examples:  # noqa: ARG002 (as of others)
        return self._source.take(rows)


class ExamplePool:
    """Holds each example once, with its number of remaining repeats, in arrays while all have one shape.

    Args:
        slots: slots of the buffer before it.
        spare: further rows. The operating system commits a page at its first write, so unused rows are free.
    """

    def __init__(self, slots: int, spare: int) -> None:
        self._slots, self._spare = slots, spare
        self._columns: Columns | None = None  # [capacity, ...] for each leaf
        self._singles: list[Any] = []  # [capacity], if examples differ in shape or type
        self._repeats = np.zeros(0, dtype=np.uint16)  # [capacity], remaining
        # Last in, first out, so that a pool touches no more memory than it needs.
        self._free = np.empty(0, dtype=np.int32)  # [capacity], rows; the first ``_num_free`` are free
        self._num_free = 0

    def insert(self, examples: Examples, repeats: NDArray[np.int64]) -> Rows:
        """Insert examples [n] with their numbers of repeats; return their rows, int64 [n]."""
        columns = examples if isinstance(examples, Columns) else None
        if not len(self._free):
            self._begin(examples)
        elif self._columns is not None and (columns is None or not same_layout(columns, self._columns)):
            self._part()
        if len(examples) > self._num_free:
            # By a quarter at least: copying all rows for each block would take quadratic time.
            self._grow(max(len(self._free) + len(examples), len(self._free) * 5 // 4))
        self._num_free -= len(examples)
        rows = self._free[self._num_free : self._num_free + len(examples)].astype(np.int64)  # [n]
        self._repeats[rows] = repeats
        if self._columns is not None:
            assert columns is not None
            for array, values in zip(self._columns.arrays, columns.arrays, strict=True):
                array[rows] = values  # [n, ...] into [capacity, ...]
        else:
            # Copy: a view would keep the whole chunk alive.
            singles: Any = examples if columns is None else map(duplicate, columns.examples())
            for row, example in zip(rows.tolist(), singles, strict=True):
                self._singles[row] = example
        return rows

    def _begin(self, examples: Examples) -> None:
        """Reserve rows for examples in the form of the first."""
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
                grown = np.empty((capacity, *array.shape[1:]), array.dtype)  # array: [old capacity, ...]
                grown[: len(array)] = array
                self._columns.arrays[index] = grown
        self._repeats = np.concatenate([self._repeats, np.zeros(more, dtype=np.uint16)])  # [capacity]
        # The lowest new rows are used first, so that pages of the highest may never be touched.
        added = np.arange(capacity - 1, len(self._free) - 1, -1, dtype=np.int32)  # [new rows]
        self._free = np.concatenate([added, self._free])  # [capacity]
        self._num_free += more

    def _part(self) -> None:
        """Switch to one object per example, in the same rows, for examples of any shape."""
        assert self._columns is not None
        used = np.flatnonzero(self._repeats)  # [rows in use]
        self._singles = [None] * len(self._free)
        for row, example in zip(used.tolist(), self._columns.take(used).examples(), strict=True):
            self._singles[row] = duplicate(example)
        self._columns = None

    def take(self, rows: Rows, items: keyed.Items) -> Examples:  # noqa: ARG002 (as of others)
        """Return one use of each row [n], without shared memory; free rows without further repeats."""
        taken: Any = [] if self._columns is None else self._columns.take(rows)
        np.subtract.at(self._repeats, rows, 1)  # rows may hold one several times
        spent = rows[self._repeats[rows] == 0]
        if len(spent):
            spent = keyed.distinct(spent)  # each once, or it would be handed out twice
        if self._columns is None:
            originals = set(spent.tolist())
            # Copy: a write into this use must not change later repeats.
            for row in rows.tolist():
                taken.append(self._singles[row] if row in originals else duplicate(self._singles[row]))
                originals.discard(row)
            for row in spent.tolist():
                self._singles[row] = None
        self._free[self._num_free : self._num_free + len(spent)] = spent
        self._num_free += len(spent)
        return taken  # type: ignore[no-any-return]


def singles_of(examples: Examples) -> list[Any]:
    """Return examples one by one, as views of a stack."""
    return examples.examples() if isinstance(examples, Columns) else examples


_SLOT_BYTES = 16  # identity and row of each item


def check_memory(needed_bytes: int, key: str = "shuffle_buffer") -> None:
    """Check that a buffer fits into memory.

    Args:
        needed_bytes: bytes of the buffer.
        key: the argument that sets its size.

    Raises:
        ValueError: the buffer needs more memory than is free.
    """
    free = free_bytes()
    if free is not None and needed_bytes > free:
        needed_gib, free_gib = needed_bytes / 2**30, free / 2**30
        raise ValueError(
            f"{key}: needs {needed_gib:,.1f} GiB, but only {free_gib:,.1f} GiB are free; reduce {key}, or "
            "the size of the examples"
        )


def check_slots(items: int, example_bytes: int, key: str) -> None:
    """Check the memory of a buffer before its allocation; ``example_bytes`` is 0 if unknown."""
    check_memory(items * (_SLOT_BYTES + example_bytes), key)


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the free memory of the machine and of this process's control groups; None if unknown.

    Args:
        root: root of the file system with /proc and /sys.
    """
    known = [free for free in (_machine(root), *_groups(root)) if free is not None]
    return min(known) if known else None


def _machine(root: Path) -> int | None:
    try:
        told = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        return int(told["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None


def _groups(root: Path) -> list[int | None]:
    """Free bytes of this process's control groups (version 2), which limit containers and Slurm jobs."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [Path(line.removeprefix("0::/")) for line in lines if line.startswith("0::/")]
    top = root / "sys/fs/cgroup"
    return [_group(top / group) for path in paths for group in (path, *path.parents)]


def _group(folder: Path) -> int | None:
    try:
        limit, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
        stat = (folder / "memory.stat").read_text().split()
    except OSError:
        return None
    if limit.strip() == "max":
        return None
    # The system reclaims pages of inactive files on demand.
    reclaimable = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
    return max(int(limit) - int(used) + reclaimable, 0)
