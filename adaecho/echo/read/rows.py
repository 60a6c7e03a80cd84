"""Read arrays and map-style datasets, whose rows can be read in any order.

* The *row* of an example is its place in the source.
* The *serial number* of an example is its place in the reading order of all ranks, over all epochs.
* The *index* of an example is its place in the reading order of this rank, over all epochs.

All three are counted from 0. Rank r reads the serial numbers r, r + world, r + 2 * world and so on.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from adaecho.echo.memory.pytree import Columns, Rows
from adaecho.echo.order import keyed
from adaecho.echo.order.permutation import Permutation
from adaecho.echo.order.stage import FreshBlock
from adaecho.echo.read.chunks import Preparation, ReaderState, Serials, is_of_machine

_GROUP, _GROUP_BYTES = 1024, 1 << 22  # maximum number of small examples in a group, and maximum bytes
_DATASET_SEED = 2  # added to the loader's seed, so that the dataset and the loader draw different numbers


class ArraySource:
    """A source of arrays or CPU tensors of the same length, alone or in a dict or tuple."""

    thread_safe = True

    def __init__(self, arrays: Columns) -> None:
        self.arrays = arrays  # [length, ...] for each leaf
        self.length, self.name = len(arrays), "arrays"
        # Rows of a memory map are copied into a pool, because each use would otherwise reread them from
        # storage.
        self.resident = not any(map(_is_memory_map, arrays.arrays))

    def read(self, rows: Rows) -> Columns:
        """Return copies of the examples in the given rows."""
        return self.arrays.take(rows)

    def batches_at_once(self, batch_size: int) -> int:
        """Return how many batches to build together, to amortize the Python overhead of small examples."""
        examples = min(_GROUP, _GROUP_BYTES // max(self.arrays.example_bytes, 1))
        return max(1, examples // batch_size)

    def fetch(self, rows: Rows, seeds: Any) -> Callable[[int], Any]:  # noqa: ARG002 (they draw nothing)
        """Read the given rows, and return a function that maps i to the example in ``rows[i]``."""
        return self.read(rows).examples().__getitem__

    def origin(self, row: int) -> str:
        """Return the name of an example for messages."""
        return f"row {row} of the source"


def _is_memory_map(array: Any) -> bool:
    return array is not None and (
        isinstance(array, np.memmap) or _is_memory_map(getattr(array, "base", None))
    )


def is_thread_safe(dataset: Any) -> bool:
    """Return whether several threads may read a dataset at the same time."""
    declared, kind = getattr(dataset, "thread_safe", None), type(dataset)
    if isinstance(declared, bool):
        return declared
    if kind is Subset:
        return is_thread_safe(dataset.dataset)
    if kind in (ConcatDataset, StackDataset):
        inner = dataset.datasets
        return all(map(is_thread_safe, inner.values() if isinstance(inner, dict) else inner))
    return kind in (list, tuple, range, np.ndarray, torch.Tensor, TensorDataset)


class MapSource:
    """A source that wraps a map-style dataset, which supports ``len(dataset)`` and ``dataset[row]``.

    The dataset may also have:

    * ``origin(row)``: the name of an example for messages.
    * ``shard_lengths``: the number of examples in each shard, for ``order="shards"``.
    * ``__getitems__(rows)``, which reads many rows in one call.
    * ``thread_safe = True``, if reading changes no shared state, such as an open file.

    Datasets without ``thread_safe`` are read in worker processes or in the calling thread. If a dataset draws
    from the global random generators, the loader seeds these generators for each example.
    """

    resident = False

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.name, self.length = dataset, type(dataset).__name__, len(dataset)
        self.shard_lengths = getattr(dataset, "shard_lengths", None)
        self.thread_safe = is_thread_safe(dataset)
        self.draws = False  # whether reading has drawn random numbers from a global generator

    def fetch(self, rows: Rows, seeds: list[int]) -> Callable[[int], Any]:
        """Return a function that maps i to the example in ``rows[i]``.

        If ``seeds`` is not empty, the function first seeds the global generators with ``seeds[i]``.
        """
        if seeds:
            return lambda position: self._seeded(int(rows[position]), seeds[position])
        if not hasattr(self._dataset, "__getitems__"):
            return lambda position: self._dataset[int(rows[position])]
        try:
            examples = list(self._dataset.__getitems__(rows.tolist()))
        except Exception as error:
            if is_of_machine(error):
                error.add_note(f"while reading {self.origin(int(rows[0]))} and {len(rows) - 1} more")
                raise
            # Reading one by one shows which example is bad.
            return lambda position: self._dataset[int(rows[position])]
        return examples.__getitem__

    def _seeded(self, row: int, seed: int) -> Any:
        keyed.seed_globally(seed, seed >> 1)
        return self._dataset[row]

    def origin(self, row: int) -> str:
        """Return the name of an example for messages."""
        own = getattr(self._dataset, "origin", None)
        return f"example {row} of {self.name}" if own is None else str(own(row))


class RandomReader:
    """Reads the examples of one rank from a source whose rows can be read in any order."""

    def __init__(
        self,
        source: ArraySource | MapSource,
        permutation: Permutation,  # maps serial numbers to rows
        preparation: Preparation,
        *,
        rank: int,
        world: int,
        resident: bool,  # whether to return row numbers instead of examples, for arrays in memory
        seed: int = 0,  # for datasets that draw random numbers from the global generators
    ) -> None:
        self.reads_again = not resident  # whether a resume rereads the examples in the shuffle buffer
        self._source, self._permutation, self._preparation = source, permutation, preparation
        self._rank, self._world, self._resident = rank, world, resident
        self._index, self._limit, self._seed = 0, sys.maxsize, seed + _DATASET_SEED

    def begin(self, iteration: int, passes: int | None, abandoned_at: int | None = None) -> int:  # noqa: ARG002 (where passes begin is known)
        """Move to the first example of an iteration, and return its index among this rank's examples."""
        # Iterations are counted from 1. Each has ``passes`` epochs, or no end if ``passes`` is None.
        # ``abandoned_at`` is this rank's next index if the user left the previous iteration early.
        self._index, self._limit = (0, sys.maxsize) if passes is None else self.span(iteration)
        return self._index

    def span(self, iteration: int) -> tuple[int, int]:
        """Return the range [start, end) of an iteration, as indices among this rank's examples."""
        of_each = self._permutation.iteration_length // self._world
        return (iteration - 1) * of_each, iteration * of_each

    def claim(self, count: int) -> tuple[Serials, Rows, int] | None:
        """Select at most ``count`` examples to read next, or return None at the end of the iteration."""
        end = min(self._index + count, self._limit)
        if end <= self._index:
            return None
        serials = np.arange(self._index, end, dtype=np.int64) * self._world + self._rank  # [n]
        self._index = end
        return serials, self._permutation.rows(serials), end  # int64 [n], int64 [n], this rank's next index

    def work(self, claim: tuple[Serials, Rows, int]) -> FreshBlock:
        """Read and prepare the examples that ``claim`` or ``again`` selected."""
        serials, rows, end = claim  # [n], [n]
        source = self._source
        if self._resident:
            return FreshBlock(serials, rows, end)
        if isinstance(source, ArraySource) and self._preparation.decode is None:
            return FreshBlock(serials, self._preparation.finish(serials, source.read(rows)), end)
        if isinstance(source, ArraySource) or source.thread_safe or not len(serials):
            return self._fresh(claim, [])
        seeds = keyed.item_keys(self._seed, serials << keyed.ECHO_BITS).tolist()
        with keyed.global_generators_kept():
            if not source.draws:
                # Seeding each example takes longer than reading a small one. A dataset that turns out to draw
                # numbers is reread with the seeds.
                keyed.seed_globally(seeds[0], seeds[0] >> 1)
                fresh = self._fresh(claim, [])
                if keyed.are_seeded(seeds[0], seeds[0] >> 1):
                    return fresh
                source.draws = True
            fresh = self._fresh(claim, seeds)
        fresh.draws = True
        return fresh

    def _fresh(self, claim: tuple[Serials, Rows, int], seeds: list[int]) -> FreshBlock:
        (serials, rows, end), source = claim, self._source
        return self._preparation.fresh(
            serials, end, source.fetch(rows, seeds), lambda position: source.origin(int(rows[position])),
            self._world, rows,
        )  # fmt: skip

    def state(self, oldest_serial: int, index: int) -> ReaderState:  # noqa: ARG002 (any can be read)
        """Return a digest of the current epoch's order, with which ``resume`` detects a changed order."""
        mark = self._mark(index) if index else 0
        return ([[mark, []]] if mark else []), []

    def _mark(self, index: int) -> int:
        return self._permutation.mark((index - 1) * self._world + self._rank)

    def resume(
        self, index: int, iteration: int, passes: int | None, needed: Serials, state: ReaderState
    ) -> int:
        """Move to the position of a saved state, at which example ``index`` of this rank is next."""
        # ``needed`` contains the serial numbers of the examples in the buffers.
        progress, _ = state
        within = len(needed) or passes is None or index != self.span(iteration)[1]
        if progress and within and progress[0][0] != self._mark(index):
            raise ValueError(
                "load_state_dict: the order of this epoch differs from the saved one, so some examples would "
                "be used twice and others never; pass the same sampler, or the same shards"
            )
        self.begin(iteration, passes)
        self._index = index
        return 0  # examples read so far, because ``again`` selects those of the buffers later

    def again(self, serials: Serials) -> tuple[Serials, Rows, int]:
        """Select earlier examples by serial number, to refill the shuffle buffer after a resume."""
        return serials, self._permutation.rows(serials), 0

    def go_alone(self) -> None:
        """Adapt the reader to a worker process, which stores each example separately."""
        self._preparation.in_worker = True

    def close(self) -> None:
        """Do nothing, because the dataset belongs to the user."""
