"""The order in which a sampler, as DataLoader takes one, has rows read."""

import operator
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adaecho.echo.order.permutation import Permutation


def seeds_of_pass(seed: int, number: int) -> tuple[int, int]:
    """The seeds of a sampler's draws in a pass and of those of its rows as they are read, below 2**63."""
    drawn = np.random.Philox(key=np.array([seed & 0xFFFFFFFFFFFFFFFF, number], dtype=np.uint64)).random_raw(2)
    return int(drawn[0]) >> 1, int(drawn[1]) >> 1


class SampledOrder(Permutation):
    """What a sampler gives in each pass, drawn at once and as a function of (seed, pass).

    A sampler with a ``generator``, as torch's random ones have, gets one keyed to (seed, pass) to
    draw from; ``set_epoch(pass)`` is called before where it exists. All ranks draw the same rows and share
    them out.

    Args:
        sampler: an iterable of rows with a length.
        rows: of the source.
        seed, passes, world, drop_last: as of the permutation.

    Raises:
        ValueError: it is empty, gives what is no row, or draws another order when it is asked for the same
            pass again.
    """

    def __init__(
        self, sampler: Any, rows: int, seed: int, *, passes: int | None, world: int, drop_last: bool
    ) -> None:
        if not len(sampler):
            raise ValueError(f"sampler={type(sampler).__name__}: it gives no rows (length 0)")
        super().__init__(len(sampler), "sampler", seed, passes=passes, world=world, drop_last=drop_last)
        self._sampler, self._num_rows = sampler, rows
        self._lock = threading.Lock()  # a sampler draws for one thread at a time
        if not hasattr(sampler, "generator") and not np.array_equal(self._drawn(0), self._drawn(0)):
            raise ValueError(
                f"sampler={type(sampler).__name__}: it drew two orders for one pass, and no resume could be "
                "exact; let it draw from a torch.Generator in its attribute `generator`, or from what "
                "set_epoch(pass) told"
            )

    def _pass(self, number: int) -> NDArray[Any]:
        with self._lock:
            return super()._pass(number)

    def _drawn(self, number: int) -> NDArray[Any]:
        sampler = self._sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        if not hasattr(sampler, "generator"):
            return self._rows()
        drawn_with = torch.Generator()
        drawn_with.manual_seed(seeds_of_pass(self._seed, number)[0])
        own, sampler.generator = sampler.generator, drawn_with
        try:
            return self._rows()
        finally:
            sampler.generator = own

    def _rows(self) -> NDArray[Any]:
        name = type(self._sampler).__name__
        try:
            rows = np.fromiter(map(operator.index, self._sampler), dtype=np.int64)
        except TypeError as error:
            raise ValueError(
                f"sampler={name}: it must give rows, one whole number after another ({error}); of a "
                "BatchSampler give its sampler, batch_size= and drop_last="
            ) from error
        if len(rows) != self.length:
            raise ValueError(f"sampler={name}: it gave {len(rows)} rows, and its length is {self.length}")
        wrong = rows[(rows < 0) | (rows >= self._num_rows)]
        if len(wrong):
            raise ValueError(f"sampler={name}: it gave row {wrong[0]} of a source with {self._num_rows} rows")
        return rows
