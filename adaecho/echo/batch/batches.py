"""The stages of a loader that build batches.

They augment the examples that leave the shuffle buffer, and collate them into batches. Batch echoing then
repeats each batch, and can shuffle the repeats in a second buffer.

If the source yields whole batches, each whole batch passes through these stages like a single example, with
batch size 1.
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

_COLLATE_SEED = 3  # added to the loader's seed, so that collate draws other numbers than the loader


@dataclass(slots=True)
class Batch:
    """A batch, with the position of the training loop after it.

    Attributes:
        content: the batch that the training loop receives.
        position: the position from which a resume continues with the next batch.
        length: number of examples in a fresh batch, if the source yields whole batches; otherwise 0.
    """

    content: Any
    position: LoaderCursor
    length: int = 0


class Collator:
    """Combines lists of examples into batches by calling the user's ``collate``.

    Only one thread at a time calls this function, unless the function declares ``thread_safe = True``. The
    function must not draw from the global random generators. If it accepts a second argument, it receives a
    generator that is seeded for the batch.

    Args:
        collate: the user's function; None for the default.
        seed: the loader's seed.
        origin: function that maps the number of an example in reading order to its name in error messages.
    """

    def __init__(self, collate: Callable[..., Any] | None, seed: int, origin: Origin) -> None:
        self.is_default, self._seed, self._origin = collate is None, seed + _COLLATE_SEED, origin
        self._collate: Callable[..., Any] = pytree.collate if collate is None else collate
        # A tokenizer of Hugging Face, for example, stores the length of its last call.
        safe = collate in (None, default_collate, default_convert) or says_thread_safe(collate)
        self._turn: Any = nullcontext() if safe else threading.Lock()
        self._takes_rng = collate is not None and arguments_of(collate, "collate")[1] == 2

    def batch(self, items: keyed.Items, examples: list[Any]) -> Any:
        """Combine examples into a batch. ``items`` contains the number and repeat of each example."""
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
    """Augments and collates examples that leave the shuffle buffer, and copies the batch to the device.

    Attributes:
        batch_size: number of examples per batch.
        augment: function ``augment(items, examples)`` that augments examples, where ``items`` contains the
            number and the repeat of each example. None if no augmentation follows the buffer.
        collating: combines examples into a batch.
        move: function that copies a batch to the device.
        length: function that returns the number of examples in a batch of the source; None if the source
            yields single examples.
        copy: whether to give the training loop a copy of each batch of the source. The source may yield the
            same object again, and the training loop may write into its batch.
    """

    batch_size: int
    augment: Callable[[keyed.Items, Examples], Examples] | None
    collating: Collator
    move: Callable[[Any], Any]
    length: Callable[[Any], int] | None = None
    copy: bool = False

    def augmented(self, items: keyed.Items, examples: Examples) -> Examples:
        """Augment the examples, or return them unchanged if no augmentation follows the buffer."""
        return examples if self.augment is None or not len(items) else self.augment(items, examples)

    def examples_in(self, batches: Examples) -> int:
        """Return the number of examples in ``batches[0]``, or 0 if the source yields single examples."""
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
    """Makes batches from the examples that leave the shuffle buffer.

    ``claim`` selects the examples of the next batches, in one thread at a time. ``work`` then makes these
    batches, in many threads at the same time.

    Args:
        stage: the stage that repeats and shuffles examples. With an echoing factor of 1 it only shuffles.
        pool: stores the examples.
        builder: builds the batches.
        position: position of the training loop at the start.
        group: number of batches to make in one call of ``work``. Their examples are stacked once, and each
            batch is a slice of the stack. For small arrays this saves most of the interpreter's work.
        drop_last: whether to drop a short batch at the end of an iteration.
    """

    def __init__(
        self,
        stage: EchoStage,
        pool: ExamplePool | ResidentPool,
        builder: BatchBuilder,
        position: LoaderCursor,
        *,
        group: int = 1,
        drop_last: bool = False,
    ) -> None:
        self._stage, self._pool, self.builder = stage, pool, builder
        self._position, self._group, self._drop_last = position, group, drop_last

    def claim(self) -> tuple[Outputs, Any] | None:
        """Take the examples of the next ``group`` batches from the pool, as input for ``work``.

        Only one thread at a time may call this. At the end of an iteration there may be fewer examples.

        Returns:
            The numbers of the examples, and the examples; None if no example is left.
        """
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
        """Make a batch again after a resume, because some of its repeats have not been used yet."""
        examples = self.builder.augmented(items, taken)
        length = self.builder.examples_in(examples)
        return Batch(self.builder.batch(items, examples), self._position, length)


class EchoedBatches:
    """Repeats each batch and, optionally, shuffles the repeats: the last stages of batch echoing.

    The paper describes batch echoing and the buffer for batches in section 3.

    Args:
        fresh: function that returns the next batch to repeat; None at the end of the iteration.
        stream: computes how often each batch is repeated, and in which order the repeats follow.
        position: position of the training loop at the start.
        held: the batches that the training loop will receive again, as a dict from batch number to batch.
    """

    def __init__(
        self,
        fresh: Callable[[], Batch | None],
        stream: Stream,
        position: LoaderCursor,
        held: dict[int, Batch],
    ) -> None:
        self._fresh, self._stream, self._pool = fresh, stream, held
        self._stage = EchoStage(self._next_fresh, self, stream, block=1)
        self._outputs: deque[tuple[int, Cursor]] = deque()  # items, each with the cursor after it
        self._upstream = position  # the cursor after the last fresh batch
        contents = stream.contents(position.batches)
        self._stage.resume(position.batches, position.next_number, contents, stream.number)
        self._left = Counter(stream.number(contents.items).tolist())  # remaining repeats of each batch
        self._held, self.busy_s = position.held_examples, 0.0

    def insert(self, batches: list[Batch], repeats: NDArray[np.int64]) -> NDArray[np.int64]:
        """Store a fresh batch that will be used ``repeats[0]`` times, and return its number as int64 [1]."""
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
            # After a resume into a draining buffer, the stages before have not yet reached the end of their
            # input, nor read the examples that drop_last drops. This call lets them do so.
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
        """Return the content of a stored batch for one repeat, without sharing memory with later repeats."""
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
