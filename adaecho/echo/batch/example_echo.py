"""The echo stage: repeat each fresh thing, shuffle the repeats in a fixed-size buffer.

Everything is planned on identities (see ``order.keyed``); the things themselves lie in a pool and move once.
The stage works ahead of the consumer, whose position a plan of the same identities tells.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.memory.budget import check_memory
from adaecho.echo.memory.pool import ColumnsPool, ExamplePool, Examples, ListPool, ResidentPool
from adaecho.echo.memory.tree import Columns, duplicate, num_bytes
from adaecho.echo.order import keyed
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.items import Fresh, Outputs, Tail, no_tail
from adaecho.echo.order.plan import Plan, pending, state
from adaecho.echo.order.shuffle_buffer import ShuffleBuffer


class EchoStage:
    """Repeat, then shuffle.

    Args:
        upstream: gives fresh things in serial order, up to so many positions further (fewer things where some
            were bad); None at the end of a pass.
        seed: of the draws of this stage.
        factor: repeats of each fresh thing on average, at least 1.
        buffer: slots; 0 passes everything on in order.
        rank, world: the serial of local number i is ``i * world + rank``.
        block: items that enter at once, at most.
        pool: where things lie; None chooses by their form when the first arrive.
        lookahead: fresh things to ask for at once, at least; more than 1 only where reading is free.

    Attributes:
        factor: how often things are repeated.
        emitted: outputs so far.
    """

    def __init__(
        self,
        upstream: Callable[[int], Fresh | None],
        *,
        seed: int,
        factor: float,
        buffer: int,
        rank: int = 0,
        world: int = 1,
        block: int = 1024,
        pool: ExamplePool | None = None,
        lookahead: int = 1,
    ) -> None:
        self.factor = Factor(seed, factor, world=world)
        self._upstream, self._lookahead = upstream, lookahead
        self._world, self._block = world, block
        self._pool = pool
        self._buffer = ShuffleBuffer(seed, buffer, pool.rows if isinstance(pool, ResidentPool) else 0)
        self._tail = no_tail()
        self._next_index = 0
        self._stash: list[tuple[Outputs, Examples]] = []
        self.emitted = 0
        self._plan = Plan(seed, buffer, self.factor, rank=rank, world=world)

    def take(self, count: int) -> list[tuple[Outputs, Examples]]:
        """The next ``count`` outputs in order, in parts; fewer only at the end of a pass.

        Where upstream raises, nothing is lost: the next call, for as many, goes on.
        """
        count -= sum(len(taken.items) for taken, _ in self._stash)
        while count > 0:
            part = self._take_drained(count) if self._buffer.draining else self._enter(count)
            if part is None:
                break
            if len(part[0].items):
                self._stash.append(part)
                count -= len(part[0].items)
        parts, self._stash = self._stash, []
        return parts

    def begin_pass(self, next_index: int) -> None:
        """Start with an empty buffer at an upstream position."""
        self._begin(state(next_index, keyed.NO_ITEMS))

    def _begin(self, at: dict[str, Any]) -> None:
        self._buffer.clear()
        self._tail, self._stash = no_tail(), []
        if isinstance(self._pool, ColumnsPool | ListPool):
            self._pool = None
        self._next_index = at["next_index"]
        self._plan.begin(self.emitted, at)

    def _enter(self, wanted: int) -> tuple[Outputs, Examples] | None:
        space = self._buffer.space
        entering = self._stream(min(wanted + space, self._block))
        if not len(entering):
            self._plan.end(self._next_index)
            self._buffer.begin_drain()
            return self._take_drained(wanted)
        last_item = int(entering.items[-1])
        if space:
            stored, entering = entering.split(min(space, len(entering)))
            self._buffer.fill(stored)
        items, rows = self._buffer.swap(entering)
        taken = self._taken(items, (entering.items >> keyed.ECHO_BITS) // self._world + 1)
        if self._plan.due(self.emitted):
            self._plan.mark(self.emitted, self._buffer.items(), last_item)
        return taken, self._pool_take(rows)

    def _take_drained(self, count: int) -> tuple[Outputs, Examples] | None:
        items, rows = self._buffer.drain(count)
        if not len(items):
            return None
        return self._taken(items, np.full(len(items), self._next_index)), self._pool_take(rows)

    def _taken(self, items: keyed.Items, next_indices: NDArray[np.int64]) -> Outputs:
        taken = Outputs(self.emitted, items, next_indices)
        self.emitted = taken.end
        return taken

    def _pool_take(self, rows: NDArray[np.int64]) -> Examples:
        if not len(rows):
            return []
        assert self._pool is not None
        return self._pool.take(rows)

    # From fresh things to items

    def _stream(self, count: int) -> Tail:
        """The next ``count`` items of the echoed stream; fewer at its end, none after it."""
        while len(self._tail) < count:
            self.factor.settle(self._next_index)
            needed = self.factor.fresh_needed(count - len(self._tail), self._next_index)
            fresh = self._upstream(max(needed, self._lookahead))
            if fresh is None:
                break
            self._next_index = fresh.next_index
            self._plan.skip([one.index for one in fresh.bad])
            if len(fresh.serials):
                self._tail = self._tail.joined(self._expand(fresh))
        now, self._tail = self._tail.split(count)
        return now

    def _expand(self, fresh: Fresh) -> Tail:
        counts = self.factor.repeats(fresh.serials)
        rows = self._insert(fresh.things, counts)
        if self.factor.value == 1:
            return self._tail_of(fresh.serials << keyed.ECHO_BITS, rows)
        return self._tail_of(keyed.uses(fresh.serials, counts), np.repeat(rows, counts))

    def _tail_of(self, items: keyed.Items, rows: NDArray[np.int64]) -> Tail:
        return Tail(items, rows, self._buffer.slots(items))

    def _insert(self, things: Any, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._pool is None:
            self._pool = self._new_pool(things)
        elif isinstance(self._pool, ColumnsPool) and not self._pool.fits(things):
            self._pool = self._pool.as_list_pool()
        if isinstance(self._pool, ListPool) and isinstance(things, Columns):
            # Not views, the last of which would keep the whole chunk alive.
            things = [duplicate(example) for example in things.examples()]
        return self._pool.insert(things, counts)

    def _new_pool(self, things: Any) -> ExamplePool:
        stacked = isinstance(things, Columns)
        example_bytes = things.example_bytes if stacked else num_bytes(things) // len(things)
        check_memory(self._buffer.size * example_bytes)
        return ColumnsPool(things, self._buffer.size + self._block) if stacked else ListPool()

    def lend(self, things: Any) -> Examples:
        """Things that don't go through the buffer, in the form in which they would leave it."""
        if isinstance(self._pool, ResidentPool):
            return self._pool.take(things)
        return things if isinstance(things, Columns) else [duplicate(thing) for thing in things]

    # State

    @property
    def waiting(self) -> list[tuple[keyed.Items, Examples]]:
        """Outputs not handed over yet, because upstream was interrupted."""
        return [(taken.items, things) for taken, things in self._stash]

    def forget(self, output: int) -> None:
        """States before this output won't be asked for any more; called by the consumer. Never waits."""
        self._plan.forget(output)

    def state_at(self, output: int) -> dict[str, Any]:
        """The stage as it was when ``output`` things in all had left it: see ``plan.state``."""
        return self._plan.state_at(output)

    def held(self, serials: NDArray[np.int64]) -> Examples:
        """The things behind serials that lie in the buffer or are about to enter it; not counted as a use."""
        items, rows = self._buffer.held()
        known = np.concatenate([items, self._tail.items]) >> keyed.ECHO_BITS  # [held]
        rows = np.concatenate([rows, self._tail.rows])
        _, places, found = np.intersect1d(known, serials, return_indices=True)
        if len(found) < len(serials):
            raise RuntimeError("a buffered example was lost")
        return self._pool.peek(rows[places]) if self._pool is not None else []

    def load(self, at: dict[str, Any], reread: Callable[[NDArray[np.int64]], Any]) -> None:
        """Return to a state, reading again what the buffer held.

        Args:
            at: of ``state_at``.
            reread: fresh things by serial, rising; returns what the pool takes.
        """
        self._begin(at)
        size = len(at["buffer"])
        held = np.concatenate([at["buffer"], pending(at)])
        if not len(held):
            return
        # Each example goes into the pool once, with the repeats that are left: serials [n], inverse [held].
        serials, inverse, counts = np.unique(held >> keyed.ECHO_BITS, return_inverse=True, return_counts=True)
        rows = self._insert(reread(serials), counts)[inverse]
        self._buffer.load(held[:size], rows[:size], at["draining"])
        self._tail = self._tail_of(held[size:], rows[size:])
