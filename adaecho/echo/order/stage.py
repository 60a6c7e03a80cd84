"""The echo stage: repeat what comes, shuffle the repeats in a buffer of fixed size (paper, sections 2 and 3).

It is one for examples and for batches. Everything is decided on identities (``order.keyed``); the examples
or batches themselves lie in a pool. All draws are keyed, so that the state after n outputs follows from
where the stage began, the bad examples, the changes of the factor and n. The same stage with a pool of
nothing tells it, however far the stage has worked ahead of its consumer.
"""

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed
from adaecho.echo.order.factor import Factor, PastFactor
from adaecho.echo.order.items import Fresh, Output, Outputs, Rows, StageState, Tail
from adaecho.echo.order.shuffle_buffer import ShuffleBuffer

_PLAYED = 1 << 13  # items played at once: their arrays stay in the processor's cache
_LEAST_APART = 1 << 15  # outputs between two marks

Serials = NDArray[np.int64]


class Pool(Protocol):
    """Where the examples (or batches) behind items lie."""

    def insert(self, examples: Any, repeats: NDArray[np.int64]) -> Rows:
        """Put some in, each of which will leave so many times; the row of each."""

    def clear(self) -> None:
        """Forget all."""


class NoPool:
    """A pool of nothing, for a stage that is to tell identities alone."""

    def insert(self, examples: Any, repeats: NDArray[np.int64]) -> Rows:  # noqa: ARG002 (as Pool)
        return np.zeros(len(repeats), dtype=np.int64)

    def clear(self) -> None:
        pass


class Echo:
    """Repeat, then shuffle.

    Args:
        upstream: gives fresh examples in serial order, up to so many positions further (fewer examples where
            some were bad); None at the end of a pass. Whatever it raises, the stage can be asked again.
        pool: where they lie.
        factor: how often each is repeated.
        seed: of the draws of this stage.
        size: slots of the buffer; 0 passes everything on in order.
        rank, world: the serial of local number i is ``i * world + rank``.
        rows: that the pool may have, 0 for no more than memory holds examples.
        block: items that enter at once while the buffer fills, at most.
        lookahead: fresh examples to ask for at once, at least; more than 1 only where reading is free.

    Attributes:
        emitted: outputs since it began.
        next_index: upstream position, which is ahead of what has entered the buffer.
    """

    def __init__(
        self,
        upstream: Callable[[int], Fresh | None],
        pool: Pool,
        factor: Factor,
        *,
        seed: int,
        size: int,
        rank: int = 0,
        world: int = 1,
        rows: int = 0,
        block: int = 1024,
        lookahead: int = 1,
    ) -> None:
        self.factor = factor
        self._upstream, self._pool = upstream, pool
        self._buffer = ShuffleBuffer(seed, size, rows)
        self._rank, self._world = rank, world
        self._block, self._lookahead = block, lookahead
        self.begin(StageState())

    def begin(self, at: StageState, reread: Callable[[Serials], Any] | None = None) -> None:
        """Start at a state.

        Args:
            at: where.
            reread: gives the examples behind serials, rising, as the pool takes them, where the state holds
                any; not needed with a pool of nothing.
        """
        self._pool.clear()
        self._begun, self._entered = at, -1
        self.next_index, self.emitted = at.next_index, 0
        items = at.items  # int64 [buffered + waiting to enter]
        rows = np.zeros(len(items), dtype=np.int64)  # [len(items)], where each one's example lies
        if len(items) and reread is not None:
            # Each example goes into the pool once, with the repeats that are left.
            serials, inverse, counts = np.unique(
                items >> keyed.ECHO_BITS, return_inverse=True, return_counts=True
            )
            rows = self._pool.insert(reread(serials), counts)[inverse]
        buffered = len(at.buffer)
        self._buffer.load(at.buffer, rows[:buffered], at.draining)
        self._tail = self._with_slots(items[buffered:], rows[buffered:])

    def take_repeats(self) -> list[Output]:
        """The next outputs: as all repeats of one fresh example enter, where that is possible."""
        if not (self._buffer.size or self._buffer.draining or len(self._tail)):
            return self._passed_on() or self.take(1).one_by_one()
        if self._buffer.space or self._buffer.draining:
            return self.take(1).one_by_one()
        self._gather(1)
        return self.take(max(1, len(self._tail))).one_by_one()

    def _passed_on(self) -> list[Output]:
        """The repeats of the next fresh example, where there is no buffer: ``take`` without its arrays."""
        self.factor.settle(self.next_index)
        fresh = self._upstream(1)
        if fresh is None:
            return []
        self.next_index = fresh.next_index
        self._skip(fresh)
        if not len(fresh.serials):
            return self._passed_on()
        serial, before = int(fresh.serials[0]), self.emitted
        repeats = self.factor.repeats_of(serial)
        row = int(self._pool.insert(fresh.examples, np.array([repeats]))[0])
        self.emitted += repeats
        first = serial << keyed.ECHO_BITS
        self._entered = first + repeats - 1
        return [Output(first + n, row, fresh.next_index, before + n + 1) for n in range(repeats)]

    def take(self, count: int) -> Outputs:
        """The next ``count`` outputs; fewer only at the end of a pass, none after it."""
        while self._buffer.space and not self._buffer.draining:
            entering = self._draw(min(self._buffer.space, self._block))
            if not len(entering):
                self._end()
                break
            self._buffer.fill(entering)
            self._entered = int(entering.items[-1])
        if self._buffer.draining:
            return self._drained(count)
        entering = self._draw(count)
        items, rows = self._buffer.swap(entering)
        outputs = Outputs(self.emitted, items, rows, (entering.items >> keyed.ECHO_BITS) // self._world + 1)
        self.emitted += len(items)
        if len(items):
            self._entered = int(entering.items[-1])
        if len(items) == count:
            return outputs
        self._end()
        return outputs.joined(self._drained(count - len(items)))

    def _end(self) -> None:
        """The pass has ended: nothing enters any more."""
        self._buffer.begin_drain()

    def _drained(self, count: int) -> Outputs:
        items, rows = self._buffer.drain(count)
        outputs = Outputs(self.emitted, items, rows, np.full(len(items), self.next_index))
        self.emitted += len(items)
        return outputs

    def _draw(self, count: int) -> Tail:
        """The next ``count`` items of the echoed stream; fewer at its end, none after it."""
        self._gather(count)
        drawn, self._tail = self._tail.split(count)
        return drawn

    def _gather(self, count: int) -> None:
        """Have that many items wait to enter, if there are as many.

        Where upstream raises, what has been gathered until then waits for the next call.
        """
        while len(self._tail) < count:
            self.factor.settle(self.next_index)
            needed = self.factor.fresh_needed(count - len(self._tail), self.next_index)
            fresh = self._upstream(max(needed, self._lookahead))
            if fresh is None:
                break
            self.next_index = fresh.next_index
            self._skip(fresh)
            if len(fresh.serials):
                self._tail = self._tail.joined(self._repeated(fresh))

    def _skip(self, fresh: Fresh) -> None:
        """Note the bad ones."""

    def _repeated(self, fresh: Fresh) -> Tail:
        counts = self.factor.repeats(fresh.serials)
        rows = self._pool.insert(fresh.examples, counts)
        if self.factor.value == 1:
            return self._with_slots(fresh.serials << keyed.ECHO_BITS, rows)
        return self._with_slots(keyed.uses(fresh.serials, counts), np.repeat(rows, counts))

    def _with_slots(self, items: keyed.Items, rows: Rows) -> Tail:
        return Tail(items, rows, self._buffer.slots(items))

    def state(self) -> StageState:
        """The state after what it has put out so far."""
        if self._buffer.draining:
            return StageState(self.next_index, self._buffer.items(), draining=True)
        if self._entered < 0:
            return self._begun
        serial = self._entered >> keyed.ECHO_BITS
        # Of the last example to enter, the repeats that have not.
        pending = int(np.searchsorted(self._tail.items, (serial + 1) << keyed.ECHO_BITS))
        item = self._entered + 1 if pending else 0
        return StageState(serial // self._world + 1, self._buffer.items(), item, pending)


class EchoStage(Echo):
    """An echo that tells its state after any number of its outputs.

    The thread that works ahead takes outputs and the consumer asks for states; they share only what is
    appended to, so that neither waits for the other.

    Args:
        arguments: as of ``Echo``.
        apart: outputs between two marks, at least.
    """

    def __init__(
        self, *arguments: Any, seed: int, size: int, apart: int = _LEAST_APART, **named: Any
    ) -> None:
        # Copying a large buffer for a mark must not cost more than a few numbers for each output between two;
        # a state must not have to play more outputs than a fraction of what it copies.
        self._apart = max(apart, size // 32)
        super().__init__(*arguments, seed=seed, size=size, **named)
        self._follower = Echo(
            self._once_more, NoPool(), PastFactor(self.factor), seed=seed, size=size, rank=self._rank,
            world=self._world,
        )  # fmt: skip

    def begin(self, at: StageState, reread: Callable[[Serials], Any] | None = None) -> None:
        super().begin(at, reread)
        self._marks: deque[tuple[int, StageState]] = deque([(0, at)])  # after how many outputs
        self._played = self._marks[0]  # what was asked for last
        self._last_mark = 0
        self._bad: list[int] = []  # local numbers, rising
        self._pass_end = sys.maxsize

    def take(self, count: int) -> Outputs:
        outputs = super().take(count)
        self._mark_if_due()
        return outputs

    def take_repeats(self) -> list[Output]:
        outputs = super().take_repeats()
        self._mark_if_due()
        return outputs

    def _mark_if_due(self) -> None:
        if self.emitted - self._last_mark >= self._apart and not self._buffer.draining:
            self._last_mark = self.emitted
            self._marks.append((self.emitted, self.state()))

    def _skip(self, fresh: Fresh) -> None:
        self._bad += [bad.index for bad in fresh.bad]

    def _end(self) -> None:
        self._pass_end = self.next_index
        super()._end()

    def _once_more(self, count: int) -> Fresh | None:
        """Give the follower the fresh serials that this stage was given."""
        start = self._follower.next_index
        _, other_factor = self.factor.span(start)
        stop = min(start + count, other_factor, self._pass_end)
        if stop <= start:
            return None
        indices = np.arange(start, stop, dtype=np.int64)  # [stop - start], less the bad ones
        bad = self._bad[bisect_left(self._bad, start) : bisect_left(self._bad, stop)]
        if bad:
            indices = np.setdiff1d(indices, bad, assume_unique=True)
        return Fresh(indices * self._world + self._rank, None, stop)

    def forget(self, output: int) -> bool:
        """No state before an output will be asked for; whether that leaves marks behind. Never waits."""
        passed = False
        while len(self._marks) > 1 and self._marks[1][0] <= output:
            self._marks.popleft()
            passed = True
        return passed

    @property
    def mark(self) -> StageState:
        """The oldest state from which others are still played."""
        return self._marks[0][1]

    def state_at(self, output: int) -> StageState:
        """The state after so many outputs, no fewer than were last forgotten."""
        marked, at = self._last_known(output)
        if output > marked:
            self._follower.begin(at)
            while self._follower.emitted < output - marked:
                self._follower.take(min(output - marked - self._follower.emitted, _PLAYED))
            at = self._follower.state()
            self._played = output, at
        return at

    def _last_known(self, output: int) -> tuple[int, StageState]:
        """The last mark up to an output, or the state asked for last, if that lies between."""
        latest = 0  # few lie before it; another thread appends
        while latest + 1 < len(self._marks) and self._marks[latest + 1][0] <= output:
            latest += 1
        mark = self._marks[latest]
        return self._played if mark[0] < self._played[0] <= output else mark
