"""Sources with random access: arrays, map-style datasets, and fresh examples of their rows.

Threads read a dataset of others in copies, or in turns; what it draws from the global generators is seeded.
"""

import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from adaecho.echo.memory.tree import Columns, Rows, isolated
from adaecho.echo.order import keyed
from adaecho.echo.order.permutation import Permutation
from adaecho.echo.order.stage import Fresh
from adaecho.echo.read.chunks import Preparation, Reader, Serials
from adaecho.echo.read.failures import is_of_machine, warn_caller
from adaecho.echo.read.witness import Witnesses
from adaecho.echo.threads.generators import global_generators_kept, seed_globally, tried
from adaecho.echo.threads.processes import ProcessDiedError, can_fork, in_fork

# A copy for each thread is refused beyond this: what holds its data in memory is quick to read in turns.
_LARGEST_COPY_BYTES = 1 << 28
_GROUP, _GROUP_BYTES = 1024, 1 << 22  # examples of small arrays that are worked on at once, at most
_TRIAL_S = 10.0
_DATASET_SEED = 2  # beside the seeds of examples and of batches

Fetched = tuple[Callable[[int], Any], Exception | None]
"""What gives the example at a position, and why they could not be read at once, maybe for a bad one."""


class ArraySource:
    """Arrays (or CPU tensors) with one leading length, alone or in a dict or tuple."""

    works_ahead = draws = False

    def __init__(self, arrays: Columns) -> None:
        self.arrays = arrays  # [length, ...] for each leaf
        self.length, self.name = len(arrays), "arrays"
        # Rows of a memory map are read from storage when they are used, all others lie in memory.
        self.resident = not any(map(_is_memory_map, arrays.arrays))

    def begin(self, num_workers: int, *, processes: bool = False) -> None:
        """Nothing has to be made ready."""

    def read(self, rows: Rows) -> Columns:
        """A copy of some rows."""
        return self.arrays.take(rows)

    def batches_at_once(self, batch_size: int) -> int:
        """Small arrays are read and worked on in groups of batches; anything slower comes batch by batch."""
        examples = min(_GROUP, _GROUP_BYTES // max(self.arrays.example_bytes, 1))
        return max(1, examples // batch_size)

    def fetched(self, rows: Rows, keys: Any) -> Fetched:  # noqa: ARG002 (they draw nothing)
        """The same one by one."""
        return self.read(rows).examples().__getitem__, None

    def origin(self, row: int) -> str:
        """What to call an example in a message."""
        return f"row {row} of the source"


def _is_memory_map(array: Any) -> bool:
    return array is not None and (
        isinstance(array, np.memmap) or _is_memory_map(getattr(array, "base", None))
    )


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
    copy of its own, as it was when the iteration began, or where there can be none they take turns; and
    examples that it draws from the global generators are seeded, so that their values depend on neither
    workers nor a resume: in place, and given back; or, with workers, in processes.

    Attributes:
        shared: by threads.
        draws: from the global generators as it reads an example; False until that has been seen.
    """

    works_ahead = resident = False

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.name, self.length = dataset, type(dataset).__name__, len(dataset)
        self.shard_lengths = getattr(dataset, "shard_lengths", None)
        self.open_shards = getattr(dataset, "open_shards", 1)
        self.shared = may_be_shared(dataset)
        self.draws = False
        self._turns, self._own = threading.Lock(), threading.local()
        self._copied: Callable[[], Any] | None = None  # makes a copy
        self._warned, self._forks = False, True

    def begin(self, num_workers: int, *, processes: bool = False) -> None:
        """Copy it as it is now for the workers of an iteration to come, and see whether it draws by now.

        Raises:
            ValueError: it has grown or shrunk.
        """
        if len(self._dataset) != self.length:
            raise ValueError(
                f"source: {self.name} has {len(self._dataset)} rows, and had {self.length} when this "
                "EchoLoader was made, whose order is of those; make another EchoLoader of it"
            )
        if self.shared:
            return
        hindrance = "" if self.draws else self._copy(num_workers)
        if not self.draws:
            self.draws = self._tried(_first_draws, num_workers)
            if self.draws:
                warn_caller(_told_draws(self.name))
        if num_workers > 1 and hindrance and not (self.draws or processes or self._warned):
            self._warned = True
            warn_caller(_told_turns(self.name, hindrance))

    def _copy(self, num_workers: int) -> str:
        """Be ready to copy it, if threads will read; why there can be no copies."""
        self._own, self._copied = threading.local(), None
        try:
            self._copied = _copier(self._dataset) if num_workers else None
        except Exception as error:  # whose traceback would hold the loader
            return str(error) or type(error).__name__
        return ""

    def _tried(self, trial: Callable[[Any], Any], num_workers: int) -> Any:
        """What a trial of it tells.

        It may open a file in it: never in the one that workers will get. And it may draw, beside a step where
        this isn't the main thread.
        """
        aside = threading.current_thread() is not threading.main_thread()
        if num_workers and not self.shared and self._copied is None:
            aside = True
        if aside and self._forks and can_fork():
            try:
                return in_fork(lambda: trial(self._dataset), _TRIAL_S)
            except (TimeoutError, ProcessDiedError):  # it needs threads of its own, which no fork has
                self._forks = False
        with self._here() as dataset:
            return trial(dataset)

    @contextmanager
    def _here(self) -> Iterator[Any]:
        """The dataset for this thread, or the only one while no other thread reads it.

        The one given is never read where it can be copied: a file that it opens then could not be pickled.
        """
        if self.shared:
            yield self._dataset
        elif self._copied is None:
            with self._turns:
                yield self._dataset
        else:
            if not hasattr(self._own, "dataset"):
                self._own.dataset = self._copied()
            yield self._own.dataset

    def peek(self, row: int, num_workers: int) -> Any:
        """One example before any iteration."""
        if not self.shared:
            self._copy(num_workers=1)
        with global_generators_kept():
            return self._tried(lambda dataset: isolated(dataset[row], pictures=False), num_workers)

    def fetched(self, rows: Rows, keys: list[int] | None) -> Fetched:
        """Examples of rows [n]; the keys [n] seed what they draw.

        Raises:
            ValueError: those read at once are not as many as the rows.
        """
        if keys is not None:
            return lambda position: self._drawn(int(rows[position]), keys[position]), None
        failed: Exception | None = None
        if hasattr(self._dataset, "__getitems__"):
            try:
                with self._here() as dataset:
                    examples = list(dataset.__getitems__(rows.tolist()))
            except Exception as error:
                error.add_note(f"while reading {self.origin(int(rows[0]))} and {len(rows) - 1} more")
                if is_of_machine(error):
                    raise
                failed = error
            else:
                if len(examples) == len(rows):
                    return examples.__getitem__, None
                raise ValueError(
                    f"source: {self.name}.__getitems__ returned {len(examples)} examples for {len(rows)} "
                    "rows; it must return one for each row, in their order"
                )
        return lambda position: self._read(int(rows[position])), failed

    def _read(self, row: int) -> Any:
        if self.shared:
            return self._dataset[row]
        with self._here() as dataset:
            return dataset[row]

    def _drawn(self, row: int, key: int) -> Any:
        """One example, with the global generators seeded by a key."""
        with global_generators_kept():
            seed_globally(key, key >> 1)
            return self._dataset[row]

    def origin(self, row: int) -> str:
        """What to call an example in a message."""
        own = getattr(self._dataset, "origin", None)
        return f"example {row} of {self.name}" if own is None else str(own(row))


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _LARGEST_COPY_BYTES:
            raise ValueError(f"it takes more than {_LARGEST_COPY_BYTES >> 20} MiB")
        return super().write(data)


def _copier(dataset: Any) -> Callable[[], Any]:
    """What makes copies of a dataset as it is now, which share its memory maps; raises where it can't."""
    file, maps = _Limited(), list[Any]()

    def map_number(value: Any) -> int | None:
        if type(value) is np.memmap:
            maps.append(value)
            return len(maps) - 1
        return None

    def copied() -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(file.getvalue()))
        unpickler.persistent_load = maps.__getitem__  # type: ignore[method-assign]
        return unpickler.load()

    pickler = pickle.Pickler(file, protocol=5)
    pickler.persistent_id = map_number  # type: ignore[method-assign]
    pickler.dump(dataset)
    copied()
    return copied


def is_seen_to_draw(dataset: Any) -> bool:
    """Whether a dataset that is read elsewhere moves the global generators, as far as a trial of it tells."""
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return indexed and bool(MapSource(dataset)._tried(_first_draws, num_workers=1))


def _first_draws(dataset: Any) -> bool:
    """Whether it moves a global generator to read one of three examples."""
    for row in dict.fromkeys([0, len(dataset) // 2, len(dataset) - 1]):
        with suppress(Exception):  # a bad one, or one that can't be read now: reading it will tell
            if tried(lambda row=row: dataset[row])[1]:  # type: ignore[misc]
                return True
    return False


def _told_draws(name: str) -> str:
    return (
        f"source: {name} draws random numbers as it reads an example: repeats, if there are any, show the "
        "same draw, which is echoing after augmentation; give the dataset without its random transform, and "
        "that as EchoLoader(augment=...). Until then the generators of random, NumPy and torch are seeded "
        "for each example, and num_workers are processes"
    )


def _told_turns(name: str, hindrance: str) -> str:
    return (
        f"source: {name} can't be copied for each reading thread ({hindrance}), so that its examples are "
        "read one at a time: open files when first needed, leave them out of __getstate__, or set "
        "thread_safe = True on a dataset whose __getitem__ may run in several threads at once; work that can "
        "run beside the reading belongs in decode="
    )


class RandomReader(Reader):
    """Reads a source with random access.

    Args:
        source: where examples come from.
        permutation: the row of each serial.
        preparation: what happens to them before the echo.
        rank, world: this rank reads the serials congruent to ``rank`` modulo ``world``.
        resident: give row numbers instead of examples; the pool is the source itself.
        seed: of what a dataset draws from global generators.
        num_workers: that read: threads, or ``processes``.
    """

    def __init__(
        self,
        source: ArraySource | MapSource,
        permutation: Permutation,
        preparation: Preparation,
        *,
        rank: int,
        world: int,
        resident: bool,
        seed: int = 0,
        num_workers: int = 0,
        processes: bool = False,
    ) -> None:
        self.reads_again = not resident  # each when it is needed
        self.witnesses = Witnesses()  # none: the order is the loader's own
        self._source, self._permutation, self._preparation = source, permutation, preparation
        self._rank, self._world, self._resident = rank, world, resident
        self._index, self._limit = 0, sys.maxsize
        self._seed, self._num_workers, self._processes = seed + _DATASET_SEED, num_workers, processes

    def begin(self, iteration: int, passes: int | None, abandoned_at: int | None = None) -> int:  # noqa: ARG002 (where passes begin is known)
        self._source.begin(self._num_workers, processes=self._processes)
        self._index, self._limit = (0, sys.maxsize) if passes is None else self.span(iteration)
        return self._index

    def span(self, iteration: int) -> tuple[int, int]:
        """Local numbers between which an iteration lies."""
        of_each = self._permutation.iteration_length // self._world
        return (iteration - 1) * of_each, iteration * of_each

    def claim(self, count: int) -> tuple[Serials, Rows, int] | None:
        end = min(self._index + count, self._limit)
        if end <= self._index:
            return None
        serials = np.arange(self._index, end, dtype=np.int64) * self._world + self._rank  # [n]
        self._index = end
        return serials, self._permutation.rows(serials), end

    def work(self, claim: tuple[Serials, Rows, int]) -> Fresh:
        serials, rows, end = claim  # [n], [n]
        source, preparation = self._source, self._preparation
        if self._resident:
            return Fresh(serials, rows, end)
        if isinstance(source, ArraySource) and preparation.decode is None:
            return Fresh(serials, preparation.finish(serials, source.read(rows)), end)
        keys: Any = None
        if source.draws:
            keys = keyed.item_keys(self._seed, serials << keyed.ECHO_BITS).tolist()  # [n]
        fetch, failed = source.fetched(rows, keys)
        fresh = preparation.fresh(
            serials, end, fetch, lambda position: source.origin(int(rows[position])), self._world, rows
        )
        if failed is not None and not fresh.bad:
            if not is_of_machine(failed):
                failed.add_note("each of them can be read alone: __getitems__ is at fault")
            raise failed
        return fresh

    def progress(self, oldest_serial: int, index: int) -> list[list[Any]]:  # noqa: ARG002 (any can be read)
        mark = self._mark(index) if index else 0
        return [[mark, ()]] if mark else []

    def _mark(self, index: int) -> int:
        return self._permutation.mark((index - 1) * self._world + self._rank)

    def resume(self, index: int, iteration: int, passes: int | None, needed: Serials, progress: Any) -> int:
        within = len(needed) or passes is None or index != self.span(iteration)[1]
        if progress and within and progress[0][0] != self._mark(index):
            raise ValueError(
                "load_state_dict: the order of this pass is another than when the state was saved: examples "
                "would come twice or never; give the same sampler, or the same shards and open_shards"
            )
        self.begin(iteration, passes)
        self._index = index
        return 0

    def again(self, serials: Serials) -> tuple[Serials, Rows, int]:
        return serials, self._permutation.rows(serials), 0

    def go_alone(self) -> None:
        self._resident, self._preparation.alone = False, True

    def rows(self, items: keyed.Items) -> Rows:
        """The rows of items: where they lie in a resident source."""
        return self._permutation.rows(items >> keyed.ECHO_BITS)
