"""Fresh examples from a source with random access."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.memory.pool import Examples
from adaecho.echo.order import keyed
from adaecho.echo.order.fresh import Fresh
from adaecho.echo.order.permutation import Permutation
from adaecho.echo.read.chunks import Preparation, Serials, all_of
from adaecho.echo.read.map_source import MapSource
from adaecho.echo.read.sources import ArraySource
from adaecho.echo.read.witness import Witnesses

_DATASET_SEED = 2  # beside the seeds of examples and of batches


class RandomReader:
    """Reads a source with random access.

    Args:
        source: where examples come from.
        permutation: the row of each serial.
        preparation: what happens to them before the echo.
        rank, world: this rank reads the serials congruent to ``rank`` modulo ``world``.
        resident: give row numbers instead of examples; the pool is the source itself.
        seed: of what a dataset draws from global generators.
        num_workers: threads that read.
        echo: the variant, for a warning where a dataset draws.
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
        echo: str = "none",
    ) -> None:
        self.reads_again = not resident  # each when it is needed
        self.witnesses = Witnesses()  # none: the order is the loader's own
        self._source, self._permutation, self._preparation = source, permutation, preparation
        self._rank, self._world, self._resident = rank, world, resident
        self._index, self._limit = 0, sys.maxsize
        self._seed, self._num_workers, self._echo = seed + _DATASET_SEED, num_workers, echo

    @property
    def method(self) -> str:
        """How rows are permuted, which a state names: see ``Permutation``."""
        return self._permutation.method

    def begin(
        self,
        iteration: int,
        passes: int | None,
        abandoned_at: int | None = None,  # noqa: ARG002 (where passes begin is known)
    ) -> int:
        if isinstance(self._source, MapSource):
            self._source.begin(self._num_workers, self._echo)
        self._index, self._limit = 0, sys.maxsize
        if passes is not None:
            self._index, self._limit = self.span(iteration)
        return self._index

    def span(self, iteration: int) -> tuple[int, int]:
        """Local numbers between which an iteration lies."""
        of_each = self._permutation.iteration_length // self._world
        return (iteration - 1) * of_each, iteration * of_each

    def claim(self, count: int) -> tuple[Serials, Any, int] | None:
        end = min(self._index + count, self._limit)
        if end <= self._index:
            return None
        serials = np.arange(self._index, end, dtype=np.int64) * self._world + self._rank
        self._index = end
        return serials, self._permutation.rows(serials), end

    def work(self, claim: tuple[Serials, Any, int]) -> Fresh:
        serials, rows, end = claim
        if self._resident:
            return Fresh(serials, rows, end, world=self._world)
        if isinstance(self._source, ArraySource) and self._preparation.decode is None:
            return Fresh(
                serials, self._preparation.finish(serials, self._source.read(rows)), end, [], self._world
            )
        fetched, failed = self._fetch(serials, rows)

        def origin(position: int) -> str:
            return self._source.origin(int(rows[position]))

        fresh = self._preparation.fresh(serials, end, fetched, origin, self._world, rows)
        if failed is not None and not fresh.bad:
            failed.add_note("each of them can be read alone: __getitems__ is at fault")
            raise failed
        return fresh

    def _fetch(
        self, serials: Serials, rows: NDArray[np.int64]
    ) -> tuple[Callable[[int], Any], Exception | None]:
        """What gives the example at a position, and why they could not be read at once."""
        source = self._source
        if isinstance(source, ArraySource):
            return source.read(rows).examples().__getitem__, None
        together, failed = source.read_many(rows)
        if together is not None:
            return together.__getitem__, None
        if not source.draws:
            return lambda position: source.read_one(int(rows[position])), failed
        keys = keyed.item_keys(self._seed, serials << keyed.ECHO_BITS).tolist()
        return lambda position: source.read_one(int(rows[position]), keys[position]), failed

    def resume(self, index: int, iteration: int, passes: int | None, needed: Serials, progress: Any) -> int:  # noqa: ARG002 (what is needed is read when it is asked for)
        self.begin(iteration, passes)
        self._index = index
        return 0

    def reread(self, serials: Serials, uses: NDArray[np.int64]) -> Examples:  # noqa: ARG002
        claim = serials, self._permutation.rows(serials), 0
        examples: Examples = all_of(self.work(claim), serials)
        return examples

    def rows(self, items: keyed.Items) -> NDArray[np.int64]:
        """The rows of items: where they lie in a resident source."""
        return self._permutation.rows(items >> keyed.ECHO_BITS)

    def progress(self, oldest_serial: int, index: int) -> list[list[Any]]:  # noqa: ARG002
        return []

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass
