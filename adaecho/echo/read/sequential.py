"""Fresh examples from a source that can only be iterated."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaecho.echo.order.stage import Fresh
from adaecho.echo.read.around import IterableSource, OwnMemory, Position
from adaecho.echo.read.chunks import Preparation, Reader, Serials
from adaecho.echo.read.failures import warn_caller
from adaecho.echo.read.witness import Witnesses, tells_content

_MOST = 1024  # marks
_SPACING = 16  # times as much is read again anyway as on the way from a mark to the oldest needed example
_WITNESSED = 16  # of so many examples one is; of batches each
_ENDED = object()

SequentialClaim = tuple[Serials, list[Any], Sequence[int]]
"""Serials [n], examples, and the place of each in its pass."""


@dataclass(frozen=True)
class Mark:
    """Somewhere to begin again.

    Attributes:
        number, first: of the pass, and the count at which it began.
        count: examples iterated over before.
        position: for the source; empty where it tells none at the beginning of a pass.
    """

    number: int
    first: int
    count: int
    position: Position = ()

    def plain(self) -> list[Any]:
        """The mark as a state holds it."""
        position = self.position if isinstance(self.position, dict) else list(self.position)
        return [self.number, self.first, self.count, position]


def thinned(marks: list[Mark]) -> list[Mark]:
    """Marks of an iteration, of many the first and the last, and as few between them as the spacing allows.

    So there are few in the longest run: what lies between two is a fraction of what came after.
    """
    if len(marks) <= _MOST:
        return marks
    kept = [marks[-1]]
    for mark, before in zip(marks[-2:0:-1], marks[-3::-1], strict=True):
        newer = kept[-1].count
        if (newer - before.count) * _SPACING > marks[-1].count - newer:
            kept.append(mark)
    return [marks[0], *reversed(kept)]


def needed_marks(marks: list[Mark], oldest: int, following: int, after: int) -> list[Mark]:
    """The last mark before an example, and the passes opened from there to the next one to be read.

    Args:
        marks: of an iteration, rising; none before its first pass has been opened.
        oldest: count of the example; ``after`` where that comes first.
        following: count of the next example to be read.
        after: the count just after the last example before it; one less where that is to be read again.
    """
    opened = [mark for mark in marks if mark.first <= following]
    if not opened:
        return []
    oldest = min(oldest, max(after, opened[-1].first))
    first, *later = opened[max(sum(mark.count <= oldest for mark in opened) - 1, 0) :]
    return [first, *(mark for mark in later if mark.count == mark.first)]


class SequentialReader(Reader):
    """Reads a source that can only be iterated.

    Every rank passes over the examples of the others, unless the source gives each rank its own
    (``set_share``). A source that can begin in the middle of a pass is not read from the beginning again.
    What is iterated over is *counted*; each example of this rank has a count, a local number and a serial.

    Args:
        source: gives an iterator for each pass.
        preparation: what happens to examples before the echo.
        rank, world: this rank's serials are congruent to ``rank`` modulo ``world``.
        check_length: told how many examples of all ranks a pass has, once one has ended, where the source
            has no length of its own.
    """

    reads_again = False

    def __init__(
        self,
        source: IterableSource,
        preparation: Preparation,
        *,
        rank: int,
        world: int,
        check_length: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._source, self._preparation = source, preparation
        self._check_length: Callable[[int], None] | None = None if source.length is not None else check_length
        self._rank, self._world = rank, world
        # Of the examples iterated over, every so many is this rank's, from this one on.
        self._kept, self._every = (0, 1) if source.set_share(rank, world) else (rank, world)
        self._own: Callable[[Any], Any] = preparation.own
        self._reading = threading.Lock()  # held while the iterator is used
        self._again: dict[int, Any] = {}  # examples that were read again, by count
        self._iterator: Iterator[Any] | None = None
        self._released: Position | None = None  # where the iterator was when it was let go
        self._count = 0
        self._marks: list[Mark] = []  # never changed: another takes its place
        self.witnesses = Witnesses(_WITNESSED if preparation.stacked else 1, world)
        self._pass = 0, 0  # its number, and the count at which it began
        self._taken_up = False  # from a position within it
        self._last_pass: int | None = None
        self._following: Mark | None = None  # of a restored state: where the iteration after it begins

    # Counts, local numbers, serials

    def _serial(self, count: int) -> int:
        return count * (self._world // self._every) + self._rank - self._kept

    def _counts(self, serials: Serials) -> list[int]:
        counts: list[int] = (serials // self._world * self._every + self._kept).tolist()
        return counts

    def _after(self, index: int) -> int:
        """The count just after the last example before a local number."""
        return (index - 1) * self._every + self._kept + 1 if index else 0

    # Passes

    def begin(self, iteration: int, passes: int | None, abandoned_at: int | None = None) -> int:
        with self._reading:
            self._marks = []
            self.witnesses.clear()
            if abandoned_at is not None:
                # A multiple of the number of ranks: all agree on whose the examples of the next pass are.
                self._count = abandoned_at * self._every
            self._last_pass = None if passes is None else iteration * passes
            number = 0 if passes is None else (iteration - 1) * passes
            following, self._following = self._following, None
            begins = following is not None and following.number == number
            self._open(number, position=following.position if following and begins else ())
        return max(0, math.ceil((self._count - self._kept) / self._every))

    def _open(self, number: int, first: int | None = None, position: Position = ()) -> None:
        """Open a pass, unless the iteration ends before it."""
        over = self._last_pass is not None and number >= self._last_pass
        if over and not position:
            position = self._source.position_after_pass()
        self._let_go()
        self._pass, self._taken_up = (number, self._count if first is None else first), bool(position)
        if self._preparation.length is not None:
            self._own = OwnMemory()
        if not over:
            self._iterator = self._source.open_pass(number, position)
            if not position and not self._source.seekable:
                position = self._source.position(self._iterator)
        self._mark(position)

    def _mark(self, position: Position) -> None:
        self._marks = thinned([*self._marks, Mark(*self._pass, self._count, position)])

    def _next(self) -> tuple[int, Any] | None:
        """The next example of any rank with its count; None at the end of the iteration."""
        while self._iterator is not None:
            try:
                example = next(self._iterator, _ENDED)
            except Exception as error:
                error.add_note(f"while reading {self._source.origin(self._serial(self._count))}")
                raise
            if example is not _ENDED:
                self._count += 1
                return self._count - 1, example
            self._end_pass()
        return None

    def _end_pass(self) -> None:
        """Go on to the next pass."""
        self._source.within = False
        number, first = self._pass
        length = self._count - first
        if not length and self._taken_up:  # where it had ended when it told its position: this was its rest
            self._open(number)
            return
        if not length:
            raise ValueError(
                f"source: pass {number} of {self._source.name} gave no examples; a source that can be "
                "iterated once only needs epochs=1, or a function that returns a new iterator"
            )
        if self._check_length is not None:
            self._check_length(length * self._world // self._every)
            self._check_length = None
        self._open(number + 1)
        self._source.within = self._iterator is not None

    # Reading

    def claim(self, count: int) -> SequentialClaim | None:
        claimed: list[tuple[int, Any, int]] = []
        with self._reading:
            source, marked = self._source, False
            if self._released is not None:
                self._iterator, self._released = source.open_pass(self._pass[0], self._released), None
            source.within = True
            apart = source.marks_apart
            if apart and self._iterator is not None and self._count - self._marks[-1].count >= apart:
                self._mark(source.position(self._iterator))
                marked = True
            while len(claimed) < count and (following := self._next()) is not None:
                number, example = following
                if number % self._every == self._kept:
                    serial, index_in_pass = self._serial(number), number - self._pass[1]
                    # The first after a mark always: it may be the only one that is read again.
                    first = marked and not claimed
                    self.witnesses.add(
                        serial, index_in_pass, example, source.rows(self._iterator), always=first
                    )
                    # Before the source goes on, which may put its next example into the same memory.
                    claimed.append((serial, self._own(example), index_in_pass))
        if not claimed:
            return None
        serials, examples, indices_in_pass = zip(*claimed, strict=True)
        return np.array(serials, dtype=np.int64), list(examples), indices_in_pass

    def work(self, claim: SequentialClaim) -> Fresh:
        serials, raw, indices_in_pass = claim
        # Passes that may differ in their order don't tell which example it is.
        rows = None if self._source.reordered else indices_in_pass
        return self._preparation.fresh(
            serials, int(serials[-1]) // self._world + 1, raw.__getitem__,
            lambda position: self._source.origin(int(serials[position])), self._world, rows,
        )  # fmt: skip

    # Where it stands

    def progress(self, oldest_serial: int, index: int) -> list[list[Any]]:
        """The last mark before ``oldest_serial``, and the passes opened from there to the next example."""
        source, witnesses = self._source, self.witnesses.before(index * self._world)
        if witnesses and not (source.seekable or source.marks_apart or tells_content(witnesses)):
            warn_caller(
                "state_dict: nothing in what the source gives can be compared (tensors on another device, or "
                "objects that show no arrays): a resume wouldn't notice if it gave another order then; let "
                "its order follow from a seed, or from what set_epoch(pass) told it"
            )
        # Within a pass the last example is read again, to see that it comes again; but what `iterate_from`
        # begins has to be as it was.
        after = self._after(index) - (source.knows_rows or not source.seekable)
        (oldest,) = self._counts(np.array([oldest_serial]))
        marks = needed_marks(self._marks, oldest, index * self._every + self._kept, after)
        return [mark.plain() for mark in marks]

    def resume(self, index: int, iteration: int, passes: int | None, needed: Serials, progress: Any) -> int:
        """Iterate again from the last mark before the oldest needed example up to the position."""
        opened = [Mark(*plain) for plain in progress]
        with self._reading:
            self._marks, self._again = [], {}
            if not opened:  # nothing has been read yet
                self._let_go()
                self._count = 0
                return 0
            end = max(self._after(index), opened[-1].first)
            wanted = set(self._counts(needed))
            mark = self._last_before(min([*wanted, end]), opened)
            if not mark.position:
                self._source.check_restart()
            self._count = mark.count
            self._last_pass = None if passes is None else iteration * passes
            self._open(mark.number, mark.first, mark.position)
            self._source.within = True
            reread = self._read_again(end, wanted)
            if self._pass[0] < opened[-1].number:
                self._open(opened[-1].number, position=opened[-1].position)
            self._following = opened[-1] if self._iterator is None else None
        return reread

    def _last_before(self, count: int, opened: list[Mark]) -> Mark:
        mark = next((mark for mark in reversed(opened) if mark.count <= count), None)
        if mark is None:
            raise ValueError(
                f"load_state_dict: example {count} of {self._source.name} lay in the buffer, but the state "
                f"can only begin at example {opened[0].count}; restore an earlier state, or begin anew"
            )
        return mark

    def _read_again(self, end: int, wanted: set[int]) -> int:
        """Iterate up to a count, keeping what is wanted; how many examples that was."""
        reread = 0
        while self._count < end:
            following = self._next()
            if following is None:
                raise ValueError(
                    f"restoring: {self._source.name} ended at example {self._count}, before {end}; it "
                    "must give the same examples again"
                )
            number, example = following
            serial = self._serial(number)
            if not self.witnesses.is_as_before(serial, example, self._source.rows(self._iterator)):
                self._source.check_other(serial, same_rows=self.witnesses.rows_are_same)
            reread += self._preparation.examples_in(example)
            if number in wanted:
                self._again[number] = self._own(example)
        return reread

    def again(self, serials: Serials) -> SequentialClaim:
        counts = self._counts(serials)
        return serials, [self._again.pop(count) for count in counts], counts

    def keep_again(self, owned: Callable[[int], bool]) -> None:
        self._again = {count: one for count, one in self._again.items() if owned(self._serial(count))}

    def go_alone(self) -> None:
        self._preparation.alone = True

    def release(self) -> None:
        if not self._source.seekable or self._source.kept_open or self._reading.locked():
            return
        # Nobody begins to read meanwhile: no thread works. To acquire it without waiting could leave it
        # locked, where an interrupt falls between that and a `try`.
        with self._reading:
            if self._iterator is not None:
                # An abandoned iterator's errors are of no use; if they last, the next read raises.
                with contextlib.suppress(Exception):
                    self._let_go(self._source.position(self._iterator))

    def close(self) -> None:
        # Without the lock: the garbage collector may come to a loader in a thread that holds it.
        self._let_go()
        self._source.close()

    def _let_go(self, position: Position | None = None) -> None:
        """Close the iterator, to be opened again at a position if one is given."""
        iterator, self._iterator, self._released = self._iterator, None, position
        self._source.let_go(iterator)
