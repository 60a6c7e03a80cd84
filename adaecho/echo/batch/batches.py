"""From fresh examples to batches: shuffle > [augment >] batch.

Whole batches are examples of a batch size of one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.batch.augment import Origin, span
from adaecho.echo.memory.pool import ExamplePool, Examples, ResidentPool, interleaved
from adaecho.echo.memory.tree import Columns, collate, duplicate
from adaecho.echo.order import keyed
from adaecho.echo.order.stage import ABSENT, Outputs, Stage
from adaecho.echo.order.stream import BEGINNING, Place
from adaecho.echo.read.chunks import Reader

Serials = NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """A batch and where the streams stood when it was complete.

    Attributes:
        content: what the consumer gets.
        place: of the examples up to it.
        next_index: upstream position there.
        fresh_examples: examples read up to there, since the loader began.
        oldest: an item no later than any that is held there.
        reread_examples: read again for it, since a resume found them in a buffer.
        next_number: of the first batch not yet echoed, under batch echoing.
        batch_place: of the batches up to it, likewise.
        held_examples: in whole batches of which a repeat is to leave; before the echo, in this one.
        copies: of the content, made ahead for its repeats.
    """

    content: Any
    place: Place
    next_index: int
    fresh_examples: int
    oldest: int
    reread_examples: int = 0
    next_number: int = 0
    batch_place: Place = BEGINNING
    held_examples: int = 0
    copies: list[Any] = field(default_factory=list)


class Claim(NamedTuple):
    """The examples of the next batches.

    Attributes:
        outputs: which they are.
        examples: those that are in the pool.
        absent: which of the outputs are not, bool [n]; None where all are.
        length: of a whole batch; None where examples are read.
        fresh_examples: read up to a whole batch.
    """

    outputs: Outputs
    examples: Examples
    absent: NDArray[np.bool_] | None
    length: int | None = None
    fresh_examples: int = 0


@dataclass(frozen=True)
class Making:
    """How batches are made of examples that have left the buffer.

    Attributes:
        batch_size: examples per batch.
        augment: for (items, examples); None where it came before the echo.
        collate: a list of examples to a batch; None for the default.
        move: takes a batch to its device.
        origin: what to call the example of a serial in a message.
        length: examples in a whole batch; None where examples are read.
        kept: the source keeps its batches and will give them again: they are copied for the consumer.
    """

    batch_size: int
    augment: Callable[[keyed.Items, Examples], Examples] | None
    collate: Callable[[list[Any]], Any] | None
    move: Callable[[Any], Any]
    origin: Origin
    length: Callable[[Any], int] | None = None
    kept: bool = False

    def augmented(self, items: keyed.Items, examples: Examples) -> Examples:
        """Examples that have left the buffer, augmented."""
        return examples if self.augment is None or not len(items) else self.augment(items, examples)

    def batch(self, items: keyed.Items, examples: Examples) -> Any:
        """One batch of its examples."""
        if self.length is not None:
            assert not isinstance(examples, Columns)
            return self.move(duplicate(examples[0]) if self.kept else examples[0])
        if self.collate is None and isinstance(examples, Columns):
            return self.move(examples.batch())
        singles = examples.examples() if isinstance(examples, Columns) else examples
        try:
            batch = (self.collate or collate)(singles)
        except Exception as error:
            error.add_note(f"while collating {self._named(items, singles)}")
            raise
        return self.move(batch)

    def _named(self, items: keyed.Items, examples: list[Any]) -> str:
        """The one that can't be collated, or two that don't go together, else the first and the last."""
        for index in range(len(examples) if self.collate is None else 0):
            try:
                collate([examples[index]])
            except Exception:
                return self.origin(int(items[index]) >> keyed.ECHO_BITS)
        for index in range(1, len(examples) if self.collate is None else 0):
            try:
                collate([examples[0], examples[index]])
            except Exception:
                pair = [self.origin(int(items[number]) >> keyed.ECHO_BITS) for number in (0, index)]
                return f"{pair[0]} and {pair[1]}, which differ"
        return span(items, self.origin)


class Batches:
    """Batches of what leaves a stage.

    Args:
        stage: repeats and shuffles examples; a factor of 1 only shuffles.
        pool: where its examples lie.
        making: of batches.
        reader: reads examples again that a resume finds in the buffer.
        group: batches made at once, as slices of one stack; more than 1 spares most of the interpreter's
            work where examples are small arrays.
        drop_last: leave out a short batch at the end of a pass.
        skipped: local numbers that were passed over unread.
        fresh_examples: where whole batches begin to be counted.
        absent: held items of which the pool has no example.
    """

    def __init__(
        self,
        stage: Stage,
        pool: ExamplePool | ResidentPool,
        making: Making,
        reader: Reader,
        *,
        group: int = 1,
        drop_last: bool = False,
        skipped: int = 0,
        fresh_examples: int = 0,
        absent: int = 0,
    ) -> None:
        self._stage, self._pool, self.making, self._reader = stage, pool, making, reader
        self._group, self._drop_last, self._skipped = group, drop_last, skipped
        self._fresh_examples, self._absent = fresh_examples, absent

    def claim(self) -> Claim | None:
        """The examples of the next batches, and which use each is; None at the end of the pass."""
        outputs = self._stage.take(self._group * self.making.batch_size)
        if not len(outputs):
            return None
        absent, rows = None, outputs.rows
        if self._absent:
            absent = rows == ABSENT
            self._absent -= int(absent.sum())
            rows = rows[~absent]
        examples = self._pool.take(rows) if len(rows) else []
        if self.making.length is None:
            return Claim(outputs, examples, absent)
        assert not isinstance(examples, Columns)  # one whole batch
        length = self.making.length(examples[0])
        self._fresh_examples += length
        return Claim(outputs, examples, absent, length, self._fresh_examples)

    def work(self, claim: Claim) -> list[Batch]:
        """Make the batches."""
        outputs, size = claim.outputs, self.making.batch_size
        items = outputs.items  # int64 [n], n up to group * batch_size
        examples, absent = claim.examples, claim.absent
        if absent is not None:
            examples = interleaved(examples, self.again(items[absent]), absent)
        examples = self.making.augmented(items, examples)
        batches = []
        short = len(items) % size if self._drop_last else 0
        for start in range(0, len(items) - short, size):  # slices of one stack: nothing is copied
            end = min(start + size, len(items))
            part = examples if end - start == len(items) else examples[start:end]
            next_index = outputs.next_index(end)
            fresh_examples = next_index - self._skipped if claim.length is None else claim.fresh_examples
            content = self.making.batch(items[start:end], part)
            batch = Batch(content, outputs.place(end), next_index, fresh_examples, outputs.oldest)
            batch.held_examples = claim.length or 0
            if absent is not None:
                batch.reread_examples = self._num_read(items[start:end][absent[start:end]])
            batches.append(batch)
        return batches

    def again(self, items: keyed.Items) -> Examples:
        """The examples of items, read a second time."""
        serials, inverse, counts = np.unique(
            items >> keyed.ECHO_BITS, return_inverse=True, return_counts=True
        )
        examples = self._reader.reread(serials, counts) if len(serials) else []
        if isinstance(examples, np.ndarray):  # rows of a resident source
            return self._pool.take(examples[inverse])
        if isinstance(examples, Columns):
            return examples.take(inverse)
        # Each use but the last is a copy: writing into it must not change the others.
        left = counts.tolist()
        again = []
        for n in inverse.tolist():
            left[n] -= 1
            again.append(duplicate(examples[n]) if left[n] else examples[n])
        return again

    def remade(self, items: keyed.Items) -> tuple[Any, int, int]:
        """A batch made a second time, how many examples were read for that, and the length of a whole one."""
        examples = self.again(items)
        length, read = 0, self._num_read(items)
        if self.making.length is not None:
            assert not isinstance(examples, Columns)  # one whole batch
            length = self.making.length(examples[0])
            read *= length
        return self.making.batch(items, self.making.augmented(items, examples)), read, length

    def _num_read(self, items: keyed.Items) -> int:
        return len(keyed.serials_of(items)) if self._reader.reads_again else 0
