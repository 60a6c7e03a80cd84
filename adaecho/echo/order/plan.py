"""The state of an echo stage after any number of outputs, from identities alone.

All draws are keyed, so that the state after output n follows from where the stage began, the bad things, the
changes of the factor and n. A stage works ahead of its consumer; nothing it has done has to be undone for a
state at the consumer's position: a plan is played forward to it.
"""

from bisect import bisect_left
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.shuffle_buffer import drain_order, slots

_BLOCK = 1 << 13  # items played at once: their arrays stay in the processor's cache
_LEAST_APART = 1 << 15  # outputs between two marks


def state(
    next_index: int,
    buffer: keyed.Items,
    pending_item: int = 0,
    pending_repeats: int = 0,
    draining: bool = False,
) -> dict[str, Any]:
    """A state of a stage, identities only.

    Args:
        next_index: upstream position.
        buffer: items by slot, or in the order in which they will leave.
        pending_item, pending_repeats: of an echo in progress, the next item and how many with it.
        draining: whether the pass has ended.
    """
    return {
        "next_index": next_index,
        "pending_item": pending_item,
        "pending_repeats": pending_repeats,
        "buffer": buffer,
        "draining": draining,
    }


def pending(of: dict[str, Any]) -> keyed.Items:
    """The items of the echo in progress in a state."""
    items: keyed.Items = of["pending_item"] + np.arange(of["pending_repeats"], dtype=np.int64)
    return items


def serials_in(of: dict[str, Any]) -> NDArray[np.int64]:
    """The fresh things that a state holds, rising."""
    return keyed.serials_of(np.concatenate([of["buffer"], pending(of)]))


class Plan:
    """Plays a stage forward, as far as its consumer has come.

    The thread that works ahead calls ``skip``, ``end`` and ``mark``, the consumer ``state_at``; they share
    only what is appended to, so that neither waits for the other.

    Args:
        seed: of the draws of the stage.
        size: slots of its shuffle buffer.
        factor: how often things are repeated, with its changes.
        rank, world: the serial of local number i is ``i * world + rank``.
    """

    def __init__(self, seed: int, size: int, factor: Factor, *, rank: int, world: int) -> None:
        self._seed, self._size, self._factor = seed, size, factor
        self._rank, self._world = rank, world
        # Copying a large buffer for a mark must not cost more than a few numbers for each output between two;
        # a state must not have to play more outputs than a fraction of what it copies.
        self._apart = max(_LEAST_APART, size // 32)
        self._spare: keyed.Items | None = None  # of an earlier mark: fresh memory costs a fault for each page
        self.begin(0, state(0, keyed.NO_ITEMS))

    def begin(self, output: int, at: dict[str, Any]) -> None:
        """Go on from a state that is no consequence of outputs: of a pass about to begin, or a loaded one."""
        self._marks: deque[tuple[int, keyed.Items, int]] = deque()  # outputs, buffer, the last item to enter
        self._last_mark = output
        self._bad: list[int] = []  # local numbers, rising
        self._end: int | None = None
        self._output, self._draining = output, at["draining"]
        self._next_index, self._pending = at["next_index"], (at["pending_item"], at["pending_repeats"])
        held = at["buffer"]
        self._buffer = held.copy() if self._draining else np.zeros(self._size, dtype=np.int64)
        self._buffer[: len(held)] = held
        self._filled, self._drained = len(held), 0

    # What the stage tells as it works ahead

    def skip(self, bad: list[int]) -> None:
        """Things of these local numbers are bad and don't reach the stage."""
        self._bad += bad

    def end(self, index: int) -> None:
        """The pass ends before a local number."""
        self._end = index

    def due(self, output: int) -> bool:
        """Whether the stage has come so far that a mark should be kept."""
        return output - self._last_mark >= self._apart

    def mark(self, output: int, buffer: keyed.Items, last_item: int) -> None:
        """Keep where the stage is, with a full buffer, so that nothing has to be played from further back.

        Args:
            output: outputs so far.
            buffer: the items by slot, which are copied.
            last_item: that has entered it.
        """
        self._last_mark = output
        spare, self._spare = self._spare, None
        copied = np.empty_like(buffer) if spare is None else spare
        copied[:] = buffer
        self._marks.append((output, copied, last_item))

    # Playing forward

    def state_at(self, output: int) -> dict[str, Any]:
        """The state after so many outputs in all, no fewer than were last asked for or forgotten."""
        self.forget(output)
        self.advance(output - self._output)
        return self.state()

    def forget(self, output: int) -> None:
        """Go to the last mark before an output: no state before it will be asked for."""
        while self._marks and self._marks[0][0] <= output:
            # The mark goes last: where an interrupt (Ctrl-C) falls in between, all of this is done again.
            self._output, buffer, last_item = self._marks[0]
            if buffer is not self._buffer:
                self._spare, self._buffer = self._buffer, buffer
            self._filled = self._size
            self._set_entered(last_item)
            self._marks.popleft()

    def state(self) -> dict[str, Any]:
        """The state where the plan stands."""
        buffer = self._buffer[self._drained : self._filled].copy()
        if self._draining:
            return state(self._next_index, buffer, draining=True)
        return state(self._next_index, buffer, *self._pending)

    def advance(self, outputs: int) -> None:
        """Play so many outputs."""
        self._output += outputs
        entering = outputs + self._size - self._filled if outputs and not self._draining else 0
        while entering:
            items = self._next_items(min(entering, _BLOCK))
            if not len(items):
                outputs = entering - (self._size - self._filled)
                self._begin_drain()
                break
            entering -= len(items)
            stored = min(self._size - self._filled, len(items))
            self._buffer[self._filled : self._filled + stored] = items[:stored]
            self._filled += stored
            if self._size and stored < len(items):
                swapped = items[stored:]
                # Items rise as they enter, so that the largest of a slot is the last.
                np.maximum.at(self._buffer, slots(self._seed, swapped, self._size), swapped)
        if self._draining:
            self._drained += outputs

    def _begin_drain(self) -> None:
        assert self._end is not None
        held = self._buffer[: self._filled]
        self._buffer, self._drained = held[drain_order(self._seed, held)], 0
        self._draining, self._next_index, self._pending = True, self._end, (0, 0)

    def _next_items(self, count: int) -> keyed.Items:
        """Up to ``count`` items of one echo in progress, or of things under one factor; none at the end."""
        item, repeats = self._pending
        if repeats:
            count = min(count, repeats)
            self._pending = (item + count, repeats - count) if count < repeats else (0, 0)
            return np.arange(item, item + count, dtype=np.int64)
        serials, factor = self._next_serials(count)
        if not len(serials):
            return keyed.NO_ITEMS
        repeated = self._factor.repeats(serials, factor)
        # The fewest whose repeats make that many.
        needed = int(np.searchsorted(np.cumsum(repeated), count)) + 1
        repeated = repeated[:needed]
        items = keyed.uses(serials[:needed], repeated)[:count]
        self._set_entered(int(items[-1]), int(repeated[-1]))
        return items

    def _next_serials(self, count: int) -> tuple[NDArray[np.int64], float]:
        """Serials of the next good things under one factor, about enough for so many items."""
        start = self._next_index
        while True:
            factor, until = self._factor.span(start)
            stop = min(start + int(count / factor) + 1, until)
            if self._end is not None:
                stop = min(stop, self._end)
            indices = np.arange(start, stop, dtype=np.int64)
            bad = self._bad[bisect_left(self._bad, start) : bisect_left(self._bad, stop)]
            if bad:
                indices = np.setdiff1d(indices, bad, assume_unique=True)
            if len(indices) or stop == self._end:
                return indices * self._world + self._rank, factor
            start = stop

    def _set_entered(self, item: int, repeats: int | None = None) -> None:
        """The last item to have entered the buffer; ``repeats``: of its thing."""
        serial, echo = item >> keyed.ECHO_BITS, item & (keyed.MAX_ECHOES - 1)
        index = serial // self._world
        if repeats is None:
            factor = self._factor.span(index)[0]
            repeats = int(self._factor.repeats(np.array([serial]), factor)[0])
        left = repeats - echo - 1
        self._next_index, self._pending = index + 1, (item + 1, left) if left else (0, 0)
