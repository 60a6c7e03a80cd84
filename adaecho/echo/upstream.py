"""Everything before the echo stage's buffer: read, decode and, under example_after_augmentation, augment."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.echo import keys
from adaecho.echo.examples import Stack, stack
from adaecho.echo.source import ArraySource, IterableSource, MapSource, Permutation
from adaecho.echo.stage import Fresh

# What a broken connection or machine raises says nothing about the example: never skipped as a bad one.
_NOT_THE_EXAMPLE = (ConnectionError, TimeoutError, MemoryError, FileNotFoundError)

Augment = Callable[[keys.Items, Any], Any]


class BadExamples:
    """Examples that could not be read or decoded: listed, and an error beyond the budget."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.found: list[dict[str, Any]] = []

    def add(self, index: int, origin: str, error: Exception) -> None:
        """List one; raises its own exception once there are more than the budget allows."""
        self.found.append({"index": index, "origin": origin, "error": f"{type(error).__name__}: {error}"})
        if len(self.found) > self._budget:
            error.add_note(f"while reading {origin}; {self._explanation()}")
            raise error

    def _explanation(self) -> str:
        if not self._budget:
            return (
                "max_bad_examples=0 skips none; a larger budget skips and lists them in loader.bad_examples"
            )
        others = ", ".join(bad["origin"] for bad in self.found[-6:-1])
        return f"more bad examples than max_bad_examples={self._budget}; the last before it: {others}"


class Reader:
    """Fresh examples of one rank in serial order, read when asked for.

    Args:
        source: where they come from.
        permutation: the rows of serials; None for an iterable.
        decode: one example from its stored form, deterministic; None where it is stored decoded.
        augment: applied before the echo stage; None where it comes after.
        rank, world: this rank reads the serials congruent to ``rank`` modulo ``world``.
        max_bad_examples: how many undecodable ones may be skipped.
        resident: give rows instead of examples; the pool is the source itself.
    """

    def __init__(
        self,
        source: ArraySource | MapSource | IterableSource,
        permutation: Permutation | None,
        *,
        decode: Callable[[Any], Any] | None,
        augment: Augment | None,
        rank: int,
        world: int,
        max_bad_examples: int,
        resident: bool,
    ) -> None:
        self._source, self._permutation, self._resident = source, permutation, resident
        self._decode, self._augment = decode, augment
        self._rank, self._world = rank, world
        self.bad = BadExamples(max_bad_examples)
        self._index = 0
        self._limit: int | None = None

    def begin_pass(self, index: int, limit: int | None) -> None:
        """Go to a local number and end the pass before another; None never ends."""
        self._index, self._limit = index, limit

    def take(self, count: int) -> Fresh | None:
        """The next ``count`` fresh examples, without the bad ones; None at the end of the pass."""
        end = self._index + count if self._limit is None else min(self._index + count, self._limit)
        if end <= self._index:
            return None
        serials = np.arange(self._index, end, dtype=np.int64) * self._world + self._rank
        self._index = end
        good, things = self.read(serials)
        return Fresh(good, things, end)

    def read(self, serials: NDArray[np.int64]) -> tuple[NDArray[np.int64], Any]:
        """Fresh examples by rising serial: the good ones, in the form in which the pool takes them."""
        assert self._permutation is not None
        rows = self._permutation.rows(serials)
        if self._resident:
            return serials, rows
        if isinstance(self._source, ArraySource) and self._decode is None:
            examples: Any = self._source.read(rows)
        else:
            good, examples = [], []
            for position, row in enumerate(rows.tolist()):
                try:
                    examples.append(self._decoded(row))
                    good.append(position)
                except _NOT_THE_EXAMPLE as error:
                    error.add_note(f"while reading {self._source.origin(row)}")
                    raise
                except Exception as error:
                    index = int(serials[position]) // self._world
                    self.bad.add(index, self._source.origin(row), error)
            serials = serials[good]
        if self._augment is not None and len(serials):
            examples = self._augment(serials << keys.ECHO_BITS, examples)
        if not isinstance(examples, Stack):
            examples = stack(examples) or examples
        return serials, examples

    def _decoded(self, row: int) -> Any:
        assert not isinstance(self._source, IterableSource)
        if isinstance(self._source, ArraySource):
            example = self._source.read(np.array([row])).examples()[0]
        else:
            example = self._source.read_one(row)
        return example if self._decode is None else self._decode(example)


def pass_limit(length: int, passes: int, rank: int, world: int) -> int:
    """How many of the serials below ``length * passes`` are this rank's."""
    return max(0, math.ceil((length * passes - rank) / world))
