"""From fresh examples, or somebody else's batches, to batches."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adaecho.echo.batch.augment import Origin, span
from adaecho.echo.batch.example_echo import EchoStage
from adaecho.echo.memory.pool import Examples, joined
from adaecho.echo.memory.snapshot import Recent
from adaecho.echo.memory.tree import Stack, collate, duplicate
from adaecho.echo.order import keyed
from adaecho.echo.order.items import Fresh, Taken
from adaecho.echo.read.chunks import FreshQueue
from adaecho.echo.threads.workers import AnyMap


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
        self.stage = stage
        self.skipped = 0  # local numbers that were passed over unread
        self.recent = recent
        self._batch_size, self._augment, self._collate = batch_size, augment, user_collate
        self._group, self.move, self._origin = group, move, origin
        self._drop_last = drop_last

    def begin(self, index: int, skipped: int) -> None:
        """Start with an empty buffer at a local number, having passed over so many unread."""
        self.skipped = skipped
        self.stage.begin_pass(index)
        if self.recent is not None:
            self.recent.clear()

    def claim(self) -> tuple[list[tuple[Taken, Examples]], int] | None:
        """The examples of the next batches; None at the end of the pass."""
        parts = self.stage.take(self._group * self._batch_size)
        if self.recent is not None:
            for taken, examples in parts:
                self.recent.add(taken.end, taken.items, examples)
        return (parts, self.skipped) if parts else None

    def work(self, claim: tuple[list[tuple[Taken, Examples]], int]) -> list[Ready]:
        """Make the batches."""
        parts, skipped = claim
        items = np.concatenate([taken.items for taken, _ in parts])
        next_indices = np.concatenate([taken.next_indices for taken, _ in parts])
        examples = self.augmented(items, joined([examples for _, examples in parts]))
        first = parts[0][0].start
        made = []
        short = len(items) % self._batch_size if self._drop_last else 0
        for start in range(0, len(items) - short, self._batch_size):
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

    def augmented(self, items: keyed.Items, examples: Examples) -> Examples:
        """Augment examples that have left the buffer."""
        return examples if self._augment is None else self._augment(items, examples)

    def collated(self, items: keyed.Items, examples: Examples) -> Any:
        """One batch of its examples."""
        if self._collate is None and isinstance(examples, Stack):
            return self.move(examples.batch())
        singles = examples.examples() if isinstance(examples, Stack) else examples
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


class WholeBatches:
    """Batches that somebody else's loader makes, one a time.

    Args:
        queue: gives them.
        move: takes a batch to its device.
        length: examples in a batch.
        kept: the source keeps its batches and will give them again: they are copied for the consumer.
    """

    def __init__(
        self, queue: FreshQueue, move: Callable[[Any], Any], length: Callable[[Any], int], kept: bool
    ) -> None:
        self.move, self.fresh_examples = move, 0
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

    def get(self, *, by_crew: bool) -> Ready | None:
        """The next batch; None after the last."""
        if not self._made:
            self._made.extend(self.map.get(by_crew=by_crew) or ())
        return self._made.popleft() if self._made else None

    def clear(self) -> None:
        """Forget what has been made."""
        self._made.clear()
