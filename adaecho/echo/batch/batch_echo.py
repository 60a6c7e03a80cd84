"""The echo stage for whole batches.

One batch is worth more than many small arrays of identities, so what ``example_echo`` does for blocks of
examples is done here one by one, with plain numbers; the plan that tells states is the same.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from adaecho.echo.batch.batches import (
    Again,
    ExampleBatches,
    Held,
    HoldsNothing,
    OneByOne,
    Position,
    Ready,
    Serials,
    WholeBatches,
    stand_ins,
    with_array,
    with_tensor,
)
from adaecho.echo.memory.budget import check_memory
from adaecho.echo.memory.packing import pack, unpack
from adaecho.echo.memory.pool import Examples
from adaecho.echo.memory.snapshot import Recent
from adaecho.echo.memory.tree import duplicate, duplicate_many, num_bytes
from adaecho.echo.order import keyed
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.plan import Plan, pending, serials_in, state
from adaecho.echo.order.shuffle_buffer import drain_order, slots
from adaecho.echo.threads.workers import InlineMap, OrderedMap, ThreadPool

DOWNSTREAM_QUEUE = 2  # more only takes memory, and the interpreter's lock from the training step
# To copy more than this takes longer than to hand a batch over from another thread.
_SLOW_BYTES = 1 << 21


@dataclass(slots=True)
class _FreshBatch:
    """A fresh batch of which repeats are still to come: for the stage, and for the consumer behind it."""

    batch: Any
    copies: list[Any]
    held: Held
    to_emit: int
    to_consume: int


class _Output(NamedTuple):
    """A repeat that leaves, the outputs up to it, and the number of the next fresh batch then."""

    item: int
    end: int
    next_number: int


class EchoedBatches:
    """... > batch > echo [> shuffle batches]: repeats whole batches (paper, section 3).

    Args:
        made: the stage before, which can make batches again.
        batches: of it, one by one.
        thread_pool: threads, or None to work inline.
        seed: of the draws of this stage.
        factor: repeats of each fresh batch on average, at least 1.
        buffer: slots of the shuffle buffer behind the echo; 0 passes everything on in order.
        rank, world: the serial of fresh batch i is ``i * world + rank``.
        recent: remembers outputs, where states hold contents.

    Attributes:
        factor: how often batches are repeated.
        emitted: outputs so far.
        slow: whether batches are so large that a thread should copy them.
    """

    def __init__(
        self,
        made: ExampleBatches | WholeBatches,
        batches: OneByOne,
        thread_pool: ThreadPool | None,
        *,
        seed: int,
        factor: float,
        buffer: int,
        rank: int,
        world: int,
        recent: Recent | None,
    ) -> None:
        self.factor = Factor(seed, factor, world=world)
        self.recent = recent
        self.emitted = self._consumed = 0  # outputs, and those of them that the consumer has taken
        self._made, self._thread_pool = made, thread_pool
        self._inline: InlineMap[Ready, Ready] = InlineMap(partial(self.claim, by_pool_thread=False), _same)
        self._inline.upstream = batches.map
        self._behind: OrderedMap[Ready, Ready] | None = None
        if thread_pool is not None:
            claim = partial(self.claim, by_pool_thread=True)
            self._behind = OrderedMap(
                thread_pool, claim, _same, threads=0, window=DOWNSTREAM_QUEUE, name="echo"
            )
            self._behind.upstream = batches.map
        self._batches, self._seed, self._size = batches, seed, buffer
        self._rank, self._world = rank, world
        self._plan = Plan(seed, buffer, self.factor, rank=rank, world=world)
        self._fresh: dict[int, _FreshBatch] = {}  # by number
        self._last: Ready | None = None  # where the latest fresh batch left the stages before this one
        self._begin(state(0, keyed.NO_ITEMS))

    def begin(self, position: Position) -> None:
        """Start with nothing held, at the number of the next fresh batch."""
        self._begin(state(position.next_number, keyed.NO_ITEMS))
        position.batch_output = self.emitted

    def _begin(self, at: dict[str, Any]) -> None:
        self._next_number: int = at["next_index"]
        self._pending = 0, 0  # the next item of the echo in progress, and how many with it
        self._slots: list[int] = []  # the item in each slot
        self._drain: list[int] | None = None  # the last of them leaves next
        self._leaving: _Output | None = None  # counted, and not handed over yet
        self.slow = False
        self._fresh.clear()
        self._plan.begin(self.emitted, at)
        if self.recent is not None:
            self.recent.clear()

    def copy_ahead(self, made: list[Ready]) -> None:
        """Copies of small batches for their repeats, made where they are made, beside the step."""
        size = max(num_bytes(ready.batch) for ready in made)
        if size:
            for _ in range(min(math.ceil(self.factor.value) - 1, _SLOW_BYTES // size)):
                # Each call of torch gives the interpreter's lock away: one for many batches.
                for ready, copied in zip(made, duplicate_many([r.batch for r in made]), strict=True):
                    ready.copies.append(copied)

    # Outputs

    def claim(self, *, by_pool_thread: bool) -> Ready | None:
        """The next repeat; None at the end of the pass.

        Where upstream raises or copying is interrupted, nothing is lost: the next call goes on.
        """
        if self._leaving is None:
            self._leaving = self._next_output(by_pool_thread)
            if self._leaving is None:
                return None
        ready = self._ready(self._leaving)
        self._leaving = None
        return ready

    def _next_output(self, by_pool_thread: bool) -> _Output | None:
        while self._drain is None:
            if not self._pending[1] and not self._read(by_pool_thread):
                self._begin_drain()
                break
            item = self._enter()
            if item is not None:
                return self._output(item)
        return self._output(self._drain.pop()) if self._drain else None

    def _read(self, by_pool_thread: bool) -> bool:
        """Begin the echo of the next fresh batch; False if there is none."""
        self.factor.settle(self._next_number)
        ready = self._batches.get(by_pool_thread=by_pool_thread)
        if ready is None:
            return False
        size = num_bytes(ready.batch)
        if self._last is None:
            check_memory(self._size * size, "batch_shuffle_buffer")
        number = self._next_number
        serial = number * self._world + self._rank
        repeats = self.factor.repeats_of(serial)
        held = Held(ready.items, ready.next_index - 1)
        self._fresh[number] = _FreshBatch(ready.batch, ready.copies, held, repeats, repeats)
        self._pending = serial << keyed.ECHO_BITS, repeats
        self._next_number = number + 1
        self.slow = size >= _SLOW_BYTES
        ready.batch, ready.copies, self._last = None, [], ready
        return True

    def _enter(self) -> int | None:
        """Put the next item into the buffer; the one it pushes out."""
        item, repeats = self._pending
        self._pending = item + 1, repeats - 1
        if not self._size:
            return item
        if len(self._slots) < self._size:
            self._slots.append(item)
            return None
        slot = int(slots(self._seed, np.array([item]), self._size)[0])
        leaving, self._slots[slot] = self._slots[slot], item
        return leaving

    def _begin_drain(self) -> None:
        """Nothing enters any more: what is left leaves in random order."""
        self._plan.end(self._next_number)
        items = np.array(self._slots, dtype=np.int64)
        self._drain = items[drain_order(self._seed, items)[::-1]].tolist()

    def _output(self, item: int) -> _Output:
        self.emitted += 1
        if self._drain is None and self._plan.due(self.emitted):
            last_item = self._pending[0] - 1
            self._plan.mark(self.emitted, np.array(self._slots, dtype=np.int64), last_item)
        return _Output(item, self.emitted, self._next_number)

    def _ready(self, output: _Output) -> Ready:
        number = (output.item >> keyed.ECHO_BITS) // self._world
        fresh, last = self._fresh[number], self._last
        assert last is not None
        left, batch = fresh.to_emit - 1, fresh.batch
        if left:
            # The original stays for later repeats: writing into this one must not change them.
            batch = fresh.copies.pop() if fresh.copies else duplicate(batch)
        if self.recent is not None:
            self.recent.add(output.end, np.array([output.item]), [batch])
        fresh.to_emit = left  # after the copies, which may be interrupted
        if not left:
            fresh.batch = None
        return Ready(
            batch, last.items, last.output, last.next_index, last.fresh_examples,
            number, output.next_number, output.end,
        )  # fmt: skip

    def consumed(self, ready: Ready) -> None:
        """The consumer has taken a repeat: earlier states won't be asked for any more. Never waits."""
        self._plan.forget(ready.batch_output)
        if self.recent is not None:
            self.recent.forget(ready.batch_output)
        if ready.batch_output > self._consumed:
            # No call from here on: an interrupt could fall after one, and this repeat would count twice.
            self._consumed = ready.batch_output
            fresh = self._fresh[ready.number]
            fresh.to_consume -= 1
            if not fresh.to_consume:
                del self._fresh[ready.number]

    def num_batches(self, first_number: int, batches: int) -> int:
        """How often consecutive fresh batches leave, together."""
        numbers = np.arange(first_number, first_number + batches, dtype=np.int64)
        return int(self.factor.repeats(numbers * self._world + self._rank).sum())

    # Delivery

    def next(self) -> Ready | None:
        """The next repeat.

        The consumer repeats small batches itself, with copies made upstream: to wake a thread, which takes
        the interpreter's lock from the step, costs more. Large ones are copied by a thread beside the step.
        """
        if self._behind is not None and self._behind.wanted:
            return self._behind.get(by_pool_thread=False)
        ready = self._inline.get(by_pool_thread=False)
        if self._thread_pool is not None and self._behind is not None and self.slow:
            self._thread_pool.staff(self._behind, 1)
        return ready

    @property
    def busy_s(self) -> float:
        """Seconds spent on repeats."""
        inline_s = self._inline.claim_s + self._inline.work_s
        return inline_s if self._behind is None else inline_s + self._behind.claim_s + self._behind.work_s

    def reset(self) -> None:
        """Forget what was claimed, after the threads have ended."""
        self._inline.reset()
        if self._thread_pool is not None and self._behind is not None:
            self._thread_pool.staff(self._behind, 0)
            self._behind.reset()

    # State

    def items_at(self, position: Position) -> list[keyed.Items]:
        return [held.items for held in self._state_at(position.batch_output)[1].values()]

    def _state_at(self, output: int) -> tuple[dict[str, Any], dict[int, Held]]:
        """The state as it was after so many outputs in all, and every batch it held by number."""
        at = self._plan.state_at(output)
        numbers = (serials_in(at) // self._world).tolist()
        return at, {number: self._fresh[number].held for number in numbers}

    def save(self, position: Position) -> dict[str, Any]:
        at, held = self._state_at(position.batch_output)
        # A few tensors, however many batches there are; of whole ones only number, place and length.
        items = [] if self._made.whole else [one.items for one in held.values()]
        return {
            "batches": with_tensor(at),
            "held_batches": {
                "numbers": torch.tensor(list(held), dtype=torch.int64),
                "places": torch.tensor([one.place for one in held.values()], dtype=torch.int64),
                "lengths": torch.tensor([len(one.items) for one in held.values()], dtype=torch.int64),
                "items": torch.from_numpy(np.concatenate([keyed.NO_ITEMS, *items])),
            },
        }

    def contents(self, state: dict[str, Any]) -> dict[str, Any]:
        assert self.recent is not None
        serials = state["held_batches"]["numbers"].numpy() * self._world + self._rank
        return {"batches": pack(self.recent.contents(self, serials))}

    def needed(self, state: dict[str, Any]) -> Serials:
        held = _held(state["held_batches"], state["fresh_examples"]).values()
        return np.concatenate([keyed.NO_ITEMS, *map(self._made.serials_of, held)])

    def held(self, serials: NDArray[np.int64]) -> Examples:
        """The batches behind serials of which repeats are still to leave."""
        return [self._fresh[serial // self._world].batch for serial in serials.tolist()]

    @property
    def waiting(self) -> list[tuple[keyed.Items, Examples]]:
        """Outputs not handed over yet: none, they leave one by one."""
        return []

    def load(self, state: dict[str, Any], position: Position, again: Again) -> None:
        at, held = with_array(state["batches"]), _held(state["held_batches"], position.fresh_examples)
        if "contents" in state:
            unpacked = unpack(state["contents"]["batches"])
            assert isinstance(unpacked, list)
            batches = [self._made.move(batch) for batch in unpacked]
        else:
            batches = [self._made.remade(one, again) for one in held.values()]
        remade = dict(zip(held, batches, strict=True))
        self._begin(at)
        position.batch_output = self.emitted
        self._last = Ready(
            None, keyed.NO_ITEMS, position.output, position.next_index, position.fresh_examples
        )
        self._pending = at["pending_item"], at["pending_repeats"]
        self._slots = at["buffer"].tolist()
        if at["draining"]:
            self._drain = self._slots[::-1]
        for item in [*self._slots, *pending(at).tolist()]:
            number = (item >> keyed.ECHO_BITS) // self._world
            fresh = self._fresh.setdefault(number, _FreshBatch(remade[number], [], held[number], 0, 0))
            fresh.to_emit += 1
            fresh.to_consume += 1


def _held(plain: dict[Any, torch.Tensor], fresh_examples: int) -> dict[int, Held]:
    """The batches that a state holds, by number."""
    lengths, items = plain["lengths"].numpy(), plain["items"].numpy()
    if not len(items):
        items = stand_ins(fresh_examples - int(lengths.sum()), fresh_examples)
    of_each = np.split(items, np.cumsum(lengths)[:-1]) if len(lengths) else []
    held = zip(plain["numbers"].tolist(), of_each, plain["places"].tolist(), strict=True)
    return {number: Held(one, place) for number, one, place in held}


class NotEchoed(HoldsNothing):
    """... > batch: each batch once.

    Args:
        batches: upstream.
    """

    def __init__(self, batches: OneByOne) -> None:
        self.factor = Factor(0, 1.0, world=1)
        self.busy_s = 0.0
        self._batches = batches

    def copy_ahead(self, made: list[Ready]) -> None:
        """No copies are needed."""

    def next(self) -> Ready | None:
        """The next batch; None at the end of the iteration."""
        return self._batches.get(by_pool_thread=False)

    def reset(self) -> None:
        pass

    def num_batches(self, first_number: int, batches: int) -> int:  # noqa: ARG002
        """As many as are made."""
        return batches

    def begin(self, position: Position) -> None:
        pass

    def load(self, state: dict[str, Any], position: Position, again: Again) -> None:
        pass


def _same(ready: Ready) -> Ready:
    return ready
