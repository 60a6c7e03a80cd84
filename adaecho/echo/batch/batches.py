"""From fresh examples to batches: shuffle > [augment >] batch [> echo > shuffle batches].

Whole batches are examples of a batch size of one.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate, default_convert

from adaecho.echo.batch.augment import Origin, span
from adaecho.echo.memory import tree
from adaecho.echo.memory.budget import check_memory
from adaecho.echo.memory.pool import ExamplePool, Examples, ResidentPool, interleaved, singles_of
from adaecho.echo.memory.tree import Columns, duplicate, num_bytes
from adaecho.echo.order import keyed
from adaecho.echo.order.stage import ABSENT, Fresh, Output, Outputs, RowsOf, Stage, absent
from adaecho.echo.order.stream import Rows, Stream
from adaecho.echo.read.chunks import Reader
from adaecho.echo.read.failures import warn_caller
from adaecho.echo.state import Position
from adaecho.echo.threads.generators import global_generators_kept, seed_globally, tried
from adaecho.echo.threads.workers import apart

_COLLATE_SEED = 3  # beside the seeds of examples, of batches and of datasets
_LOOKS = 3
_TOLD_DRAWS = (
    "collate draws random numbers: it is seeded for each batch, and called as that is taken, by no worker; "
    "CutMix and MixUp are quicker in the step"
)
_TOLD_UNSEEDED = (
    "collate draws random numbers, or another thread meanwhile: none are seeded where another than the main "
    "thread takes batches, as the step may draw beside it; draw in the step, or in augment(example, rng)"
)


@dataclass(slots=True)
class Batch:
    """A batch and where the consumer is once it has been taken.

    Attributes:
        content: what the consumer gets.
        position: just after it.
        length: examples in it, where it came whole.
        reread: examples read again for it, since a resume found them in a buffer.
    """

    content: Any
    position: Position
    length: int = 0
    reread: int = 0


class _Again(NamedTuple):
    """One use of what a resume found in a buffer: it is read for its first one, and kept for the others.

    Attributes:
        place: among the items taken with it.
        serial: which it is.
        first: it is to be read for this use.
        shared: with other uses, which writing into this one must not change.
        read: what is read for the first one, by serial.
    """

    place: int
    serial: int
    first: bool
    shared: bool
    read: "Future[dict[int, Any]]"


class Later(NamedTuple):
    """The content of a batch that is to be made while the consumer waits for it; told whether seeded."""

    make: Callable[[bool], Any]


class Taken(NamedTuple):
    """Examples on their way to batches.

    Attributes:
        items: uses of examples, int64 [n].
        examples: those that lie in the pool.
        absent: which don't, bool [n]; None for none.
        again: those that a resume found in a buffer.
        read: of those, what is to be read for these.
    """

    items: keyed.Items
    examples: Examples
    absent: NDArray[np.bool_] | None = None
    again: Sequence[_Again] = ()
    read: "Future[dict[int, Any]] | None" = None


def _may_be_shared(collate: Callable[..., Any]) -> bool:
    """Whether threads may call it together: torch's own, or one that, or whose object, says so."""
    told = [getattr(one, "thread_safe", False) for one in (collate, getattr(collate, "__self__", None))]
    return any(told) or collate in (default_collate, default_convert)


class Collating:
    """Makes batches by a function of the user's: its draws follow the batch, whoever works beside it.

    One that draws from the global generators, which the step shares, is called while the consumer waits for
    it and finds them seeded; so is each until that is known, which with workers the first call tells. Others
    are called ahead: one at a time, unless they say ``thread_safe = True``, as one around a Hugging Face
    tokenizer keeps the length that it was asked for last.

    Args:
        collate: a list of examples to a batch; None for the default.
        seed: of what it draws.
        origin: what to call the example of a serial in a message.
        workers: whether there are any.

    Attributes:
        draws: from the global generators; None until that is known.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any] | None, seed: int, origin: Origin, *, workers: bool
    ) -> None:
        self.is_default, self._seed, self._origin = collate is None, seed + _COLLATE_SEED, origin
        self._collate = tree.collate if collate is None else collate
        self.draws: bool | None = False if collate is None or _may_be_shared(collate) else None
        self._turn: Any = nullcontext() if self.draws is False else threading.Lock()
        self._workers = workers
        self._looks = self._moved = 0  # calls that were looked at, and those that moved generators

    def batch(self, items: keyed.Items, examples: list[Any], *, seeded: bool = True) -> Any:
        """The batch; while the consumer waits for it, unless it is known not to draw.

        Not ``seeded`` beside a step that may draw. One call that has moved no generator tells; those that
        have may not have done it, but an augmentation of another thread, against the rules.
        """
        with self._turn:
            if self.draws is False or (self.draws and not seeded):
                return self._collated(items, examples)
            key = int(keyed.item_keys(self._seed, items[:1])[0])
            # Without workers to call it ahead it may draw in any later batch.
            if self.draws or (seeded and not self._workers and self._looks >= _LOOKS):
                with global_generators_kept():
                    seed_globally(key, key >> 1)
                    return self._collated(items, examples)
            batch, moved = tried(lambda: self._collated(items, examples), key if seeded else None)
            self._looks, self._moved = self._looks + 1, self._moved + moved
            if not moved and (self._workers or not seeded):
                self.draws = False
            elif seeded and self._moved == _LOOKS:
                self.draws = True
            return batch

    def _collated(self, items: keyed.Items, examples: list[Any]) -> Any:
        try:
            return self._collate(examples)
        except Exception as error:
            error.add_note(f"while collating {self._named(items, examples)}")
            raise

    def _named(self, items: keyed.Items, examples: list[Any]) -> str:
        """The one that can't be collated, or two that don't go together, else the first and the last."""
        for index in range(len(examples) if self.is_default else 0):
            try:
                tree.collate([examples[index]])
            except Exception:
                return self._origin(int(items[index]) >> keyed.ECHO_BITS)
        for index in range(1, len(examples) if self.is_default else 0):
            try:
                tree.collate([examples[0], examples[index]])
            except Exception:
                pair = [self._origin(int(items[number]) >> keyed.ECHO_BITS) for number in (0, index)]
                return f"{pair[0]} and {pair[1]}, which differ"
        return span(items, self._origin)


class Completing:
    """Makes the content of batches for which the consumer waits.

    Where that isn't the main thread, the step may draw beside it: the generators stay as they are.

    Args:
        collating: makes it.
        threads: whether others are made by threads, which have torch's settings of a thread anew.

    Attributes:
        busy_s: spent with it.
    """

    def __init__(self, collating: Collating, *, threads: bool) -> None:
        self._collating, self._threads, self.busy_s = collating, threads, 0.0
        self._warned = False

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its content."""
        if isinstance(batch.content, Later):
            start, known = time.perf_counter(), self._collating.draws
            seeded = threading.current_thread() is threading.main_thread()
            make = partial(batch.content.make, seeded)
            batch.content = apart(make) if self._threads else make()
            self.busy_s += time.perf_counter() - start
            told = self._collating.draws if seeded else self._collating.draws is not False
            if told and not (known or self._warned):
                self._warned = True
                warn_caller(_TOLD_DRAWS if seeded else _TOLD_UNSEEDED)
        return batch


@dataclass(frozen=True)
class Making:
    """How batches are made of examples that have left the buffer.

    Attributes:
        batch_size: examples per batch.
        augment: for (items, examples); None where it came before the echo.
        collating: of their examples.
        move: takes a batch to its device.
        length: examples in a whole batch; None where examples are read.
        kept: the source keeps its batches and will give them again: they are copied for the consumer.
    """

    batch_size: int
    augment: Callable[[keyed.Items, Examples], Examples] | None
    collating: Collating
    move: Callable[[Any], Any]
    length: Callable[[Any], int] | None = None
    kept: bool = False

    def augmented(self, items: keyed.Items, examples: Examples) -> Examples:
        """Examples that have left the buffer, augmented."""
        return examples if self.augment is None or not len(items) else self.augment(items, examples)

    def examples_in(self, batches: Examples) -> int:
        """How many examples the one whole batch among these holds; 0 where these are no whole batches."""
        return 0 if self.length is None or isinstance(batches, Columns) else self.length(batches[0])

    def batch(self, items: keyed.Items, examples: Examples) -> Any:
        """One batch of its examples, or what makes it once the consumer waits for it."""
        if self.length is not None:
            assert not isinstance(examples, Columns)
            return self.move(duplicate(examples[0]) if self.kept else examples[0])
        if self.collating.is_default and isinstance(examples, Columns):
            return self.move(examples.batch())
        singles = singles_of(examples)
        if self.collating.draws is not False:
            return Later(lambda seeded: self.move(self.collating.batch(items, singles, seeded=seeded)))
        return self.move(self.collating.batch(items, singles))


class Batches:
    """Batches of what leaves a stage.

    Args:
        stage: repeats and shuffles examples; a factor of 1 only shuffles.
        pool: where its examples lie.
        making: of batches.
        reader: reads examples again that a resume finds in the buffer.
        position: where the stage stands.
        rows_of: the rows of what is held there, or ``ABSENT``.
        held: the serials of what is to be read again of that, one for each use.
        group: gives how many batches are made at once, as slices of one stack; more than 1 spares most of
            the interpreter's work where examples are small arrays.
        drop_last: leave out a short batch at the end of a pass.
    """

    def __init__(
        self,
        stage: Stage,
        pool: ExamplePool | ResidentPool,
        making: Making,
        reader: Reader,
        position: Position,
        rows_of: RowsOf,
        held: NDArray[np.int64],
        *,
        group: Callable[[], int] = lambda: 1,
        drop_last: bool = False,
    ) -> None:
        self._stage, self._pool, self.making, self._reader = stage, pool, making, reader
        self._position, self._rows_of, self._group, self._drop_last = position, rows_of, group, drop_last
        self._left = Counter(held.tolist())  # uses to leave, by serial
        self._again: dict[int, Future[dict[int, Any]]] = {}  # of which one has left, and not the last

    def claim(self) -> tuple[Outputs, Taken] | None:
        """The examples of the next batches, and which use each is; None at the end of the pass."""
        outputs = self._stage.take(self._group() * self.making.batch_size)
        if not len(outputs):
            return None
        return outputs, self._taken(outputs.items, outputs.rows)

    def _taken(self, items: keyed.Items, rows: Rows) -> Taken:
        if not self._left:
            return Taken(items, self._pool.take(rows))
        again, absent, read = [], rows == ABSENT, Future[dict[int, Any]]()
        for place, serial in enumerate((items >> keyed.ECHO_BITS).tolist()):
            if left := self._left[serial]:
                first = serial not in self._again
                its = self._again.setdefault(serial, read)
                again.append(_Again(place, serial, first, left > 1 or not first, its))
                self._left[serial] -= 1
                if left == 1:
                    del self._left[serial], self._again[serial]
        rows = rows[~absent]
        return Taken(items, self._pool.take(rows) if len(rows) else [], absent, again, read)

    def work(self, claim: tuple[Outputs, Taken]) -> list[Batch]:
        """Make the batches."""
        (outputs, taken), size, before = claim, self.making.batch_size, self._position
        items = outputs.items  # int64 [n], n up to group * batch_size
        examples = self.making.augmented(items, self._read(taken))
        length = self.making.examples_in(examples)
        batches = []
        short = len(items) % size if self._drop_last else 0
        for start in range(0, len(items) - short, size):  # slices of one stack: nothing is copied
            end = min(start + size, len(items))
            part = examples if end - start == len(items) else examples[start:end]
            index = outputs.next_index(end)
            position = before._replace(
                fresh_examples=index - before.skipped, next_index=index, examples=outputs.place(end),
                oldest=outputs.oldest,
            )  # fmt: skip
            content, reread = self.making.batch(items[start:end], part), self._num_read(taken, start, end)
            batches.append(Batch(content, position, length, reread))
        return batches

    def _read(self, taken: Taken) -> Examples:
        """All examples. What is absent is read for its first use: here, or by who has claimed that before."""
        if taken.absent is None or taken.read is None or not taken.absent.any():
            return taken.examples
        serials = sorted(use.serial for use in taken.again if use.first)
        try:
            read = self._reader.reread(np.array(serials)) if serials else []
            taken.read.set_result(dict(zip(serials, singles_of(read), strict=True)))
        except BaseException as error:
            if not taken.read.done():
                taken.read.set_exception(error)  # for who waits for it
            raise
        again = []
        for use in taken.again:
            example = use.read.result()[use.serial]
            again.append(duplicate(example) if use.shared else example)
        return interleaved(taken.examples, again, taken.absent)

    def remade(self, items: keyed.Items) -> Batch:
        """A batch made a second time."""
        taken = self._taken(items, self._rows_of(items))
        examples = self.making.augmented(items, self._read(taken))
        length = self.making.examples_in(examples)
        reread = self._num_read(taken, 0, len(items)) * (length or 1)
        return Batch(self.making.batch(items, examples), self._position, length, reread)

    def _num_read(self, taken: Taken, start: int, end: int) -> int:
        return self._reader.reads_again * sum(use.first and start <= use.place < end for use in taken.again)


@dataclass(slots=True)
class _Echoed:
    """A batch of which so many repeats are to leave; None where a resume found it: it is made again then."""

    batch: Batch | None
    left: int


class EchoedBatches:
    """... > batch > echo [> shuffle batches]: repeats whole batches (paper, section 3).

    The stage of ``order.stage`` with batches in its pool, which is this.

    Args:
        fresh: the next batch of the stage before; None at the end of the pass.
        stream: of the batches.
        position: where the pass is taken up.
        remade: makes a batch that is held there again, by its number.
    """

    def __init__(
        self,
        fresh: Callable[[], Batch | None],
        stream: Stream,
        position: Position,
        remade: Callable[[int], Batch],
    ) -> None:
        self._fresh, self._stream, self._remade = fresh, stream, remade
        self._stage = Stage(self._next_fresh, self, stream, block=1)
        self._outputs: deque[Output] = deque()  # that have left the buffer
        self._upstream = position  # of the stages before this one
        self._oldest = deque([(position.next_number, position.oldest)])  # of the examples, by batch held
        held = stream.contents(position.batches)
        self._stage.resume(position.batches, position.next_number, held, absent)
        repeats = Counter(map(stream.number, held.items.tolist()))
        self._pool = {number: _Echoed(None, left) for number, left in repeats.items()}
        self._held, self._reread, self.busy_s = position.held_examples, 0, 0.0

    def insert(self, batches: list[Batch], repeats: NDArray[np.int64]) -> NDArray[np.int64]:
        """One batch, which will leave so many times; the row of it is its number."""
        (batch,), number = batches, self._stage.next_index - 1
        if not self._pool and self._stream.size:
            check_memory(self._stream.size * num_bytes(batch.content), "batch_shuffle_buffer")
        self._pool[number] = _Echoed(batch, int(repeats[0]))
        self._held += batch.length
        return np.array([number], dtype=np.int64)

    def next(self) -> Batch | None:
        """The next repeat; None at the end of the pass."""
        if not self._outputs:
            # All repeats of a batch together. Their content is copied one by one, as they leave.
            self._outputs.extend(self._stage.take_repeats())
            if not self._outputs:
                # Where a pass is taken up while the buffer drains, nobody has met its end again, nor read the
                # remainder before it that drop_last leaves out.
                self._fresh()
                return None
        start = time.perf_counter()
        item, _, place = self._outputs.popleft()
        content = self._used(self._stream.number(item))
        position = self._upstream._replace(
            next_number=self._stage.next_index if place.drained else self._stream.number(place.last) + 1,
            batches=place, oldest=self._oldest_needed(), held_examples=self._held,
        )  # fmt: skip
        reread, self._reread = self._reread, 0
        self.busy_s += time.perf_counter() - start
        return Batch(content, position, reread=reread)

    def _used(self, number: int) -> Any:
        """The content of one repeat, which shares no memory with later ones."""
        echoed = self._pool[number]
        if echoed.batch is None:
            echoed.batch = self._remade(number)
            self._reread += echoed.batch.reread
        echoed.left -= 1
        if echoed.left:
            # The original stays for later repeats: writing into this one must not change them.
            return duplicate(echoed.batch.content)
        del self._pool[number]
        self._held -= echoed.batch.length
        return echoed.batch.content

    def _oldest_needed(self) -> int:
        """An item of the examples no later than any that the batches held are made of."""
        oldest = self._stream.number(self._stage.oldest)
        while len(self._oldest) > 1 and self._oldest[1][0] <= oldest:
            self._oldest.popleft()
        return self._oldest[0][1]

    def _next_fresh(self, count: int) -> Fresh | None:  # noqa: ARG002 (one at a time)
        batch = self._fresh()
        if batch is None:
            return None
        number, self._upstream = self._stage.next_index, batch.position
        self._oldest.append((number, batch.position.oldest))
        self._reread += batch.reread
        serials = np.array([self._stream.item_of(number) >> keyed.ECHO_BITS], dtype=np.int64)  # [1]
        return Fresh(serials, [batch], number + 1)
