"""Upstream of the echo stage: read, decode and, under example_after_augmentation, augment.

A reader hands out its work in two parts: ``claim`` settles, in order and in one thread at a time, what is to
be read next; ``work`` may run in many threads at once.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adaecho.echo import keys
from adaecho.echo.examples import Stack, stack
from adaecho.echo.pool import Examples
from adaecho.echo.source import ArraySource, IterableSource, MapSource, Permutation
from adaecho.echo.stage import Fresh
from adaecho.echo.workers import InlineMap, OrderedMap

# What a broken connection or machine raises says nothing about the example: never skipped as a bad one.
_NOT_THE_EXAMPLE = (ConnectionError, TimeoutError, MemoryError, FileNotFoundError, PermissionError)

Serials = NDArray[np.int64]


@dataclass
class Preparation:
    """What happens to an example between storage and the echo stage.

    Attributes:
        decode: one example from its stored form, deterministic; None where it is stored decoded.
        augment: applied to many, before the echo; None where it comes after.
        stacked: whether to stack examples of one shape into arrays.
    """

    decode: Callable[[Any], Any] | None = None
    augment: Callable[[keys.Items, Examples], Examples] | None = None
    stacked: bool = True

    def finish(self, serials: Serials, examples: Examples) -> Examples:
        """Augment where that comes before the echo, and stack what can be stacked."""
        if self.augment is not None and len(serials):
            examples = self.augment(serials << keys.ECHO_BITS, examples)
        if isinstance(examples, Stack) or not self.stacked:
            return examples
        return stack(examples) or examples

    def decode_all(
        self, serials: Serials, fetch: Callable[[int], Any], origin: Callable[[int], str], world: int
    ) -> "Decoded":
        """Examples by position in ``serials``, the bad ones apart."""
        decoded = Decoded()
        for position, serial in enumerate(serials.tolist()):
            try:
                example = fetch(position)
                decoded.examples.append(example if self.decode is None else self.decode(example))
                decoded.positions.append(position)
            except _NOT_THE_EXAMPLE as error:
                error.add_note(f"while reading {origin(position)}")
                raise
            except Exception as error:
                decoded.bad.append((serial // world, origin(position), error))
        return decoded


@dataclass
class Decoded:
    """Good examples with their positions, and (local number, origin, exception) of each bad one."""

    examples: list[Any] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    bad: list[tuple[int, str, Exception]] = field(default_factory=list)


class Reader(Protocol):
    """Fresh examples of one rank in serial order."""

    def begin(self, iteration: int, passes: int | None, abandoned_at: int | None) -> int:
        """Go to where an iteration of so many passes begins (None: endless); its first local number.

        ``abandoned_at`` is the local number at which the one before was given up, None if it ended.
        """

    def claim(self, count: int) -> Any | None:
        """Settle the next ``count`` fresh examples; None at the end of the iteration."""

    def work(self, claim: Any) -> Fresh:
        """Read, decode and prepare what was claimed."""

    def restore(
        self, index: int, iteration: int, passes: int | None, needed: Serials, progress: Any
    ) -> tuple[Any, int]:
        """Go to a local number; the needed earlier examples again, and how many had to be read for that."""

    def progress(self, oldest_serial: int, index: int) -> list[list[int]]:
        """What ``restore`` needs to go to a local number, reading again from a serial on: plain numbers."""

    def close(self) -> None:
        """Let go of whatever is open."""


class RandomReader:
    """Reads a source with random access.

    Args:
        source: where examples come from.
        permutation: the row of each serial.
        preparation: what happens to them before the echo.
        rank, world: this rank reads the serials congruent to ``rank`` modulo ``world``.
        resident: give row numbers instead of examples; the pool is the source itself.
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
    ) -> None:
        self._source, self._permutation, self._preparation = source, permutation, preparation
        self._rank, self._world, self._resident = rank, world, resident
        self._index, self._limit = 0, sys.maxsize

    def begin(
        self,
        iteration: int,
        passes: int | None,
        abandoned_at: int | None = None,  # noqa: ARG002 (where passes begin is known)
    ) -> int:
        self._index = 0 if passes is None else self._first_index((iteration - 1) * passes)
        self._limit = sys.maxsize if passes is None else self._first_index(iteration * passes)
        return self._index

    def _first_index(self, passes: int) -> int:
        """How many of the serials of the first passes are this rank's."""
        return max(0, math.ceil((self._source.length * passes - self._rank) / self._world))

    def serials_of(self, iteration: int, passes: int) -> Serials:
        """All serials of this rank in one iteration of so many passes."""
        first, last = self._first_index((iteration - 1) * passes), self._first_index(iteration * passes)
        return np.arange(first, last, dtype=np.int64) * self._world + self._rank

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
        fetched = self._fetch(rows)
        decoded = self._preparation.decode_all(
            serials, fetched, lambda position: self._source.origin(int(rows[position])), self._world
        )
        good = serials[decoded.positions]
        return Fresh(good, self._preparation.finish(good, decoded.examples), end, decoded.bad, self._world)

    def _fetch(self, rows: NDArray[np.int64]) -> Callable[[int], Any]:
        if isinstance(self._source, ArraySource):
            examples = self._source.read(rows).examples()
            return examples.__getitem__
        source = self._source
        return lambda position: source.read_one(int(rows[position]))

    def restore(
        self,
        index: int,
        iteration: int,
        passes: int | None,
        needed: Serials,
        progress: Any,  # noqa: ARG002
    ) -> tuple[Any, int]:
        self.begin(iteration, passes)
        self._index = index
        again = self.work((needed, self._permutation.rows(needed), index))
        if len(again.serials) != len(needed):
            _, origin, error = again.bad[0]
            error.add_note(f"while reading {origin} again to restore the buffer; it could be read before")
            raise error
        return again.things, len(needed)

    def progress(self, oldest_serial: int, index: int) -> list[list[int]]:  # noqa: ARG002
        return []

    def close(self) -> None:
        pass


class SequentialReader:
    """Reads a source that can only be iterated; every rank passes over the examples of the others.

    Args:
        source: gives an iterator for each pass.
        preparation: what happens to examples before the echo.
        rank, world: this rank keeps the serials congruent to ``rank`` modulo ``world``.
    """

    def __init__(self, source: IterableSource, preparation: Preparation, *, rank: int, world: int) -> None:
        self._source, self._preparation = source, preparation
        self._rank, self._world = rank, world
        self._iterator: Iterator[Any] | None = None
        self._serial = 0  # examples of all ranks that have been iterated over
        self._passes: list[tuple[int, int]] = []  # number and first serial of each pass opened
        self._last_pass: int | None = None

    def begin(self, iteration: int, passes: int | None, abandoned_at: int | None = None) -> int:
        if abandoned_at is not None:
            # A multiple of the number of ranks: all agree on whose the examples of the next pass are.
            self._serial = abandoned_at * self._world
        self._last_pass = None if passes is None else iteration * passes
        first = 0 if passes is None else (iteration - 1) * passes
        self._open(first)
        return max(0, math.ceil((self._serial - self._rank) / self._world))

    def _open(self, number: int) -> bool:
        """Open a pass; False where the iteration ends before it."""
        self.close()
        if self._passes and self._passes[-1][0] == number:
            self._passes.pop()
        self._passes.append((number, self._serial))
        if self._last_pass is not None and number >= self._last_pass:
            return False
        self._iterator = self._source.open(number)
        return True

    def _next(self) -> tuple[int, Any] | None:
        """The next example of any rank with its serial; None at the end of the iteration."""
        while self._iterator is not None:
            try:
                example = next(self._iterator)
            except StopIteration:
                number, first = self._passes[-1]
                if first == self._serial:
                    raise ValueError(
                        f"source: pass {number} of {self._source.name} gave no examples; "
                        "a source that can be iterated once only needs epochs=1, "
                        "or a function that returns a new iterator"
                    ) from None
                self._open(number + 1)
                continue
            except Exception as error:
                error.add_note(f"while reading {self._source.origin(self._serial)}")
                raise
            self._serial += 1
            return self._serial - 1, example
        return None

    def claim(self, count: int) -> tuple[Serials, list[Any]] | None:
        serials: list[int] = []
        examples: list[Any] = []
        while len(serials) < count:
            found = self._next()
            if found is None:
                break
            if found[0] % self._world == self._rank:
                serials.append(found[0])
                examples.append(found[1])
        return (np.array(serials, dtype=np.int64), examples) if serials else None

    def work(self, claim: tuple[Serials, list[Any]]) -> Fresh:
        serials, raw = claim
        decoded = self._preparation.decode_all(
            serials,
            raw.__getitem__,
            lambda position: self._source.origin(int(serials[position])),
            self._world,
        )
        good = serials[decoded.positions]
        end = int(serials[-1]) // self._world + 1
        return Fresh(good, self._preparation.finish(good, decoded.examples), end, decoded.bad, self._world)

    def restore(
        self, index: int, iteration: int, passes: int | None, needed: Serials, progress: Any
    ) -> tuple[Any, int]:
        """Iterate again from the pass of the oldest needed example up to the position."""
        position = (index - 1) * self._world + self._rank + 1 if index else 0
        position = max(position, int(progress[-1][1]))
        oldest = min(int(needed[0]) if len(needed) else position, position)
        opened = [(int(number), int(first)) for number, first in progress]
        number, first = next(one for one in reversed(opened) if one[1] <= oldest)
        self._passes, self._serial = [], first
        self._last_pass = None if passes is None else iteration * passes
        self._open(number)
        wanted, kept = set(needed.tolist()), []
        while self._serial < position:
            found = self._next()
            if found is None:
                raise ValueError(
                    f"restoring: {self._source.name} ended at example {self._serial}, before {position}; "
                    "it must give the same examples again"
                )
            if found[0] in wanted:
                kept.append(found[1])
        if self._passes[-1][0] < opened[-1][0]:
            self._open(opened[-1][0])
        if not len(needed):
            return [], position - first
        return self.work((needed, kept)).things, position - first

    def progress(self, oldest_serial: int, index: int) -> list[list[int]]:
        """Number and first serial of each pass from that of ``oldest_serial`` to that of the next example."""
        opened = [one for one in self._passes if one[1] <= index * self._world + self._rank]
        unneeded = max(sum(first <= oldest_serial for _, first in opened) - 1, 0)
        del self._passes[:unneeded]
        return [list(one) for one in opened[unneeded:]]

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


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
            return "max_bad_examples=0 skips none; a larger budget skips and lists them in bad_examples"
        others = ", ".join(bad["origin"] for bad in self.found[-6:-1])
        return f"more bad examples than max_bad_examples={self._budget}; the last before it: {others}"


class FreshQueue:
    """Fresh examples in any number at a time from a reader that works ahead in chunks.

    Args:
        reader: what to read with; inline it reads exactly what is asked for.
        bad: where bad examples are listed, in order.
    """

    def __init__(self, reader: Reader, bad: BadExamples) -> None:
        self._bad, self._wanted = bad, 1
        self.map: OrderedMap[Any, Fresh] | InlineMap[Any, Fresh]
        self.map = InlineMap(lambda: reader.claim(self._wanted), reader.work)
        self._chunk: Fresh | None = None
        self._index = 0
        self.examples = 0

    def read_ahead(self, chunks: OrderedMap[Any, Fresh]) -> None:
        """Take from chunks that threads read."""
        self.map = chunks

    def begin(self, index: int) -> None:
        """Start at a local number."""
        self._chunk, self._index = None, index

    def take(self, count: int) -> Fresh | None:
        """Up to ``count`` local numbers further, without the bad ones; None at the end of the iteration."""
        if self._chunk is None:
            self._wanted = count
            self._chunk = self.map.get(by_crew=True)
            if self._chunk is None:
                return None
        chunk = self._chunk
        end = min(self._index + count, chunk.next_index)
        self._chunk = None
        if end < chunk.next_index:
            chunk, self._chunk = chunk.split(end)
        self.examples += end - self._index
        self._index = end
        for index, origin, error in chunk.bad:
            self._bad.add(index, origin, error)
        return chunk
