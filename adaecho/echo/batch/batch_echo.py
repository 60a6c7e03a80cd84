"""The echo of whole batches: the stage of ``order.stage`` with batches in its pool."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.batch.batches import Batch
from adaecho.echo.memory.budget import check_memory
from adaecho.echo.memory.tree import duplicate, duplicate_many, num_bytes
from adaecho.echo.order import keyed
from adaecho.echo.order.stage import ABSENT, Fresh, Output, Stage, absent
from adaecho.echo.order.stream import Place, Stream
from adaecho.echo.place import Position

_COPIED_AHEAD_BYTES = 1 << 21  # of one batch: more would take memory that nobody has asked for

Remade = Callable[[int], tuple[Any, int, int]]
"""Of the number of a fresh batch: it made again, how many examples were read for that, and its length."""


class _BatchPool:
    """Whole batches by number, each with the copies made ahead for its repeats; a row is a number.

    Args:
        held: examples in batches that lie here, or will when they have been made again.
    """

    def __init__(self, held: int) -> None:
        self.held = held
        self._lengths: dict[int, int] = {}
        self._batches: dict[int, Any] = {}
        self._copies: dict[int, list[Any]] = {}
        self._left: dict[int, int] = {}  # repeats to leave

    def insert(
        self, batches: list[tuple[int, Any, int, list[Any]]], repeats: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """One batch, with its number, its length and its copies; it will leave so many times."""
        ((number, content, length, copies),) = batches
        self.put(number, content, length, int(repeats[0]), copies)
        self.held += length
        return np.array([number], dtype=np.int64)

    def put(self, number: int, content: Any, length: int, repeats: int, copies: list[Any]) -> None:
        """One batch, which will leave so many times."""
        self._lengths[number] = length
        self._batches[number], self._copies[number], self._left[number] = content, copies, repeats

    def use(self, number: int) -> Any:
        """One use, sharing no memory with later ones."""
        self._left[number] -= 1
        if not self._left[number]:
            del self._left[number], self._copies[number]
            self.held -= self._lengths.pop(number)
            return self._batches.pop(number)
        # The original stays for later repeats: writing into this one must not change them.
        return self._copies[number].pop() if self._copies[number] else duplicate(self._batches[number])


class EchoedBatches:
    """... > batch > echo [> shuffle batches]: repeats whole batches (paper, section 3).

    Args:
        fresh: the next batch of the stage before; None at the end of the pass.
        stream: of the batches.
        position: where the pass is taken up.
        remade: makes a held batch again.
    """

    def __init__(
        self,
        fresh: Callable[[], Batch | None],
        stream: Stream,
        position: Position,
        remade: Remade,
    ) -> None:
        self._fresh, self._stream, self._remade = fresh, stream, remade
        self._pool = _BatchPool(position.held_examples)
        self._stage = Stage(self._next_fresh, self._pool, stream, block=1)
        self._outputs: deque[Output] = deque()  # that have left the buffer
        self._upstream = Batch(  # where the stages before this one stand
            None, position.examples, position.next_index, position.fresh_examples, position.oldest
        )
        self._oldest = deque([(position.next_number, position.oldest)])  # of the examples, by batch held
        held = stream.contents(position.batches)
        self._stage.resume(position.batches, position.next_number, held, absent)
        numbers, left = np.unique((held.items >> keyed.ECHO_BITS) // stream.world, return_counts=True)
        self._absent = dict(zip(numbers.tolist(), left.tolist(), strict=True))  # repeats left, by number
        self.busy_s, self._reread, self._checked = 0.0, 0, not stream.size

    def copy_ahead(self, batches: list[Batch]) -> None:
        """Copies of small batches for their repeats, made where they are made, beside the step."""
        size = max((num_bytes(batch.content) for batch in batches), default=0)
        if size:
            for _ in range(min(math.ceil(self._stream.factor.value) - 1, _COPIED_AHEAD_BYTES // size)):
                # Each call of torch gives the interpreter's lock away: one for many batches.
                copies = duplicate_many([batch.content for batch in batches])
                for batch, copied in zip(batches, copies, strict=True):
                    batch.copies.append(copied)

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
        item, row, place = self._outputs.popleft()
        number, upstream = self._stream.number(item), self._upstream
        repeat = Batch(
            None, upstream.place, upstream.next_index, upstream.fresh_examples, self._oldest_needed(),
            next_number=self._number_after(place), batch_place=place,
        )  # fmt: skip
        repeat.reread_examples, self._reread = self._reread, 0
        if row == ABSENT and number in self._absent:
            content, reread, length = self._remade(number)
            repeat.reread_examples += reread
            self._pool.put(number, content, length, self._absent.pop(number), [])
        repeat.content, repeat.held_examples = self._pool.use(number), self._pool.held
        self.busy_s += time.perf_counter() - start
        return repeat

    def _number_after(self, place: Place) -> int:
        return self._stage.next_index if place.drained else self._stream.number(place.last) + 1

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
        if not self._checked:
            self._checked = True
            check_memory(self._stream.size * num_bytes(batch.content), "batch_shuffle_buffer")
        number = self._stage.next_index
        self._oldest.append((number, batch.oldest))
        self._reread += batch.reread_examples
        contents = [(number, batch.content, batch.held_examples, batch.copies)]
        batch.content, batch.copies, self._upstream = None, [], batch
        serials = np.array([self._stream.item_of(number) >> keyed.ECHO_BITS], dtype=np.int64)  # [1]
        return Fresh(serials, contents, number + 1)
