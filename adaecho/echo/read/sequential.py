"""Fresh examples from an iterable.

A resume reads the iterable again from a mark on. If its order or its random numbers follow no seed, other
examples come: some would be used too often, others never. A state therefore holds fingerprints of a few
examples, and the resume compares them. With ``batch_size=None`` an example is a whole batch.
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
from adaecho.echo.read.chunks import Preparation, ReaderState, Serials
from adaecho.echo.read.iterables import IterableSource, Position, decoded, encoded

_MOST = 1024  # largest number of marks
_SPACING = 16  # reading from a mark to the oldest needed example adds at most 1/16 to a resume
_WITNESSED = 16  # examples per fingerprint; every whole batch has one
_ENDED = object()
_KEPT = 1024  # fingerprints, many more than examples read ahead
_FIRST = 32  # the first examples of a pass all get a fingerprint, for early states
_IN_A_STATE = 32  # several, because a source that shuffles a little may repeat some by chance
_LEAVES, _ELEMENTS = 64, 4096  # largest number of leaves of an example, and of elements of an array
_SIZED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element

SequentialClaim = tuple[Serials, list[Any], Sequence[int]]
"""Serials [n], examples, and the index of each in its pass."""


@dataclass(frozen=True)
class Mark:
    """A point at which reading can restart.

    Attributes:
        number, first: number of the pass, and the count at which it began.
        count: number of examples before it, over all passes.
        position: position for the source; empty for the start of a pass without one.
    """

    number: int
    first: int
    count: int
    position: Position = ()

    def plain(self) -> list[Any]:
        """Return the mark as plain values."""
        own = isinstance(self.position, dict)
        position = encoded(self.position["own"]) if own else list(self.position)  # type: ignore[call-overload]
        return [self.number, self.first, self.count, position]

    @staticmethod
    def of_plain(number: int, first: int, count: int, position: Any) -> "Mark":
        """Return the mark that ``plain`` stored."""
        own = isinstance(position, str)
        return Mark(number, first, count, {"own": decoded(position)} if own else position)


def thinned(marks: list[Mark]) -> list[Mark]:
    """Thin out many marks: keep the first, the last, and fewer the older they are.

    The distance between two marks stays a fraction of the distance to the last one.
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
    """Return the last mark before an example, and the starts of later passes up to the next example.

    Args:
        marks: marks of an iteration, ascending; empty before its first pass.
        oldest: count of the oldest example needed.
        following: count of the next example to read.
        after: count just after the last example read; one less if that example is read again.
    """
    opened = [mark for mark in marks if mark.first <= following]
    if not opened:
        return []
    oldest = min(oldest, max(after, opened[-1].first))
    first, *later = opened[max(sum(mark.count <= oldest for mark in opened) - 1, 0) :]
    return [first, *(mark for mark in later if mark.count == mark.first)]


Witness = tuple[int, int, int]
"""Serial and fingerprint of an example, and a digest of the rows of its pass up to it, or 0."""


class ReplayFingerprints:
    """Fingerprints of some examples. One thread adds them while another saves a state.

    Args:
        spacing: examples per fingerprint.
        world: number of ranks.

    Attributes:
        rows_are_same: whether the example compared last had the same rows.
    """

    def __init__(self, spacing: int = 1, world: int = 1) -> None:
        self._spacing, self._world = spacing, world
        self._seen: list[Witness] = []  # replaced, never changed in place
        self._expected: dict[int, Witness] = {}
        self.rows_are_same = True

    def clear(self) -> None:
        """Remove all fingerprints."""
        self._seen = []

    def add(self, serial: int, index: int, example: Any, rows: int = 0, *, always: bool = False) -> None:
        """Add the fingerprint of an example if it is selected; ``index`` counts over all ranks."""
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
        """Whether an example that is read again matches its fingerprint, if there is one."""
        expected = self._expected.pop(serial, None)
        self.rows_are_same = expected is None or expected[2] == rows
        return expected is None or (self.rows_are_same and expected[1] == fingerprint(example))


def fingerprint(example: Any) -> int:
    """Return a 56-bit digest of an example, of some elements for a large array."""
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
    if not parts or hasattr(value, "__array_interface__"):  # e.g. images of Pillow
        yield value
        return
    for name, part in parts:
        yield name
        yield from _leaves(part)


def _content(value: Any) -> bytes:
    """Return the content of a leaf; empty for opaque objects."""
    if isinstance(value, str | int | float | np.generic):
        return str(value).encode()
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        plain = plain.view(_SIZED.get(plain.element_size(), plain.dtype))  # torch.take lacks uint16
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
    """Return the indices of the elements to digest, ascending: all, or a fixed random sample.

    Evenly spaced elements might all be padding.
    """
    if size <= _ELEMENTS:
        return np.arange(size)
    return np.sort(np.random.Generator(np.random.PCG64(size)).integers(size, size=_ELEMENTS))


class SequentialReader:
    """Reads an iterable; the methods are those of ``RandomReader``.

    Each rank skips the examples of the others, unless the source shards itself (``set_share``). The *count*
    of an example is its index over all ranks and passes. Each example of this rank has a count, a local
    number and a serial.

    Args:
        source: the iterable.
        preparation: steps before the echo.
        rank, world: serials of this rank are congruent to ``rank`` modulo ``world``.
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
        # This rank reads the counts congruent to the first modulo the second.
        self._kept, self._every = (0, 1) if source.set_share(rank, world) else (rank, world)
        self._own: Callable[[Any], Any] = preparation.own if preparation.length is None else source.own_batch
        self._again: dict[int, Any] = {}  # examples read again, by count
        self._iterator: Iterator[Any] | None = None
        self._count = 0
        self._marks: list[Mark] = []  # replaced, never changed in place
        self._witnesses = ReplayFingerprints(_WITNESSED if preparation.stacked else 1, world)
        self._pass = 0, 0  # its number, and the count at which it began
        self._taken_up = False  # whether the pass was opened at a position
        self._last_pass: int | None = None
        self._following: Mark | None = None  # the start of the iteration after a restored state

    # Counts, local numbers, serials

    def _serial(self, count: int) -> int:
        return count * (self._world // self._every) + self._rank - self._kept

    def _counts(self, serials: Serials) -> list[int]:
        counts: list[int] = (serials // self._world * self._every + self._kept).tolist()
        return counts

    def _after(self, index: int) -> int:
        """Return the count just after the last example before a local number."""
        return (index - 1) * self._every + self._kept + 1 if index else 0

    # Passes

    def begin(self, iteration: int, passes: int | None, abandoned_at: int | None = None) -> int:
        self._marks = []
        self._witnesses.clear()
        if abandoned_at is not None:
            # A multiple of the number of ranks, so that all agree on the sharding of the next pass.
            self._count = abandoned_at * self._every
        self._last_pass = None if passes is None else iteration * passes
        number = 0 if passes is None else (iteration - 1) * passes
        following, self._following = self._following, None
        begins = following is not None and following.number == number
        self._open(number, position=following.position if following and begins else ())
        return max(0, math.ceil((self._count - self._kept) / self._every))

    def _open(self, number: int, first: int | None = None, position: Position = ()) -> None:
        """Open a pass unless the iteration has ended."""
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
        """Return the next example of any rank with its count; None at the end of the iteration."""
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
        """Open the next pass."""
        self._source.within = False
        number, first = self._pass
        length = self._count - first
        if not length and self._taken_up:  # the position was the end of the pass
            self._open(number)
            return
        if not length:
            raise ValueError(
                f"source: pass {number} over {self._source.name} is empty. If the source can be iterated "
                "only once, use epochs=1, or pass a function that returns a new iterator"
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
                # Always the first after a mark, which may be the only example that is read again.
                first = marked and not claimed
                self._witnesses.add(serial, index_in_pass, example, source.rows(self._iterator), always=first)
                # Copy now: the source may put its next example into the same memory.
                claimed.append((serial, self._own(example), index_in_pass))
        if not claimed:
            return None
        serials, examples, indices_in_pass = zip(*claimed, strict=True)
        return np.array(serials, dtype=np.int64), list(examples), indices_in_pass

    def work(self, claim: SequentialClaim) -> FreshBlock:
        serials, raw, indices_in_pass = claim
        # The index identifies an example only if all passes have the same order.
        rows = None if self._source.reordered else indices_in_pass
        return self._preparation.fresh(
            serials, int(serials[-1]) // self._world + 1, raw.__getitem__,
            lambda position: self._source.origin(int(serials[position])), self._world, rows,
        )  # fmt: skip

    # States

    def state(self, oldest_serial: int, index: int) -> ReaderState:
        """Return the marks from the last before the oldest example on, and fingerprints."""
        source = self._source
        # Read the last example again to compare it, unless ``iterate_from`` must continue after it.
        after = self._after(index) - (source.knows_rows or not source.seekable)
        (oldest,) = self._counts(np.array([oldest_serial]))
        marks = needed_marks(self._marks, oldest, index * self._every + self._kept, after)
        return [mark.plain() for mark in marks], self._witnesses.before(index * self._world)

    def resume(
        self, index: int, iteration: int, passes: int | None, needed: Serials, state: ReaderState
    ) -> int:
        """Iterate again from the last mark before the oldest needed example up to the cursor."""
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
        """Iterate up to a count and keep the wanted examples; return the number of examples read."""
        reread = 0
        while self._count < end:
            following = self._next()
            if following is None:
                raise ValueError(
                    f"load_state_dict: {self._source.name} ended at example {self._count}, before {end}; the "
                    "source must yield the same examples again"
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
        # Without a lock: the garbage collector may run in a thread that holds it.
        self._let_go()
        self._source.close()

    def _let_go(self) -> None:
        iterator, self._iterator = self._iterator, None
        self._source.let_go(iterator)
