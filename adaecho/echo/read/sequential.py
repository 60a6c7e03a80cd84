"""Fresh examples from a source that can only be iterated.

After a resume it is read again from some place on. Where its order, or what it draws, follows no seed, other
examples come then: some would be used too often, others never. So fingerprints of a few examples, the
witnesses, lie in a state, and are compared. What is said of examples goes for whole batches, where the source
gives these.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adaecho.echo.memory.pytree import children
from adaecho.echo.order.stage import FreshBlock
from adaecho.echo.read.chunks import Preparation, Reader, ReaderState, Serials
from adaecho.echo.read.iterables import IterableSource, Position, decoded, encoded

_MOST = 1024  # marks
_SPACING = 16  # times as much is read again anyway as on the way from a mark to the oldest needed example
_WITNESSED = 16  # of so many examples one is; of batches each
_ENDED = object()
_KEPT = 1024  # many more than are read ahead of the consumer
_FIRST = 32  # of a pass, each a witness: few have been read when an early state is made
_IN_A_STATE = 32  # buffers that shuffle a little give the same example at some places
_LEAVES, _ELEMENTS = 64, 4096  # of an example, of an array, at most
_SIZED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element

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
        own = isinstance(self.position, dict)
        position = encoded(self.position["own"]) if own else list(self.position)  # type: ignore[call-overload]
        return [self.number, self.first, self.count, position]

    @staticmethod
    def of_plain(number: int, first: int, count: int, position: Any) -> "Mark":
        """Return the mark that ``plain`` stored."""
        own = isinstance(position, str)
        return Mark(number, first, count, {"own": decoded(position)} if own else position)


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


Witness = tuple[int, int, int]
"""The serial of an example, its fingerprint, and a digest of the rows of its pass up to it, where known."""


class ReplayFingerprints:
    """Some of the examples that a reader has read. One thread adds them while another saves a state.

    Args:
        spacing: one of so many examples is a witness.
        world: ranks that share out serials.

    Attributes:
        rows_are_same: of the example compared last.
    """

    def __init__(self, spacing: int = 1, world: int = 1) -> None:
        self._spacing, self._world = spacing, world
        self._seen: list[Witness] = []  # never changed: another takes its place
        self._expected: dict[int, Witness] = {}
        self.rows_are_same = True

    def clear(self) -> None:
        """Forget all."""
        self._seen = []

    def add(self, serial: int, index: int, example: Any, rows: int = 0, *, always: bool = False) -> None:
        """Remember an example, if it is to be a witness; its index in its pass is counted over all ranks."""
        if always or index // self._world < _FIRST or not serial // self._world % self._spacing:
            self._seen = [*self._seen[1 - _KEPT :], (serial, fingerprint(example), rows)]

    def before(self, serial: int) -> list[int]:
        """Return the last few before a serial, flat: the same however far the reader has read ahead."""
        last = [witness for witness in self._seen if witness[0] < serial][-_IN_A_STATE:]
        return [number for witness in last for number in witness]

    def expect(self, flat: list[int]) -> None:
        """Expect the fingerprints of a state from the examples that are read again."""
        numbers = iter(map(int, flat))
        self._seen = list(zip(numbers, numbers, numbers, strict=True))
        self._expected = {witness[0]: witness for witness in self._seen}

    def is_as_before(self, serial: int, example: Any, rows: int = 0) -> bool:
        """Whether an example that is read again is what it was, and of the same rows, as far as is known."""
        expected = self._expected.pop(serial, None)
        self.rows_are_same = expected is None or expected[2] == rows
        return expected is None or (self.rows_are_same and expected[1] == fingerprint(example))


def fingerprint(example: Any) -> int:
    """56 bits of what an example is made of, of a large array some elements; alike in every process."""
    digest = hashlib.blake2b(digest_size=7)
    for leaf in islice(_leaves(example), _LEAVES):
        digest.update(
            f"{type(leaf).__name__}{getattr(leaf, 'dtype', '')}{getattr(leaf, 'shape', '')}".encode()
        )
        digest.update(_content(leaf))
    return int.from_bytes(digest.digest(), "big")


def _leaves(value: Any) -> Iterator[Any]:
    parts = children(value)
    if not parts and hasattr(value, "__dict__") and not isinstance(value, np.ndarray | torch.Tensor | type):
        parts = list(vars(value).items())
    if not parts or hasattr(value, "__array_interface__"):  # Pillow's images tell what they hold
        yield value
        return
    for name, part in parts:
        yield name
        yield from _leaves(part)


def _content(value: Any) -> bytes:
    """What a leaf holds; nothing of what doesn't show it."""
    if isinstance(value, str | int | float | np.generic):
        return str(value).encode()
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        plain = plain.view(_SIZED.get(plain.element_size(), plain.dtype))  # nothing can be taken of uint16
        chosen = torch.from_numpy(_places(plain.numel())).to(plain.device)
        value = plain.take(chosen).cpu().numpy()  # [_ELEMENTS] or fewer
    elif isinstance(value, bytes | bytearray | memoryview):
        value = np.frombuffer(value, np.uint8)
    elif hasattr(value, "__array_interface__"):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return b""
    array = value.flat[_places(value.size)]  # [_ELEMENTS] or fewer
    return str(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()


@functools.lru_cache(maxsize=64)
def _places(size: int) -> NDArray[np.int64]:
    """Which elements of an array to look at, rising: all of few, else random ones, always the same.

    Evenly spaced ones may all be padding.
    """
    if size <= _ELEMENTS:
        return np.arange(size)
    return np.sort(np.random.Generator(np.random.PCG64(size)).integers(size, size=_ELEMENTS))


class SequentialReader(Reader):
    """Reads a source that can only be iterated.

    Every rank passes over the examples of the others, unless the source gives each rank its own
    (``set_share``). A source that can begin in the middle of a pass is not read from the beginning again.
    What is iterated over is *counted*; each example of this rank has a count, a local number and a serial.

    Args:
        source: gives an iterator for each pass.
        preparation: what happens to examples before the echo.
        rank, world: this rank's serials are congruent to ``rank`` modulo ``world``.
    """

    reads_again = False

    def __init__(
        self,
        source: IterableSource,
        preparation: Preparation,
        *,
        rank: int,
        world: int,
    ) -> None:
        self._source, self._preparation = source, preparation
        self._rank, self._world = rank, world
        # Of the examples iterated over, every so many is this rank's, from this one on.
        self._kept, self._every = (0, 1) if source.set_share(rank, world) else (rank, world)
        self._own: Callable[[Any], Any] = preparation.own if preparation.length is None else source.own_batch
        self._again: dict[int, Any] = {}  # examples that were read again, by count
        self._iterator: Iterator[Any] | None = None
        self._count = 0
        self._marks: list[Mark] = []  # never changed: another takes its place
        self._witnesses = ReplayFingerprints(_WITNESSED if preparation.stacked else 1, world)
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
        self._marks = []
        self._witnesses.clear()
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
                f"source: pass {number} over {self._source.name} is empty. If it can be iterated only once, "
                "use epochs=1 or pass a function that returns a new iterator"
            )
        self._open(number + 1)
        self._source.within = self._iterator is not None

    # Reading

    def claim(self, count: int) -> SequentialClaim | None:
        claimed: list[tuple[int, Any, int]] = []
        source, marked = self._source, False
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
                self._witnesses.add(serial, index_in_pass, example, source.rows(self._iterator), always=first)
                # Before the source goes on, which may put its next example into the same memory.
                claimed.append((serial, self._own(example), index_in_pass))
        if not claimed:
            return None
        serials, examples, indices_in_pass = zip(*claimed, strict=True)
        return np.array(serials, dtype=np.int64), list(examples), indices_in_pass

    def work(self, claim: SequentialClaim) -> FreshBlock:
        serials, raw, indices_in_pass = claim
        # Passes that may differ in their order don't tell which example it is.
        rows = None if self._source.reordered else indices_in_pass
        return self._preparation.fresh(
            serials, int(serials[-1]) // self._world + 1, raw.__getitem__,
            lambda position: self._source.origin(int(serials[position])), self._world, rows,
        )  # fmt: skip

    # Where it stands

    def state(self, oldest_serial: int, index: int) -> ReaderState:
        """The last mark before the oldest, the passes opened from there to the next example; witnesses."""
        source = self._source
        # Within a pass the last example is read again, to see that it comes again; but what `iterate_from`
        # begins has to be as it was.
        after = self._after(index) - (source.knows_rows or not source.seekable)
        (oldest,) = self._counts(np.array([oldest_serial]))
        marks = needed_marks(self._marks, oldest, index * self._every + self._kept, after)
        return [mark.plain() for mark in marks], self._witnesses.before(index * self._world)

    def resume(
        self, index: int, iteration: int, passes: int | None, needed: Serials, state: ReaderState
    ) -> int:
        """Iterate again from the last mark before the oldest needed example up to the position."""
        opened = [Mark.of_plain(*plain) for plain in state[0]]
        self._witnesses.expect(state[1])
        self._marks, self._again = [], {}
        if not opened:  # nothing has been read yet
            self._let_go()
            self._count = 0
            return 0
        end = max(self._after(index), opened[-1].first)
        wanted = set(self._counts(needed))
        oldest = min([*wanted, end])
        mark = next(mark for mark in reversed(opened) if mark.count <= oldest)
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
            if not self._witnesses.is_as_before(serial, example, self._source.rows(self._iterator)):
                self._source.check_other(serial, same_rows=self._witnesses.rows_are_same)
            reread += self._preparation.examples_in(example)
            if number in wanted:
                self._again[number] = self._own(example)
        return reread

    def again(self, serials: Serials) -> SequentialClaim:
        counts = self._counts(serials)
        return serials, [self._again.pop(count) for count in counts], counts

    def go_alone(self) -> None:
        self._preparation.alone = True

    def close(self) -> None:
        # Without the lock: the garbage collector may come to a loader in a thread that holds it.
        self._let_go()
        self._source.close()

    def _let_go(self) -> None:
        iterator, self._iterator = self._iterator, None
        self._source.let_go(iterator)
