"""The reader of iterables, which yield examples only in their own order."""

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

_MOST = 1024  # maximum number of marks
_SPACING = 16  # marks are close enough that a resume reads at most 1/16 more examples than it needs
_WITNESSED = 16  # one in this many examples gets a fingerprint; every whole batch gets one
_ENDED = object()
_KEPT = 1024  # number of fingerprints to keep, far more than there are examples read ahead
_FIRST = 32  # this many examples at the start of a pass all get a fingerprint, so early states have some
_IN_A_STATE = 32  # fingerprints in a state; one could match by chance if a source shuffles only a little
_LEAVES, _ELEMENTS = 64, 4096  # a fingerprint covers at most this many leaves, and elements of each array
_SIZED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # types by bytes per element

SequentialClaim = tuple[Serials, list[Any], Sequence[int]]
"""n examples to prepare: their serial numbers [n], the examples, and the index of each in its epoch."""


@dataclass(frozen=True)
class Mark:
    """A point in an iterable at which reading can restart.

    Attributes:
        epoch: number of the epoch, counted from 0.
        epoch_start: number of examples that the iterable yielded before this epoch.
        count: number of examples that the iterable yielded before this point.
        position: position from which the source can continue; empty for the start of an epoch.
    """

    epoch: int
    epoch_start: int
    count: int
    position: Position = ()

    def plain(self) -> list[Any]:
        """Convert the mark to numbers and strings, to store it in a state."""
        own = isinstance(self.position, dict)
        position = encoded(self.position["own"]) if own else list(self.position)  # type: ignore[call-overload]
        return [self.epoch, self.epoch_start, self.count, position]

    @staticmethod
    def of_plain(epoch: int, epoch_start: int, count: int, position: Any) -> "Mark":
        """Restore a mark from the values that ``plain`` returned."""
        own = isinstance(position, str)
        return Mark(epoch, epoch_start, count, {"own": decoded(position)} if own else position)


def thinned(marks: list[Mark]) -> list[Mark]:
    """Remove some older marks if there are too many, but keep the first and the last."""
    if len(marks) <= _MOST:
        return marks
    # The further a gap is from the last mark, the larger it may be, up to a fixed fraction of the distance.
    kept = [marks[-1]]
    for mark, before in zip(marks[-2:0:-1], marks[-3::-1], strict=True):
        newer = kept[-1].count
        if (newer - before.count) * _SPACING > marks[-1].count - newer:
            kept.append(mark)
    return [marks[0], *reversed(kept)]


def needed_marks(marks: list[Mark], oldest: int, following: int, after: int) -> list[Mark]:
    """Return the restart points (marks) that a state must contain, so that an iterable can be resumed."""
    # The arguments are counts (see ``SequentialReader``): ``oldest`` of the oldest example in the shuffle
    # buffer, ``following`` of this rank's next example, ``after`` of the first example to read if the buffer
    # is empty. A reader that is ahead may already have opened an epoch after ``following``.
    opened = [mark for mark in marks if mark.epoch_start <= following]
    if not opened:
        return []
    oldest = min(oldest, max(after, opened[-1].epoch_start))
    # A resume restarts at ``first``. It also needs the starts of the epochs that were opened later.
    first, *later = opened[max(sum(mark.count <= oldest for mark in opened) - 1, 0) :]
    return [first, *(mark for mark in later if mark.count == mark.epoch_start)]


class ReplayFingerprints:
    """Digests of some examples, to detect that an iterable yields different data after a resume."""

    def __init__(self, spacing: int = 1, world: int = 1) -> None:
        # The first examples of an epoch all get a digest. Of the others, one in ``spacing`` gets one.
        self._spacing, self._world = spacing, world
        # Pairs of a serial number and a fingerprint. Never changed in place, because another thread may read
        # them.
        self._seen: list[tuple[int, int]] = []
        self._expected: dict[int, int] = {}

    def clear(self) -> None:
        """Remove all digests."""
        self._seen = []

    def add(self, serial: int, index: int, example: Any, digest: int = 0, *, always: bool = False) -> None:
        """Store a digest of an example if a resume checks this example."""
        # ``serial`` counts the examples of all ranks over all epochs, and ``index`` those of this epoch. A
        # ``digest`` of 0 means that the digest is computed from the example.
        if always or index // self._world < _FIRST or not serial // self._world % self._spacing:
            self._seen = [*self._seen[1 - _KEPT :], (serial, digest or fingerprint(example))]

    def before(self, serial: int) -> list[int]:
        """Return the last few digests of examples before ``serial``: [serial, digest, ...]."""
        # Examples read ahead are left out, so that a state does not depend on how far the loader reads ahead.
        last = [witness for witness in self._seen if witness[0] < serial][-_IN_A_STATE:]
        return [number for witness in last for number in witness]

    def expect(self, flat: list[int]) -> None:
        """Load the digests of a saved state, for ``is_as_before``."""
        numbers = iter(map(int, flat))
        self._seen = list(zip(numbers, numbers, strict=True))
        self._expected = dict(self._seen)

    def is_as_before(self, serial: int, example: Any, digest: int = 0) -> bool:
        """Return whether an example matches its digest in the saved state; True if there is none."""
        expected = self._expected.pop(serial, None)
        return expected is None or expected == (digest or fingerprint(example))


def fingerprint(example: Any) -> int:
    """Return a 56-bit digest of an example. Large arrays are sampled."""
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
    if not parts or hasattr(value, "__array_interface__"):  # an object such as an image of Pillow
        yield value
        return
    for name, part in parts:
        yield name
        yield from _leaves(part)


def _content(value: Any) -> bytes:
    """Return the bytes to digest: a sample of a large array, nothing for an unknown type."""
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
    """Return ascending indices of the elements to digest: all, or a fixed random sample."""
    if size <= _ELEMENTS:
        return np.arange(size)
    # Evenly spaced elements might all lie in the padding.
    return np.sort(np.random.Generator(np.random.PCG64(size)).integers(size, size=_ELEMENTS))


class SequentialReader:
    """A reader of the examples of one rank from an iterable, with the methods of ``RandomReader``.

    If the iterable does not split its examples among the ranks, this rank keeps every ``world``-th example.
    An example has three indices, counted over all epochs:

    * The *count* is the index among the examples that the iterable yields.
    * The *local number* is the index among the examples that this rank keeps.
    * The *serial number* is the index among the examples of all ranks: ``local number * world + rank``.
    """

    reads_again = False  # because ``resume`` has already read the examples in the shuffle buffer

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
        # This rank keeps the examples whose counts are congruent to _kept modulo _every.
        self._kept, self._every = (0, 1) if source.set_share(rank, world) else (rank, world)
        self._own: Callable[[Any], Any] = preparation.own if preparation.length is None else source.own_batch
        self._again: dict[int, Any] = {}  # examples that were reread for the buffers, by count
        self._iterator: Iterator[Any] | None = None
        self._count = 0
        self._marks: list[Mark] = []  # never changed in place, because another thread may read it
        self._witnesses = ReplayFingerprints(_WITNESSED if preparation.stacked else 1, world)
        self._pass = 0, 0  # number of the current pass, and the count at which it began
        self._taken_up = False  # whether the current pass was opened at a position instead of its start
        self._last_pass: int | None = None  # number of the pass at which the iteration ends
        # The start of the next iteration, if a restored state lies at the end of an iteration.
        self._following: Mark | None = None

    # Conversions between counts, local numbers and serial numbers

    def _serial(self, count: int) -> int:
        return count * (self._world // self._every) + self._rank - self._kept

    def _counts(self, serials: Serials) -> list[int]:
        counts: list[int] = (serials // self._world * self._every + self._kept).tolist()
        return counts

    def _after(self, index: int) -> int:
        """Return how many examples the iterable yields until this rank has kept ``index`` examples."""
        return (index - 1) * self._every + self._kept + 1 if index else 0

    # Passes

    def begin(self, iteration: int, passes: int | None, abandoned_at: int | None = None) -> int:
        self._marks = []
        self._witnesses.clear()
        if abandoned_at is not None:
            # All ranks must agree on the count to shard the next pass identically, so it is a multiple of the
            # number of ranks.
            self._count = abandoned_at * self._every
        self._last_pass = None if passes is None else iteration * passes
        number = 0 if passes is None else (iteration - 1) * passes
        following, self._following = self._following, None
        begins = following is not None and following.epoch == number
        self._open(number, position=following.position if following and begins else ())
        return max(0, math.ceil((self._count - self._kept) / self._every))

    def _open(self, number: int, start: int | None = None, position: Position = ()) -> None:
        """Start to read epoch ``number``, unless the iteration ends before this epoch."""
        # ``start`` is the count at which the epoch began; None if it begins now. ``position`` is where to
        # start within the epoch, or empty for the start of the epoch.
        over = self._last_pass is not None and number >= self._last_pass
        if over and not position:
            position = self._source.position_after_pass()
        self._let_go()
        self._pass, self._taken_up = (number, self._count if start is None else start), bool(position)
        if not over:
            self._iterator = self._source.open_pass(number, position)
            if not position and not self._source.seekable:
                position = self._source.position(self._iterator)
        self._mark(position)  # a resume can restart here

    def _mark(self, position: Position) -> None:
        self._marks = thinned([*self._marks, Mark(*self._pass, self._count, position)])

    def _next(self) -> tuple[int, Any] | None:
        """Return the index and value of the iterable's next example, for any rank; None at the end."""
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
        """Begin the next epoch; raise ValueError if the iterable yielded no examples."""
        self._source.within = False
        number, first = self._pass
        length = self._count - first
        if not length and self._taken_up:  # the position was at the end of the previous pass
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
                # The first example after a mark always gets a fingerprint, because it may be the only one
                # that a resume reads again.
                digest = source.order_digest(self._iterator)
                self._witnesses.add(serial, index_in_pass, example, digest, always=marked and not claimed)
                # The example is copied now, because the source may put its next one into the same memory.
                claimed.append((serial, self._own(example), index_in_pass))
        if not claimed:
            return None
        serials, examples, indices_in_pass = zip(*claimed, strict=True)
        return np.array(serials, dtype=np.int64), list(examples), indices_in_pass

    def work(self, claim: SequentialClaim) -> FreshBlock:
        serials, raw, indices_in_pass = claim
        # The index in a pass identifies an example only if all passes have the same order.
        rows = None if self._source.reordered else indices_in_pass
        return self._preparation.fresh(
            serials, int(serials[-1]) // self._world + 1, raw.__getitem__,
            lambda position: self._source.origin(int(serials[position])), self._world, rows,
        )  # fmt: skip

    # States

    def state(self, oldest_serial: int, index: int) -> ReaderState:
        """Return the values from which ``resume`` can later continue at this rank's example ``index``."""
        # These are marks, at which reading can restart, and digests, which reveal changed data. Reading must
        # restart before the oldest example in the shuffle buffer, which has the number ``oldest_serial``.
        source = self._source
        # The last example is also reread, so that a fingerprint can be compared, unless ``iterate_from``
        # continues after it.
        after = self._after(index) - (source.has_order_digest or not source.seekable)
        (oldest,) = self._counts(np.array([oldest_serial]))
        marks = needed_marks(self._marks, oldest, index * self._every + self._kept, after)
        return [mark.plain() for mark in marks], self._witnesses.before(index * self._world)

    def resume(
        self, index: int, iteration: int, passes: int | None, needed: Serials, state: ReaderState
    ) -> int:
        """Continue from a saved state, and return how many examples were reread."""
        # ``needed`` contains the serial numbers of the examples in the buffers. Reading restarts before the
        # oldest of these and ends before this rank's example ``index``. The result also counts examples of
        # other ranks.
        opened = [Mark.of_plain(*plain) for plain in state[0]]
        self._witnesses.expect(state[1])
        self._marks, self._again = [], {}
        if not opened:  # nothing has been read yet
            self._let_go()
            self._count = 0
            return 0
        end = max(self._after(index), opened[-1].epoch_start)
        wanted = set(self._counts(needed))
        oldest = min([*wanted, end])
        mark = next(mark for mark in reversed(opened) if mark.count <= oldest)
        if not mark.position:
            self._source.check_restart()
        self._count = mark.count
        self._last_pass = None if passes is None else iteration * passes
        self._open(mark.epoch, mark.epoch_start, mark.position)
        self._source.within = True
        reread = self._read_again(end, wanted)
        if self._pass[0] < opened[-1].epoch:
            self._open(opened[-1].epoch, position=opened[-1].position)
        self._following = opened[-1] if self._iterator is None else None
        return reread

    def _read_again(self, end: int, wanted: set[int]) -> int:
        """Read the iterable up to index ``end``, keep examples in ``wanted``, and return the number read."""
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
            if not self._witnesses.is_as_before(serial, example, self._source.order_digest(self._iterator)):
                raise self._source.other_example(serial)
            reread += self._preparation.examples_in(example)
            if number in wanted:
                self._again[number] = self._own(example)
        return reread

    def again(self, serials: Serials) -> SequentialClaim:
        counts = self._counts(serials)
        return serials, [self._again.pop(count) for count in counts], counts

    def go_alone(self) -> None:
        self._preparation.in_worker = True

    def close(self) -> None:
        # This uses no lock, because the garbage collector may call it in a thread that holds the lock.
        self._let_go()
        self._source.close()

    def _let_go(self) -> None:
        iterator, self._iterator = self._iterator, None
        self._source.let_go(iterator)
