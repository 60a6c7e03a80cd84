"""From fresh examples, or a pre-batched source, to batches."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from adaecho.echo.batch.augment import Origin, span
from adaecho.echo.batch.example_echo import EchoStage
from adaecho.echo.memory.packing import pack, unpack
from adaecho.echo.memory.pool import Examples, joined
from adaecho.echo.memory.snapshot import Recent
from adaecho.echo.memory.tree import Columns, collate, duplicate
from adaecho.echo.order import keyed
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.items import Fresh, Outputs
from adaecho.echo.order.plan import pending, serials_in
from adaecho.echo.read.chunks import FreshQueue
from adaecho.echo.threads.workers import AnyMap

Serials = NDArray[np.int64]


@dataclass(slots=True)
class Ready:
    """A batch and where the stages stood when it was complete.

    Attributes:
        batch: what the consumer gets.
        items: of its examples, or under batch echoing those of the latest fresh batch; stand-ins where whole
            batches are read.
        output: outputs of the example stage up to then.
        next_index: upstream position there.
        fresh_examples: examples read up to there, since the loader began.
        number, next_number: of the fresh batch and of the first one not yet echoed, under batch echoing.
        batch_output: outputs of the batch echo stage.
        copies: of the batch, made ahead for its repeats.
    """

    batch: Any
    items: keyed.Items
    output: int
    next_index: int
    fresh_examples: int
    number: int = 0
    next_number: int = 0
    batch_output: int = 0
    copies: list[Any] = field(default_factory=list)


@dataclass
class Position:
    """Where the consumer is.

    Attributes:
        fresh_examples: read for the batches taken so far.
        reread_examples: read again to restore a position.
        next_index: upstream position, as a local number; ``skipped`` of the numbers before were passed over.
        next_number: number of the next fresh batch to echo; ``first_number``: when the iteration began.
        first_index: ``next_index`` when the iteration began.
        iteration: how many have begun; ``in_pass`` while it has not ended.
        output, batch_output: of the example and batch stage, all in all.
    """

    fresh_examples: int = 0
    reread_examples: int = 0
    next_index: int = 0
    skipped: int = 0
    next_number: int = 0
    first_number: int = 0
    first_index: int = 0
    iteration: int = 0
    in_pass: bool = False
    output: int = 0
    batch_output: int = 0
    restored: bool = False

    def begin(self, iteration: int, index: int) -> None:
        """An iteration begins at a local number."""
        self.iteration, self.in_pass = iteration, True
        self.skipped += index - self.next_index
        self.next_index = self.first_index = index
        self.first_number = self.next_number

    def take(self, ready: Ready) -> None:
        """The consumer takes a batch."""
        self.fresh_examples, self.next_index = ready.fresh_examples, ready.next_index
        self.next_number = ready.next_number
        self.output, self.batch_output = ready.output, ready.batch_output

    def end(self, index: int, *, whole: bool) -> None:
        """The iteration ends at a local number, maybe after bad examples that no batch followed."""
        self.in_pass, self.next_index = False, index
        if not whole:  # how many examples a bad batch has is not known
            self.fresh_examples = index - self.skipped


class Held(NamedTuple):
    """What a fresh batch can be made again from: its items, and where it is read whole its place."""

    items: keyed.Items
    place: int  # its local number upstream


class Again:
    """What lay in the buffers at a position: as the state holds it, or read again, once, in serial order.

    Args:
        serials: rising, shape [n].
        things: of these serials, as the pool takes them.
    """

    def __init__(self, serials: Serials, things: Any) -> None:
        self._serials, self._things = serials, things

    def select(self, serials: Serials) -> Any:
        """The things of some of the serials."""
        index = np.searchsorted(self._serials, serials)
        things = self._things
        if isinstance(things, list):
            return [things[place] for place in index]
        return things[index] if isinstance(things, np.ndarray) else things.take(index)


class Stage(Protocol):
    """What stages have in common. A position is the consumer's, however far they have worked ahead."""

    factor: Factor

    def begin(self, position: Position) -> None:
        """Start an iteration with nothing held."""

    def consumed(self, ready: Ready) -> None:
        """The consumer has taken a batch: states before it won't be asked for any more. Never waits.

        After an interrupt it may be told again of the same one.
        """

    def items_at(self, position: Position) -> list[keyed.Items]:
        """The items of which it holds a repeat."""

    def save(self, position: Position) -> dict[str, Any]:
        """Its entries of a state: plain numbers and tensors."""

    def contents(self, state: dict[str, Any]) -> dict[str, Any]:
        """What it holds at a state, packed; no thread may work meanwhile."""

    def needed(self, state: dict[str, Any]) -> Serials:
        """The serials of fresh things without which it can't return to a state, in any order."""

    def load(self, state: dict[str, Any], position: Position, again: Again) -> None:
        """Return to a state, with what it needs."""


def with_tensor(state: dict[str, Any]) -> dict[str, Any]:
    """A stage's state as ``torch.save`` takes it."""
    return {**state, "buffer": torch.from_numpy(state["buffer"])}


def with_array(state: dict[str, Any]) -> dict[str, Any]:
    """And back."""
    return {**state, "buffer": state["buffer"].numpy()}


class ExampleBatches:
    """echo > shuffle > [augment >] batch, from fresh examples.

    Args:
        stage: repeats and shuffles examples; a factor of 1 only shuffles.
        batch_size: examples per batch.
        augment: after the shuffle, for (items, examples); None where it came before the echo.
        user_collate: a list of examples to a batch; None for the default.
        group: batches made at once, as slices of one stack; more than 1 spares most of the interpreter's
            work where examples are small arrays.
        recent: remembers outputs, where states hold contents.
        move: takes a batch to its device.
        origin: what to call the example of a serial in a message.
        drop_last: leave out a short batch at the end of a pass.
    """

    whole = False

    def __init__(
        self,
        stage: EchoStage,
        batch_size: int,
        augment: Callable[[keyed.Items, Examples], Examples] | None,
        user_collate: Callable[[list[Any]], Any] | None,
        group: int = 1,
        recent: Recent | None = None,
        move: Callable[[Any], Any] = lambda batch: batch,
        origin: Origin = "example {}".format,
        *,
        drop_last: bool = False,
    ) -> None:
        self.stage, self.factor = stage, stage.factor
        self.skipped = 0  # local numbers that were passed over unread
        self.recent = recent
        self._batch_size, self._augment, self._collate = batch_size, augment, user_collate
        self._group, self.move, self._origin = group, move, origin
        self._drop_last = drop_last

    def begin(self, position: Position) -> None:
        """Start with an empty buffer at the position's local number."""
        self.skipped = position.skipped
        self.stage.begin_pass(position.next_index)
        if self.recent is not None:
            self.recent.clear()
        position.output = self.stage.emitted

    def claim(self) -> tuple[list[tuple[Outputs, Examples]], int] | None:
        """The examples of the next batches; None at the end of the pass."""
        parts = self.stage.take(self._group * self._batch_size)
        if self.recent is not None:
            for taken, examples in parts:
                self.recent.add(taken.end, taken.items, examples)
        return (parts, self.skipped) if parts else None

    def work(self, claim: tuple[list[tuple[Outputs, Examples]], int]) -> list[Ready]:
        """Make the batches."""
        parts, skipped = claim
        items = np.concatenate([taken.items for taken, _ in parts])  # [n], n up to group * batch_size
        next_indices = np.concatenate([taken.next_indices for taken, _ in parts])
        examples = self.augmented(items, joined([examples for _, examples in parts]))
        first = parts[0][0].start
        made = []
        short = len(items) % self._batch_size if self._drop_last else 0
        for start in range(0, len(items) - short, self._batch_size):  # slices of one stack: nothing is copied
            end = min(start + self._batch_size, len(items))
            batch = self.collated(
                items[start:end], examples if end - start == len(items) else examples[start:end]
            )
            next_index = int(next_indices[end - 1])
            made.append(Ready(batch, items[start:end], first + end, next_index, next_index - skipped))
        return made

    def consumed(self, ready: Ready) -> None:
        """The consumer has taken a batch: earlier states won't be asked for any more."""
        self.stage.forget(ready.output)
        if self.recent is not None:
            self.recent.forget(ready.output)

    def items_at(self, position: Position) -> list[keyed.Items]:
        return [self.stage.state_at(position.output)["buffer"]]

    def save(self, position: Position) -> dict[str, Any]:
        return {"examples": with_tensor(self.stage.state_at(position.output))}

    def contents(self, state: dict[str, Any]) -> dict[str, Any]:
        assert self.recent is not None
        serials = serials_in(with_array(state["examples"]))
        return {"examples": pack(self.recent.contents(self.stage, serials))}

    def needed(self, state: dict[str, Any]) -> Serials:
        of = with_array(state["examples"])
        return np.concatenate([of["buffer"], pending(of)]) >> keyed.ECHO_BITS

    def load(self, state: dict[str, Any], position: Position, again: Again) -> None:
        self.begin(position)
        at = with_array(state["examples"])
        if "contents" in state:
            again = Again(serials_in(at), unpack(state["contents"]["examples"]))
        self.stage.load(at, again.select)

    def serials_of(self, held: Held) -> Serials:
        """Of the fresh examples in a batch."""
        return held.items >> keyed.ECHO_BITS

    def remade(self, held: Held, again: Again) -> Any:
        """A batch made a second time."""
        lent = self.stage.lend(again.select(self.serials_of(held)))
        return self.collated(held.items, self.augmented(held.items, lent))

    def num_batches(self, serials: Serials) -> int:
        """Of so many fresh examples."""
        items = int(self.factor.repeats(serials).sum())
        return items // self._batch_size if self._drop_last else math.ceil(items / self._batch_size)

    def augmented(self, items: keyed.Items, examples: Examples) -> Examples:
        """Augment examples that have left the buffer."""
        return examples if self._augment is None else self._augment(items, examples)

    def collated(self, items: keyed.Items, examples: Examples) -> Any:
        """One batch of its examples."""
        if self._collate is None and isinstance(examples, Columns):
            return self.move(examples.batch())
        singles = examples.examples() if isinstance(examples, Columns) else examples
        try:
            batch = (self._collate or collate)(singles)
        except Exception as error:
            error.add_note(f"while collating {self._named(items, singles)}")
            raise
        return self.move(batch)

    def _named(self, items: keyed.Items, examples: list[Any]) -> str:
        """The one that can't be collated, or two that don't go together, else the first and the last."""
        for place in range(len(examples) if self._collate is None else 0):
            try:
                collate([examples[place]])
            except Exception:
                return self._origin(int(items[place]) >> keyed.ECHO_BITS)
        for place in range(1, len(examples) if self._collate is None else 0):
            try:
                collate([examples[0], examples[place]])
            except Exception:
                pair = [self._origin(int(items[one]) >> keyed.ECHO_BITS) for one in (0, place)]
                return f"{pair[0]} and {pair[1]}, which differ"
        return span(items, self._origin)


class HoldsNothing:
    """The part of a stage that has no buffer: nothing to save, and nothing that a state needs."""

    def consumed(self, ready: Ready) -> None:
        pass

    def items_at(self, position: Position) -> list[keyed.Items]:  # noqa: ARG002
        return []

    def save(self, position: Position) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def contents(self, state: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def needed(self, state: dict[str, Any]) -> Serials:  # noqa: ARG002
        return keyed.NO_ITEMS


class WholeBatches(HoldsNothing):
    """Batches of a pre-batched source, one at a time.

    Args:
        queue: gives them.
        move: takes a batch to its device.
        length: examples in a batch.
        kept: the source keeps its batches and will give them again: they are copied for the consumer.
    """

    whole = True

    def __init__(
        self, queue: FreshQueue, move: Callable[[Any], Any], length: Callable[[Any], int], kept: bool
    ) -> None:
        self.move, self.fresh_examples = move, 0
        self.factor = Factor(0, 1.0, world=1)  # they leave once each
        self._queue, self._length, self._kept = queue, length, kept

    def claim(self) -> Fresh | None:
        """The next batch; None at the end of the pass."""
        fresh = self._queue.take(1)
        while fresh is not None and not len(fresh.serials):
            fresh = self._queue.take(1)
        return fresh

    def work(self, fresh: Fresh) -> list[Ready]:
        """Count its examples (called in order, by one thread)."""
        batch, before = fresh.things[0], self.fresh_examples
        length, taken = self._length(batch), self.taken(batch)
        self.fresh_examples += length
        items = stand_ins(before, self.fresh_examples)
        return [Ready(taken, items, 0, fresh.next_index, self.fresh_examples)]

    def begin(self, position: Position) -> None:
        """Go on counting at a position."""
        self.fresh_examples = position.fresh_examples

    def load(self, state: dict[str, Any], position: Position, again: Again) -> None:  # noqa: ARG002
        self.begin(position)

    def serials_of(self, held: Held) -> Serials:
        """Of a batch, as the reader counts them."""
        return np.array([held.place], dtype=np.int64)

    def remade(self, held: Held, again: Again) -> Any:
        """A batch read a second time."""
        return self.taken(again.select(self.serials_of(held))[0])

    def num_batches(self, serials: Serials) -> int:
        """Of so many that are read."""
        return len(serials)

    def taken(self, batch: Any) -> Any:
        """A batch of the source as the consumer may have it."""
        return self.move(duplicate(batch) if self._kept else batch)


def stand_ins(start: int, end: int) -> keyed.Items:
    """An item for each example of whole batches, which have no serials, by how many were read before it."""
    return np.arange(start << keyed.ECHO_BITS, end << keyed.ECHO_BITS, 1 << keyed.ECHO_BITS, dtype=np.int64)


class OneByOne:
    """Batches one by one from a map that makes several at once."""

    def __init__(self, groups: AnyMap) -> None:
        self.map = groups
        self._made: deque[Ready] = deque()

    def get(self, *, by_pool_thread: bool) -> Ready | None:
        """The next batch; None after the last."""
        if not self._made:
            self._made.extend(self.map.get(by_pool_thread=by_pool_thread) or ())
        return self._made.popleft() if self._made else None

    def clear(self) -> None:
        """Forget what has been made."""
        self._made.clear()
