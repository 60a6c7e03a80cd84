"""Map-style datasets, read in one thread or several: a copy for each, or in turns; and those that draw."""

import functools
import io
import operator
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from adaecho.echo.memory.tree import Rows, isolated
from adaecho.echo.read.failures import is_of_machine, warn_caller
from adaecho.echo.threads.seeded_process import SeededProcess, draws, global_generators_kept, seeded
from adaecho.echo.threads.workers import PoolThread

# A copy for each thread is refused beyond this: what holds its data in memory is quick to read in turns.
_LARGEST_COPY_BYTES = 1 << 28


def may_be_shared(dataset: Any) -> bool:
    """Whether threads may read a dataset together: a plain list or tuple, torch's, or one that says so."""
    declared, kind = getattr(dataset, "thread_safe", None), type(dataset)
    if isinstance(declared, bool):
        return declared
    if kind is Subset:
        return may_be_shared(dataset.dataset)
    if kind in (ConcatDataset, StackDataset):
        inner = dataset.datasets
        return all(map(may_be_shared, inner.values() if isinstance(inner, dict) else inner))
    return kind in (list, tuple, range, TensorDataset)


class MapSource:
    """A map-style dataset: ``len(dataset)`` and ``dataset[row]``.

    It may have ``__getitems__(rows)`` for many rows at once, ``origin(row)`` for messages, and
    ``shard_lengths``, the number of examples in each of its shards, for the order "shards".

    Threads share it only if it says so with ``thread_safe = True`` (``may_be_shared``): that reading touches
    nothing that changes, such as an open file, a cache or a global generator. Otherwise each thread reads a
    copy of its own, or they take turns; and examples that it draws from the global generators are seeded, so
    that their values depend on neither threads nor a resume: in place, and given back; or, where threads
    read, in a process for each of them.
    """

    resident = False
    works_ahead = False

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.name = dataset, type(dataset).__name__
        self._shared = may_be_shared(dataset)
        self._copies = ThreadCopies(dataset)
        self.draws: bool | None = None  # from the global generators as it reads an example
        self._pickled = b""  # for processes, where it draws
        self._warned = False
        self.length = len(dataset)
        self.shard_lengths = getattr(dataset, "shard_lengths", None)

    def begin(self, num_workers: int, echo: str) -> None:
        """See whether it draws, and copy it as it is now for the threads of an iteration to come."""
        if self._shared:
            return
        if not self.draws:
            self._copies.begin(num_workers)
        if self.draws is None:
            with self._copies.here() as dataset:
                self.draws = _first_draws(dataset)
            if self.draws:
                warn_caller(_told_draws(self.name, echo))
        if self.draws and num_workers:
            self._pickle()
        elif num_workers > 1 and self._copies.hindrance and not self._warned:
            self._warned = True
            warn_caller(_told_turns(self.name, self._copies.hindrance))

    def _pickle(self) -> None:
        try:
            self._pickled = pickle.dumps(functools.partial(operator.getitem, self._dataset))
        except Exception as error:
            raise ValueError(
                f"source: {self.name} draws random numbers, so that with num_workers > 0 it is read in "
                f"worker processes, and can't be pickled for them ({error}); move what is random to "
                "augment=, or give num_workers=0"
            ) from error

    def peek(self, row: int) -> Any:
        """One example before any iteration, of a copy where there can be one: a file opened stays closed."""
        if self._shared:
            return self._dataset[row]
        self._copies.begin(num_workers=1)
        with global_generators_kept(), self._copies.here() as dataset:
            return isolated(dataset[row], pictures=False)

    def read_one(self, row: int, key: int = 0) -> Any:
        """One example; the key seeds what it draws."""
        if self._shared:
            return self._dataset[row]
        if not self.draws:
            with self._copies.here() as dataset:
                return dataset[row]
        thread = threading.current_thread()
        if not isinstance(thread, PoolThread):
            with global_generators_kept():
                return seeded(self._dataset.__getitem__, [row], [key], _failed)[0]
        if self not in thread.helpers:
            process = SeededProcess(self._pickled, "the dataset", "a dataset that draws nothing")
            thread.helpers[self] = process
        return thread.helpers[self]([row], [key], _failed)[0]

    def read_many(self, rows: Rows) -> tuple[list[Any] | None, Exception | None]:
        """Examples read at once; None where the dataset can't, with its error where one may be a bad one.

        Raises:
            ValueError: they are not as many as the rows.
        """
        if self.draws or not hasattr(self._dataset, "__getitems__"):
            return None, None
        try:
            if self._shared:
                examples = list(self._dataset.__getitems__(rows.tolist()))
            else:
                with self._copies.here() as dataset:
                    examples = list(dataset.__getitems__(rows.tolist()))
        except Exception as error:
            error.add_note(f"while reading {self.origin(int(rows[0]))} and {len(rows) - 1} more")
            if not is_of_machine(error):
                return None, error
            raise
        if len(examples) != len(rows):
            raise ValueError(
                f"source: {self.name}.__getitems__ returned {len(examples)} examples for {len(rows)} rows; "
                "it must return one for each row, in their order"
            )
        return examples, None

    def origin(self, row: int) -> str:
        """What to call an example in a message."""
        own = getattr(self._dataset, "origin", None)
        return f"example {row} of {self.name}" if own is None else str(own(row))


class ThreadCopies:
    """A dataset for several threads: each has a copy, as it was when the iteration began.

    Memory maps are shared. Where it can't be pickled, or is large, its examples are read one at a time.

    Attributes:
        hindrance: why there are no copies; not the error, whose traceback holds the loader.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._turns = threading.Lock()
        self._pickler: _Pickler | None = None
        self._own = threading.local()
        self.hindrance = ""

    def begin(self, num_workers: int) -> None:
        """Pickle it, if threads will read."""
        self._own, self._pickler, self.hindrance = threading.local(), None, ""
        if not num_workers:
            return
        try:
            pickler = _Pickler()
            pickler.dump(self._dataset)
            pickler.load()
            self._pickler = pickler
        except Exception as error:
            self.hindrance = str(error) or type(error).__name__

    @contextmanager
    def here(self) -> Iterator[Any]:
        """The dataset for this thread, or the only one while no other thread reads it.

        The one given is never read where it can be copied: a file that it opens then could not be pickled.
        """
        if self._pickler is None:
            with self._turns:
                yield self._dataset
            return
        if not hasattr(self._own, "dataset"):
            self._own.dataset = self._pickler.load()
        yield self._own.dataset


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _LARGEST_COPY_BYTES:
            raise ValueError(f"it takes more than {_LARGEST_COPY_BYTES >> 20} MiB")
        return super().write(data)


class _Pickler(pickle.Pickler):
    """A dataset as bytes, and its memory maps beside them."""

    def __init__(self) -> None:
        self._file, self._maps = _Limited(), list[Any]()
        super().__init__(self._file, protocol=5)

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not np.memmap:
            return None
        self._maps.append(value)
        return len(self._maps) - 1

    def load(self) -> Any:
        """A copy."""
        unpickler = pickle.Unpickler(io.BytesIO(self._file.getvalue()))
        unpickler.persistent_load = self._maps.__getitem__  # type: ignore[method-assign]
        return unpickler.load()


def _failed(error: Exception, position: int) -> None:
    """Leave an error as it is: the reader names the example."""


def _first_draws(dataset: Any) -> bool:
    """Whether it moves a global generator to read an example: the first that can be read of three."""
    for row in dict.fromkeys([0, len(dataset) // 2, len(dataset) - 1]):
        try:
            return draws(lambda row=row: dataset[row])  # type: ignore[misc]
        except Exception:
            continue  # a bad example, or one that can't be read now: reading it will tell
    return False


def _told_draws(name: str, echo: str) -> str:
    consequence = {
        "example_before_augmentation": (
            "all repeats of an example then show the same draw, which is echoing after augmentation; "
        ),
        "batch": "all repeats of a batch then show the same draws, as batch echoing has it; ",
    }.get(echo, "")
    return (
        f"source: {name} draws random numbers as it reads an example: {consequence}give the dataset without "
        "its random transform, and that as EchoLoader(augment=...). Until then the generators of random, "
        "NumPy and torch are seeded for each example, and num_workers read in as many processes"
    )


def _told_turns(name: str, hindrance: str) -> str:
    return (
        f"source: {name} can't be copied for each reading thread ({hindrance}), so that its examples are "
        "read one at a time: open files when first needed, leave them out of __getstate__, or set "
        "thread_safe = True on a dataset whose __getitem__ may run in several threads at once; work that can "
        "run beside the reading belongs in decode="
    )
