"""Fresh examples from a source that can only be iterated."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from adaecho.echo.source import IterableSource
from adaecho.echo.stage import Fresh
from adaecho.echo.upstream import Preparation, Serials


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
