"""Augment the examples that leave the shuffle buffer, combine them into batches, and repeat batches.

A source may also yield whole batches. Each of these passes through the shuffle buffer like a single example,
and is then used as a batch without being combined with others.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate, default_convert

from adaecho.echo.batch.augment import Origin, arguments_of, says_thread_safe, span
from adaecho.echo.memory import pytree
from adaecho.echo.memory.pool import ExamplePool, Examples, ResidentPool, check_memory, singles_of
from adaecho.echo.memory.pytree import Columns, duplicate, num_bytes
from adaecho.echo.order import keyed
from adaecho.echo.order.stage import EchoStage, FreshBlock, Outputs
from adaecho.echo.order.stream import Cursor, Stream
from adaecho.echo.state import LoaderCursor

_COLLATE_SEED = 3  # added to the loader's seed, so that collate and the loader draw different numbers


@dataclass(slots=True)
class Batch:
    """A batch, and the position of the training loop after this batch."""

    content: Any
    position: LoaderCursor
    # Number of fresh examples in a whole batch from the source. 0 for a repeat, and for a batch that the
    # loader has combined from single examples.
    length: int = 0


class Collator:
    """Combines examples into batches with the user's ``collate``, or with the default if it is None."""

    def __init__(self, collate: Callable[..., Any] | None, seed: int, origin: Origin) -> None:
        self.is_default, self._seed, self._origin = collate is None, seed + _COLLATE_SEED, origin
        self._collate: Callable[..., Any] = pytree.collate if collate is None else collate
        # A Hugging Face tokenizer, for example, is not thread-safe: it stores the length of its last call.
        safe = collate in (None, default_collate, default_convert) or says_thread_safe(collate)
        self._turn: Any = nullcontext() if safe else threading.Lock()
        self._takes_rng = collate is not None and arguments_of(collate, "collate")[1] == 2

    def batch(self, items: keyed.Items, examples: list[Any]) -> Any:
        """Combine examples into a batch; ``items`` contains the number and repeat index of each example."""
        rng = []
        if self._takes_rng:
            rng.append(keyed.generator(keyed.item_keys(self._seed, items[:1])[0]))
        try:
            with self._turn:
                return self._collate(examples, *rng)
        except Exception as error:
            error.add_note(f"while collating {span(items, self._origin)}")
            raise


@dataclass(frozen=True)
class BatchBuilder:
    """Augments examples, combines them into a batch, and copies the batch to the device."""

    batch_size: int
    # Augments examples that leave the shuffle buffer. None if the augmentation runs before the buffer, or if
    # there is none.
    augment: Callable[[keyed.Items, Examples], Examples] | None
    collating: Collator
    move: Callable[[Any], Any]  # copies a batch to the device
    # If the source yields whole batches: a function that returns the number of examples in a batch.
    length: Callable[[Any], int] | None = None
    copy: bool = False  # whether to copy whole batches, because the source may yield the same object again

    def augmented(self, items: keyed.Items, examples: Examples) -> Examples:
        """Augment the examples, if there is an augmentation after the shuffle buffer."""
        return examples if self.augment is None or not len(items) else self.augment(items, examples)

    def examples_in(self, batches: Examples) -> int:
        """Return the number of examples in ``batches[0]``; 0 if the source yields single examples."""
        return 0 if self.length is None or isinstance(batches, Columns) else self.length(batches[0])

    def batch(self, items: keyed.Items, examples: Examples) -> Any:
        """Combine examples into one batch, and copy the batch to the device."""
        if self.length is not None:
            assert not isinstance(examples, Columns)
            return self.move(duplicate(examples[0]) if self.copy else examples[0])
        if self.collating.is_default and isinstance(examples, Columns):
            return self.move(examples.batch())
        return self.move(self.collating.batch(items, singles_of(examples)))


class Batches:
    """Makes batches from the examples that leave the shuffle buffer."""

    def __init__(
        self,
        stage: EchoStage,
        pool: ExamplePool | ResidentPool,
        builder: BatchBuilder,
        position: LoaderCursor,
        *,
        group: int = 1,  # batches per call to ``work``; several at once are faster if batches are small
        drop_last: bool = False,
    ) -> None:
        self._stage, self._pool, self.builder = stage, pool, builder
        self._position, self._group, self._drop_last = position, group, drop_last

    # Only one thread at a time may call ``claim``, but several threads may call ``work`` at the same time.

    def claim(self) -> tuple[Outputs, Any] | None:
        """Take the examples of the next batches from the pool; None after the last example."""
        outputs = self._stage.take(self._group * self.builder.batch_size)
        return (outputs, self._pool.take(outputs.rows, outputs.items)) if len(outputs) else None

    def work(self, claim: tuple[Outputs, Any]) -> list[Batch]:
        """Make batches from the examples that ``claim`` has taken."""
        (outputs, taken), size, before = claim, self.builder.batch_size, self._position
        items = outputs.items  # int64 [n], n up to group * batch_size
        examples = self.builder.augmented(items, taken)
        length = self.builder.examples_in(examples)
        batches = []
        short = len(items) % size if self._drop_last else 0
        for start in range(0, len(items) - short, size):  # batches are slices of a stack, without copies
            end = min(start + size, len(items))
            part = examples if end - start == len(items) else examples[start:end]
            index = outputs.next_index(end)
            position = before._replace(
                fresh_examples=index - before.skipped, next_index=index, examples=outputs.cursor(end),
            )  # fmt: skip
            batches.append(Batch(self.builder.batch(items[start:end], part), position, length))
        return batches

    def remade(self, items: keyed.Items, taken: Examples) -> Batch:
        """Rebuild a batch after a resume, because some of its repeats have not been used yet."""
        examples = self.builder.augmented(items, taken)
        length = self.builder.examples_in(examples)
        return Batch(self.builder.batch(items, examples), self._position, length)


class EchoedBatches:
    """Outputs each batch several times, in order or shuffled (batch echoing)."""

    def __init__(
        self,
        fresh: Callable[[], Batch | None],  # returns the next batch to repeat; None at the end
        stream: Stream,  # how often each batch is repeated, and in which order
        position: LoaderCursor,
        stored: dict[int, Batch],  # batches with unused repeats, by their number in this rank's order
    ) -> None:
        self._fresh, self._stream, self._pool = fresh, stream, stored
        self._stage = EchoStage(self._next_fresh, self, stream, block=1)
        self._outputs: deque[tuple[int, Cursor]] = deque()  # items, each with the cursor after it
        self._upstream = position  # the cursor after the last fresh batch
        contents = stream.contents(position.batches)
        self._stage.resume(position.batches, position.next_number, contents, stream.number)
        self._left = Counter(stream.number(contents.items).tolist())  # remaining repeats of each batch
        self._held, self.busy_s = position.held_examples, 0.0

    def insert(self, batches: list[Batch], repeats: NDArray[np.int64]) -> NDArray[np.int64]:
        """Store a batch that will be used ``repeats[0]`` times. Return the batch's number, int64 [1]."""
        (batch,), number = batches, self._stage.next_index - 1
        if not self._pool and self._stream.size:
            check_memory(self._stream.size * num_bytes(batch.content), "batch_shuffle_buffer")
        self._pool[number], self._left[number] = batch, int(repeats[0])
        self._held += batch.length
        return np.array([number], dtype=np.int64)

    def next(self) -> Batch | None:
        """Return the next batch, which is new or a repeat; None at the end of the iteration."""
        if not self._outputs:
            self._outputs.extend(self._stage.take_repeats())
        if not self._outputs:
            # After a resume into a draining buffer, earlier stages have not yet reached the end of their
            # input or read the examples that drop_last drops. This call makes them do so.
            self._fresh()
            return None
        start = time.perf_counter()
        item, cursor = self._outputs.popleft()
        content = self._used(self._stream.number(item))
        position = self._upstream._replace(
            next_number=self._stage.next_index if cursor.drained else self._stream.number(cursor.last) + 1,
            batches=cursor, held_examples=self._held,
        )  # fmt: skip
        self.busy_s += time.perf_counter() - start
        return Batch(content, position)

    def _used(self, number: int) -> Any:
        """Return a stored batch for one repeat, without sharing memory with later repeats."""
        self._left[number] -= 1
        if self._left[number]:
            # The batch is copied, because the training loop may write into it.
            return duplicate(self._pool[number].content)
        del self._left[number]
        batch = self._pool.pop(number)
        self._held -= batch.length
        return batch.content

    def _next_fresh(self, count: int) -> FreshBlock | None:  # noqa: ARG002 (one at a time)
        batch = self._fresh()
        if batch is None:
            return None
        number, self._upstream = self._stage.next_index, batch.position
        serials = np.array([self._stream.item_of(number) >> keyed.ECHO_BITS], dtype=np.int64)  # [1]
        return FreshBlock(serials, [batch], number + 1)
