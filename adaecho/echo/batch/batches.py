"""Make batches: shuffle > [augment >] batch [> echo > shuffle batches].

A whole batch of the source is treated as one example of batch size 1.
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

_COLLATE_SEED = 3  # added to the seed


@dataclass(slots=True)
class Batch:
    """A batch and the cursor of the consumer after it.

    Attributes:
        content: the batch that the consumer receives.
        position: the cursor after it.
        length: number of examples in a whole batch.
    """

    content: Any
    position: LoaderCursor
    length: int = 0


class Collator:
    """Collate examples with the user's function, in any thread.

    One thread at a time calls the function, unless it declares ``thread_safe = True``: e.g. a Hugging Face
    tokenizer stores the length of its last call. The function must not draw from the global generators,
    which the training step may use. A function of two arguments receives a generator keyed to the batch.

    Args:
        collate: turns a list of examples into a batch; None for the default.
        seed: seed of the keyed generator.
        origin: names the example of a serial in messages.
    """

    def __init__(self, collate: Callable[..., Any] | None, seed: int, origin: Origin) -> None:
        self.is_default, self._seed, self._origin = collate is None, seed + _COLLATE_SEED, origin
        self._collate: Callable[..., Any] = pytree.collate if collate is None else collate
        safe = collate in (None, default_collate, default_convert) or says_thread_safe(collate)
        self._turn: Any = nullcontext() if safe else threading.Lock()
        self._takes_rng = collate is not None and arguments_of(collate, "collate")[1] == 2

    def batch(self, items: keyed.Items, examples: list[Any]) -> Any:
        """Return the batch of these examples."""
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
    """Builds batches of examples that have left the buffer.

    Attributes:
        batch_size: examples per batch.
        augment: function of (items, examples); None if augmentation comes before the echo.
        collating: collates the examples.
        move: moves a batch to its device.
        length: number of examples in a whole batch; None if the source yields examples.
        kept: the source yields the same batch objects again, so the consumer gets copies.
    """

    batch_size: int
    augment: Callable[[keyed.Items, Examples], Examples] | None
    collating: Collator
    move: Callable[[Any], Any]
    length: Callable[[Any], int] | None = None
    kept: bool = False

    def augmented(self, items: keyed.Items, examples: Examples) -> Examples:
        """Augment examples that have left the buffer."""
        return examples if self.augment is None or not len(items) else self.augment(items, examples)

    def examples_in(self, batches: Examples) -> int:
        """Number of examples in the single whole batch; 0 if these are examples."""
        return 0 if self.length is None or isinstance(batches, Columns) else self.length(batches[0])

    def batch(self, items: keyed.Items, examples: Examples) -> Any:
        """Make one batch of its examples."""
        if self.length is not None:
            assert not isinstance(examples, Columns)
            return self.move(duplicate(examples[0]) if self.kept else examples[0])
        if self.collating.is_default and isinstance(examples, Columns):
            return self.move(examples.batch())
        return self.move(self.collating.batch(items, singles_of(examples)))


class Batches:
    """Batches of the outputs of a stage.

    Args:
        stage: repeats and shuffles examples; a factor of 1 only shuffles.
        pool: holds the examples.
        making: builds the batches.
        position: cursor at the start.
        group: returns the number of batches to make at once, as slices of one stack. More than 1 saves most
            of the interpreter's work for small arrays.
        drop_last: drop a short batch at the end of an epoch.
    """

    def __init__(
        self,
        stage: EchoStage,
        pool: ExamplePool | ResidentPool,
        making: BatchBuilder,
        position: LoaderCursor,
        *,
        group: Callable[[], int] = lambda: 1,
        drop_last: bool = False,
    ) -> None:
        self._stage, self._pool, self.making = stage, pool, making
        self._position, self._group, self._drop_last = position, group, drop_last

    def claim(self) -> tuple[Outputs, Any] | None:
        """Claim the examples of the next batches; None at the end of the iteration."""
        outputs = self._stage.take(self._group() * self.making.batch_size)
        return (outputs, self._pool.take(outputs.rows, outputs.items)) if len(outputs) else None

    def work(self, claim: tuple[Outputs, Any]) -> list[Batch]:
        """Make the batches."""
        (outputs, taken), size, before = claim, self.making.batch_size, self._position
        items = outputs.items  # int64 [n], n up to group * batch_size
        examples = self.making.augmented(items, taken)
        length = self.making.examples_in(examples)
        batches = []
        short = len(items) % size if self._drop_last else 0
        for start in range(0, len(items) - short, size):  # slices of one stack: nothing is copied
            end = min(start + size, len(items))
            part = examples if end - start == len(items) else examples[start:end]
            index = outputs.next_index(end)
            position = before._replace(
                fresh_examples=index - before.skipped, next_index=index, examples=outputs.cursor(end),
            )  # fmt: skip
            batches.append(Batch(self.making.batch(items[start:end], part), position, length))
        return batches

    def remade(self, items: keyed.Items, taken: Examples) -> Batch:
        """Make a batch again that still has repeats."""
        examples = self.making.augmented(items, taken)
        length = self.making.examples_in(examples)
        return Batch(self.making.batch(items, examples), self._position, length)


class EchoedBatches:
    """Repeat whole batches: ... > batch > echo [> shuffle batches] (paper, section 3).

    This is an ``order.stage.EchoStage`` of batches, with this object as its pool.

    Args:
        fresh: returns the next fresh batch; None at the end of the iteration.
        stream: stream of the batches.
        position: cursor at the start.
        held: batches that still have repeats there, by number.
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
        self._outputs: deque[tuple[int, Cursor]] = deque()  # items and the cursor after each
        self._upstream = position  # the cursor of the stages before
        contents = stream.contents(position.batches)
        self._stage.resume(position.batches, position.next_number, contents, stream.numbers)
        self._left = Counter(stream.numbers(contents.items).tolist())  # remaining repeats of each batch
        self._held, self.busy_s = position.held_examples, 0.0

    def insert(self, batches: list[Batch], repeats: NDArray[np.int64]) -> NDArray[np.int64]:
        """Insert one batch with its number of repeats; its number serves as row."""
        (batch,), number = batches, self._stage.next_index - 1
        if not self._pool and self._stream.size:
            check_memory(self._stream.size * num_bytes(batch.content), "batch_shuffle_buffer")
        self._pool[number], self._left[number] = batch, int(repeats[0])
        self._held += batch.length
        return np.array([number], dtype=np.int64)

    def next(self) -> Batch | None:
        """Return the next repeat; None at the end of the iteration."""
        if not self._outputs:
            self._outputs.extend(self._stage.take_repeats())
        if not self._outputs:
            # After a resume while the buffer drains, upstream has not yet read the remainder that drop_last
            # drops, nor met the end.
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
        """Return the content of one repeat, which shares no memory with later ones."""
        self._left[number] -= 1
        if self._left[number]:
            # Copy: a write into this repeat must not change later ones.
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
