"""The echo stage: repeat each fresh thing, shuffle the repeats in a fixed-size buffer.

Everything is planned on identities (see ``keys``); the things themselves lie in a pool and move once. The
stage works ahead of the consumer, so it keeps a record of what it has put out and can tell its state as it
was after any output not yet forgotten.
"""

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adaecho.echo import keys
from adaecho.echo.examples import Stack, duplicate, num_bytes
from adaecho.echo.pool import Examples, ListPool, Pool, ResidentPool, StackPool

# Purposes of the stage's own draws, out of the way of those an augmentation numbers from 0.
REPEATS = 1 << 20
SLOT = REPEATS + 1
DRAIN = REPEATS + 2

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass
class Fresh:
    """A run of fresh things, good ones only, and how far the upstream position has moved past them.

    Attributes:
        serials: global serial numbers, rising, shape [n].
        things: what the pool takes: a stack or list of n, or row numbers of a resident source.
        next_index: local number of the first fresh thing after these.
        bad: (local number, origin, exception) of each bad one among them.
    """

    serials: NDArray[np.int64]
    things: Any
    next_index: int
    bad: list[tuple[int, str, Exception]] = field(default_factory=list)
    world: int = 1

    def split(self, index: int) -> tuple["Fresh", "Fresh"]:
        """What lies before a local number, and the rest."""
        cut = int(np.searchsorted(self.serials // self.world, index))
        return (
            Fresh(self.serials[:cut], self.things[:cut], index, [b for b in self.bad if b[0] < index]),
            Fresh(
                self.serials[cut:],
                self.things[cut:],
                self.next_index,
                [b for b in self.bad if b[0] >= index],
                self.world,
            ),
        )


class TakeFresh(Protocol):
    """Upstream of a stage: the next fresh things."""

    def __call__(self, count: int) -> Fresh | None:
        """Up to ``count`` positions further (fewer things where some were bad); None at the end of a pass."""


@dataclass
class Taken:
    """Consecutive outputs of a stage.

    ``items`` left; ``entered`` are the items whose entering pushed them out, with ``remaining`` repeats to
    come, in ``slots``. While a pass drains nothing enters, and these are None.
    """

    start: int
    items: keys.Items
    entered: keys.Items | None
    remaining: NDArray[np.int64] | None
    slots: NDArray[np.int64] | None
    next_indices: NDArray[np.int64]

    @property
    def end(self) -> int:
        return self.start + len(self.items)


@dataclass
class _Tail:
    """Items drawn from upstream that have not entered the buffer yet."""

    items: keys.Items
    rows: NDArray[np.int64]
    remaining: NDArray[np.int64]
    slots: NDArray[np.int64]
    next_indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.items)

    def split(self, count: int) -> tuple["_Tail", "_Tail"]:
        fields = [getattr(self, name) for name in _TAIL_FIELDS]
        return _Tail(*(field[:count] for field in fields)), _Tail(*(field[count:] for field in fields))

    def joined(self, other: "_Tail") -> "_Tail":
        if not len(self):
            return other
        return _Tail(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in _TAIL_FIELDS))


_TAIL_FIELDS = ("items", "rows", "remaining", "slots", "next_indices")


def _no_tail() -> _Tail:
    return _Tail(*(np.empty(0, dtype=np.int64) for _ in _TAIL_FIELDS))


def repeats(seed: int, serials: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    """How often each fresh thing leaves the echo stage: floor or ceil of the factor, right in expectation.

    Paper, section 2: a factor that is not whole is reached by repeating probabilistically, here per item.
    """
    whole = math.floor(factor)
    counts = np.full(len(serials), whole, dtype=np.int64)
    if factor > whole:
        drawn = keys.uniform(keys.item_keys(seed, serials << keys.ECHO_BITS), REPEATS)
        counts += drawn < factor - whole
    return counts


class EchoStage:
    """Repeat, then shuffle.

    The shuffle buffer is a true one: for each item that enters, the one in a uniformly random slot leaves
    and the new item takes its slot. It fills before anything leaves; at the end of a pass it drains in
    random order.

    Args:
        upstream: gives fresh things in serial order.
        seed: of the draws of this stage.
        factor: repeats of each fresh thing on average, at least 1.
        buffer: slots; 0 passes everything on in order.
        rank, world: the serial of local number i is ``i * world + rank``.
        block: items that enter at once, at most.
        pool: where things lie; None chooses by their form when the first arrive.
        lookahead: fresh things to ask for at once, at least; more than 1 only where reading is free.
        check_memory: called with the expected bytes of the buffer before it is reserved.
    """

    def __init__(
        self,
        upstream: TakeFresh,
        *,
        seed: int,
        factor: float,
        buffer: int,
        rank: int = 0,
        world: int = 1,
        block: int = 1024,
        pool: Pool | None = None,
        lookahead: int = 1,
        check_memory: Callable[[int], None] | None = None,
    ) -> None:
        self.factor = self._first_factor = factor
        # Local number of the first fresh thing under each other factor since, and that factor.
        self.changes: list[tuple[int, float]] = []
        self._new_factor: float | None = None
        self._upstream, self._seed, self._lookahead = upstream, seed, lookahead
        self._rank, self._world, self._block = rank, world, block
        self._pool, self._check_memory = pool, check_memory
        self._size = buffer
        self._items = np.zeros(buffer, dtype=np.int64)
        self._rows = np.zeros(buffer, dtype=np.int32)
        self._filled = 0
        self._tail = _no_tail()
        self._next_index = 0
        self._drain: NDArray[np.int64] | None = None  # slots in the order in which they leave
        self._drained = 0
        self._records: deque[Taken] = deque()
        self._emitted = 0
        self._forgotten = 0
        self._stash: list[tuple[Taken, Examples]] = []
        # Held while the identities change, so that another thread can ask for a state meanwhile.
        self._lock = threading.Lock()
        # A state that no record tells: a pass about to begin, or one that was loaded.
        self._anchor: tuple[int, dict[str, Any]] | None = (0, _state(0, _NOTHING))

    def take(self, count: int) -> list[tuple[Taken, Examples]]:
        """The next ``count`` outputs in order, in parts; fewer only at the end of a pass.

        Where upstream raises, nothing is lost: the next call, for as many, goes on.
        """
        self._drop_forgotten()
        count -= sum(len(taken.items) for taken, _ in self._stash)
        while count > 0:
            part = self._enter(count) if self._drain is None else self._take_drained(count)
            if part is None:
                break
            if len(part[0].items):
                self._stash.append(part)
                count -= len(part[0].items)
        parts, self._stash = self._stash, []
        return parts

    def begin_pass(self, next_index: int) -> None:
        """Start with an empty buffer at an upstream position."""
        self._filled, self._tail, self._drain, self._drained = 0, _no_tail(), None, 0
        if isinstance(self._pool, StackPool | ListPool):
            self._pool = None
        self._next_index = next_index
        self._records.clear()
        self._stash = []
        self._anchor = (self._emitted, _state(next_index, _NOTHING))

    # Entering

    def _enter(self, wanted: int) -> tuple[Taken, Examples] | None:
        space = self._size - self._filled
        entering = self._stream(min(wanted + space, self._block))
        if not len(entering):
            self._begin_drain()
            return self._take_drained(wanted)
        with self._lock:
            taken, rows = self._exchange(entering, space)
        return taken, self._pool_take(taken, rows)

    def _exchange(self, entering: _Tail, space: int) -> tuple[Taken, NDArray[np.int64]]:
        if space:
            stored, entering = entering.split(min(space, len(entering)))
            end = self._filled + len(stored)
            self._items[self._filled : end] = stored.items
            self._rows[self._filled : end] = stored.rows
            self._filled = end
        items, rows = self._swap(entering)
        taken = Taken(
            self._emitted, items, entering.items, entering.remaining, entering.slots, entering.next_indices
        )
        self._record(taken)
        return taken, rows

    def _record(self, taken: Taken) -> None:
        self._emitted = taken.end
        if len(taken.items):
            self._records.append(taken)

    def _pool_take(self, taken: Taken, rows: NDArray[np.int64]) -> Examples:
        if not len(taken.items):
            return []
        assert self._pool is not None
        return self._pool.take(rows)

    def _swap(self, entering: _Tail) -> tuple[keys.Items, NDArray[np.int64]]:
        """Exchange each entering item, in turn, for the one in its slot.

        Several may draw one slot in a block: then each but the first pushes out its predecessor, and the
        last stays. A stable sort by slot finds them (NumPy doesn't promise which of two writes wins).
        """
        if not self._size or not len(entering):
            return entering.items, entering.rows
        slots = entering.slots
        items = self._items[slots]
        rows = self._rows[slots].astype(np.int64)
        # 16-bit keys are sorted by radix.
        order = np.argsort(slots.astype(np.uint16) if self._size <= 1 << 16 else slots, kind="stable")
        in_order = slots[order]
        again = in_order[1:] == in_order[:-1]
        if again.any():
            later, earlier = order[1:][again], order[:-1][again]
            items[later], rows[later] = entering.items[earlier], entering.rows[earlier]
            last = order[np.append(~again, True)]
            slots = slots[last]
            self._items[slots], self._rows[slots] = entering.items[last], entering.rows[last]
        else:
            self._items[slots], self._rows[slots] = entering.items, entering.rows
        return items, rows

    def _stream(self, count: int) -> _Tail:
        """The next ``count`` items of the echoed stream; fewer at its end, none after it."""
        while len(self._tail) < count:
            if self._new_factor is not None:
                self.factor, self._new_factor = self._new_factor, None
                self.changes.append((self._next_index, self.factor))
            fresh = self._upstream(self._fresh_needed(count - len(self._tail)))
            if fresh is None:
                break
            self._next_index = fresh.next_index
            if len(fresh.serials):
                self._tail = self._tail.joined(self._expand(fresh))
        now, self._tail = self._tail.split(count)
        return now

    def repeats_of(self, serials: NDArray[np.int64]) -> int:
        """How often the stage repeats these fresh things, together."""
        return int(repeats(self._seed, serials, self.factor).sum())

    def _fresh_needed(self, items: int) -> int:
        """The fewest fresh things whose repeats make that many items, if none of them is bad."""
        most = math.ceil(items / math.floor(self.factor))
        if self.factor == math.floor(self.factor):
            return max(most, self._lookahead)
        return max(self._fewest(items, most), self._lookahead)

    def _fewest(self, items: int, most: int) -> int:
        first = self._next_index * self._world + self._rank
        serials = first + self._world * np.arange(most, dtype=np.int64)
        produced = np.cumsum(repeats(self._seed, serials, self.factor))
        return int(np.searchsorted(produced, items)) + 1

    def change_factor(self, factor: float) -> None:
        """Repeat fresh things that have not reached the stage yet this often; any thread may ask."""
        self._new_factor = factor

    def factor_at(self, index: int) -> tuple[float, list[tuple[int, float]]]:
        """The factor in force at an upstream position, and the changes up to there."""
        changes = [change for change in self.changes if change[0] <= index]
        return (changes[-1][1] if changes else self._first_factor), changes

    def set_changes(self, changes: list[tuple[int, float]]) -> None:
        """Go back to a history of changes."""
        self.changes, self._new_factor = changes, None
        self.factor = changes[-1][1] if changes else self._first_factor

    def _expand(self, fresh: Fresh) -> _Tail:
        counts = repeats(self._seed, fresh.serials, self.factor)
        rows = self._insert(fresh.things, counts)
        bases = fresh.serials << keys.ECHO_BITS
        if self.factor == 1:
            items, remaining = bases, counts - 1
        else:
            ends = np.cumsum(counts)
            echoes = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
            items = np.repeat(bases, counts) + echoes
            remaining = np.repeat(counts, counts) - 1 - echoes
            rows = np.repeat(rows, counts)
        return self._tail_of(items, rows, remaining)

    def _tail_of(self, items: keys.Items, rows: NDArray[np.int64], remaining: NDArray[np.int64]) -> _Tail:
        size = max(self._size, 1)
        slots = keys.integers(keys.item_keys(self._seed, items), SLOT, 0, size)
        next_indices = (items >> keys.ECHO_BITS) // self._world + 1
        return _Tail(items, rows, remaining, slots, next_indices)

    def _insert(self, things: Any, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._pool is None:
            self._pool = self._new_pool(things)
        elif isinstance(self._pool, StackPool) and not self._pool.fits(things):
            self._pool = self._pool.as_list_pool()
        if isinstance(self._pool, ListPool) and isinstance(things, Stack):
            things = things.examples()
        return self._pool.insert(things, counts)

    def _new_pool(self, things: Any) -> Pool:
        stacked = isinstance(things, Stack)
        if self._check_memory is not None:
            example_bytes = things.example_bytes if stacked else num_bytes(things) // len(things)
            self._check_memory(self._size * example_bytes)
        return StackPool(things, self._size + self._block) if stacked else ListPool()

    def lend(self, things: Any) -> Examples:
        """Things that don't go through the buffer, in the form in which they would leave it."""
        if isinstance(self._pool, ResidentPool):
            return self._pool.take(things)
        return things if isinstance(things, Stack) else [duplicate(thing) for thing in things]

    # The end of a pass

    def _begin_drain(self) -> None:
        drawn = keys.bits(keys.item_keys(self._seed, self._items[: self._filled]), DRAIN)
        with self._lock:
            self._drain, self._drained = np.argsort(drawn, kind="stable"), 0

    def _take_drained(self, count: int) -> tuple[Taken, Examples] | None:
        assert self._drain is not None
        slots = self._drain[self._drained : self._drained + count]
        if not len(slots):
            return None
        next_indices = np.full(len(slots), self._next_index)
        taken = Taken(self._emitted, self._items[slots], None, None, None, next_indices)
        with self._lock:
            self._drained += len(slots)
            self._record(taken)
        return taken, self._pool_take(taken, self._rows[slots].astype(np.int64))

    # State

    def forget(self, output: int) -> None:
        """States before this output won't be asked for any more. Never waits."""
        self._forgotten = output

    def _drop_forgotten(self) -> None:
        with self._lock:
            while self._records and self._records[0].end < self._forgotten:
                self._records.popleft()
            if self._anchor is not None and self._anchor[0] < self._forgotten:
                self._anchor = None

    def state_at(self, output: int) -> dict[str, Any]:
        """The stage as it was when ``output`` things in all had left it: identities only.

        Returns:
            ``next_index`` (upstream position), ``pending_item`` and ``pending_repeats`` (an echo in
            progress), ``buffer`` (items by slot), ``draining``.
        """
        with self._lock:
            return self._state_at(output)

    def _state_at(self, output: int) -> dict[str, Any]:
        if self._anchor is not None and output == self._anchor[0]:
            return self._anchor[1]
        buffer = self._items[: self._filled].copy()
        for record in reversed(self._records):
            if record.end < output:
                break
            offset = output - record.start
            if record.slots is not None and self._size and offset < len(record.items):
                # Of several outputs of one slot the earliest is what the slot held.
                skipped = max(offset, 0)
                slots, first = np.unique(record.slots[skipped:], return_index=True)
                buffer[slots] = record.items[skipped:][first]
            if offset > 0:
                return self._state_in(record, offset, buffer)
        raise ValueError(f"the state after output {output} has been forgotten")

    def _state_in(self, record: Taken, offset: int, buffer: keys.Items) -> dict[str, Any]:
        next_index = int(record.next_indices[offset - 1])
        if record.entered is None or record.remaining is None:
            assert self._drain is not None
            # Drained records follow one another without a gap up to now.
            left = len(self._drain) - self._drained + self._emitted - (record.start + offset)
            return _state(next_index, self._items[self._drain[len(self._drain) - left :]], draining=True)
        remaining = int(record.remaining[offset - 1])
        pending = int(record.entered[offset - 1]) + 1 if remaining else 0
        return _state(next_index, buffer, pending, remaining)

    @staticmethod
    def serials_in(state: dict[str, Any]) -> NDArray[np.int64]:
        """The fresh things that a state holds, rising."""
        return np.unique(np.concatenate([state["buffer"], _pending(state)]) >> keys.ECHO_BITS)

    @property
    def waiting(self) -> list[tuple[Taken, Examples]]:
        """Outputs that nobody has taken yet, because upstream was interrupted."""
        return list(self._stash)

    def held(self, serials: NDArray[np.int64]) -> Examples:
        """The things behind serials that lie in the buffer or are about to enter it; not counted as a use."""
        slots = np.arange(self._filled) if self._drain is None else self._drain[self._drained :]
        known = np.concatenate([self._items[slots], self._tail.items]) >> keys.ECHO_BITS
        rows = np.concatenate([self._rows[slots], self._tail.rows])
        _, places, found = np.intersect1d(known, serials, return_indices=True)
        if len(found) < len(serials):
            raise RuntimeError("a buffered example was lost")
        return self._pool.peek(rows[places].astype(np.int64)) if self._pool is not None else []

    @property
    def emitted(self) -> int:
        """Outputs so far."""
        return self._emitted

    def load(self, state: dict[str, Any], reread: Callable[[NDArray[np.int64]], Any]) -> None:
        """Return to a state, reading again what the buffer held.

        Args:
            state: of ``state_at``.
            reread: fresh things by serial, rising; returns what the pool takes.
        """
        self.begin_pass(state["next_index"])
        self._anchor = (self._emitted, state)
        buffer, pending = state["buffer"], _pending(state)
        held = np.concatenate([buffer, pending])
        if not len(held):
            return
        serials, inverse, counts = np.unique(held >> keys.ECHO_BITS, return_inverse=True, return_counts=True)
        rows = self._insert(reread(serials), counts)[inverse]
        self._filled = len(buffer)
        self._items[: len(buffer)] = buffer
        self._rows[: len(buffer)] = rows[: len(buffer)]
        self._tail = self._tail_of(pending, rows[len(buffer) :], np.arange(len(pending))[::-1])
        if state["draining"]:
            self._drain = np.arange(len(buffer))


def _pending(state: dict[str, Any]) -> keys.Items:
    items: keys.Items = state["pending_item"] + np.arange(state["pending_repeats"], dtype=np.int64)
    return items


def _state(
    next_index: int, buffer: keys.Items, pending: int = 0, remaining: int = 0, draining: bool = False
) -> dict[str, Any]:
    return {
        "next_index": next_index,
        "pending_item": pending,
        "pending_repeats": remaining,
        "buffer": buffer,
        "draining": draining,
    }
