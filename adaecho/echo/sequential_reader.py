"""Fresh examples from a source that can only be iterated."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaecho.echo.items import Fresh
from adaecho.echo.source import IterableSource
from adaecho.echo.upstream import Preparation, Serials

_MOST_MARKS = 1024


@dataclass(frozen=True)
class _Mark:
    """Somewhere to begin again.

    Attributes:
        number, first: of the pass, and the count at which it began.
        count: examples iterated over before.
        position: for the source; empty where the pass begins.
    """

    number: int
    first: int
    count: int
    position: tuple[int, ...] = ()

    def plain(self) -> list[int]:
        """As a state holds it."""
        return [self.number, self.first, self.count, *self.position]


class SequentialReader:
    """Reads a source that can only be iterated.

    Every rank passes over the examples of the others, unless the source gives each rank its own
    (``set_share``). A source that can begin in the middle of a pass is not read from the beginning again.

    Args:
        source: gives an iterator for each pass.
        preparation: what happens to examples before the echo.
        rank, world: this rank's serials are congruent to ``rank`` modulo ``world``.
    """

    def __init__(self, source: IterableSource, preparation: Preparation, *, rank: int, world: int) -> None:
        self._source, self._preparation = source, preparation
        self._rank, self._world = rank, world
        self._shared = source.set_share(rank, world)
        # Of the examples iterated over, every so many is this rank's, from this one on.
        self._kept, self._every = (0, 1) if self._shared else (rank, world)
        self._iterator: Iterator[Any] | None = None
        self._count = 0
        self._claimed: list[tuple[int, Any]] = []  # by a claim in progress, which an interrupt may end
        self._marks: list[_Mark] = []
        self._last_pass: int | None = None

    def begin(self, iteration: int, passes: int | None, abandoned_at: int | None = None) -> int:
        self._claimed = []
        if abandoned_at is not None:
            # A multiple of the number of ranks: all agree on whose the examples of the next pass are.
            self._count = abandoned_at * self._every
        self._last_pass = None if passes is None else iteration * passes
        self._open(0 if passes is None else (iteration - 1) * passes)
        return max(0, math.ceil((self._count - self._kept) / self._every))

    def _serial(self, count: int) -> int:
        return count * self._world + self._rank if self._shared else count

    def _open(self, number: int, first: int | None = None, position: tuple[int, ...] = ()) -> None:
        """Open a pass, unless the iteration ends before it."""
        self.close()
        while self._marks and self._marks[-1].number == number:
            self._marks.pop()
        self._mark(_Mark(number, self._count if first is None else first, self._count, position))
        if self._last_pass is None or number < self._last_pass:
            self._iterator = self._source.open(number, position)

    def _mark(self, mark: _Mark) -> None:
        if len(self._marks) >= _MOST_MARKS:
            del self._marks[:-1:2]
        self._marks.append(mark)

    def _next(self) -> tuple[int, Any] | None:
        """The next example of any rank with its count; None at the end of the iteration."""
        while self._iterator is not None:
            try:
                example = next(self._iterator)
            except StopIteration:
                number, first = self._marks[-1].number, self._marks[-1].first
                if first == self._count:
                    raise ValueError(
                        f"source: pass {number} of {self._source.name} gave no examples; "
                        "a source that can be iterated once only needs epochs=1, "
                        "or a function that returns a new iterator"
                    ) from None
                self._open(number + 1)
                continue
            except Exception as error:
                error.add_note(f"while reading {self._source.origin(self._serial(self._count))}")
                raise
            except BaseException:
                if getattr(self._iterator, "gi_frame", self) is None:
                    self._iterator = _ended(self._source.name)
                raise
            self._count += 1
            return self._count - 1, example
        return None

    def claim(self, count: int) -> tuple[Serials, list[Any]] | None:
        last = self._marks[-1]
        if self._source.seekable and self._iterator is not None and last.count < self._count:
            position = tuple(self._iterator.position)  # type: ignore[attr-defined]
            self._mark(_Mark(last.number, last.first, self._count, position))
        while len(self._claimed) < count:
            found = self._next()
            if found is None:
                break
            if found[0] % self._every == self._kept:
                self._claimed.append((self._serial(found[0]), found[1]))
        claimed, self._claimed = self._claimed, []
        if not claimed:
            return None
        return np.array([serial for serial, _ in claimed], dtype=np.int64), [one for _, one in claimed]

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
        """Iterate again from the last mark before the oldest needed example up to the position."""
        opened = [
            _Mark(int(number), int(first), int(count), tuple(int(part) for part in position))
            for number, first, count, *position in progress
        ]
        end = max(self._after(index), opened[-1].first)
        oldest = min(self._counts(needed)[0] if len(needed) else end, end)
        mark = next(one for one in reversed(opened) if one.count <= oldest)
        self._marks, self._count, self._claimed = [], mark.count, []
        self._last_pass = None if passes is None else iteration * passes
        self._open(mark.number, mark.first, mark.position)
        wanted, kept = set(self._counts(needed)), []
        while self._count < end:
            found = self._next()
            if found is None:
                raise ValueError(
                    f"restoring: {self._source.name} ended at example {self._count}, before {end}; "
                    "it must give the same examples again"
                )
            if found[0] in wanted:
                kept.append(found[1])
        if self._marks[-1].number < opened[-1].number:
            self._open(opened[-1].number)
        return (self.work((needed, kept)).things if len(needed) else []), end - mark.count

    def _after(self, index: int) -> int:
        """The count just after the last example before a local number."""
        return (index - 1) * self._every + self._kept + 1 if index else 0

    def _counts(self, serials: Serials) -> list[int]:
        counts: list[int] = (serials // self._world if self._shared else serials).tolist()
        return counts

    def progress(self, oldest_serial: int, index: int) -> list[list[int]]:
        """The last mark before ``oldest_serial``, and the passes opened from there to the next example."""
        opened = [mark for mark in self._marks if mark.first <= index * self._every + self._kept]
        oldest = min(self._counts(np.array([oldest_serial]))[0], max(self._after(index), opened[-1].first))
        unneeded = max(sum(mark.count <= oldest for mark in opened) - 1, 0)
        del self._marks[:unneeded]
        return [
            mark.plain() for number, mark in enumerate(opened[unneeded:]) if not number or not mark.position
        ]

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def _ended(name: str) -> Iterator[Any]:
    """In place of a generator that an interrupt has ended: no more of it would look like the end of the pass.

    Raises:
        RuntimeError: when asked.
    """
    raise RuntimeError(
        f"source: Ctrl-C, or stopping while a transfer was tried again, has ended the generator {name} in "
        "the middle of its pass; loader.load_state_dict(loader.state_dict()) reads it again up to there"
    )
    yield
