"""All caches and threads from a position on, to be dropped as a whole.

The stages of each variant in the paper's order, in one thread or several, as a stream of batches. With worker
threads the queue that reads ahead lies before the echo: a bottleneck upstream must never wait for a burst of
repeats downstream.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from adaecho.echo.batch.batch_echo import EchoedBatches
from adaecho.echo.batch.batches import Batch, Batches, Claim, Making
from adaecho.echo.memory.pool import ExamplePool, ResidentPool
from adaecho.echo.memory.tree import Columns
from adaecho.echo.order.stage import RowsOf, Stage, absent
from adaecho.echo.place import Held, Position, Streams
from adaecho.echo.read.chunks import FreshQueue, Reader
from adaecho.echo.settings import Settings
from adaecho.echo.threads.timers import Counters
from adaecho.echo.threads.workers import AnyMap, InlineMap, OrderedMap, ThreadPool

DOWNSTREAM_QUEUE = 2  # more only takes memory, and the interpreter's lock from the training step
_LEAST_BLOCK = 1024  # items that may enter the buffer at once while it fills
_FREE_LOOKAHEAD = 2048  # rows planned at once where reading costs nothing


@dataclass(frozen=True)
class Parts:
    """What a run is made of, and outlives it.

    Attributes:
        settings, streams, reader, making: of the loader.
        claim: of the reader, maybe timed.
        resident: the source's rows, where they lie in memory and are not copied until they leave the buffer.
        rows_of: their rows, by item.
        group: batches made at once.
        num_workers, prefetch: threads, and batches read ahead of the echo.
    """

    settings: Settings
    streams: Streams
    reader: Reader
    making: Making
    claim: Callable[[int], Any]
    resident: Columns | None
    rows_of: RowsOf
    group: int
    num_workers: int
    prefetch: int


class Run:
    """Batches from a position on.

    Args:
        parts: of the loader.
        position: where it begins, at which the reader stands.
        held: what the buffers hold there.

    Attributes:
        pool: the threads; None inline.
        queue: of fresh examples.
    """

    def __init__(self, parts: Parts, position: Position, held: Held) -> None:
        self._parts = parts
        streams, reader = parts.streams, parts.reader
        self.queue = FreshQueue(parts.claim, reader.work, streams.log.bad, position.next_index)
        self.pool = ThreadPool(reader.release) if parts.num_workers else None
        # read > decode > [augment >] [echo >] shuffle > [augment >] batch [> echo > shuffle batches]
        self._batches = self._made(position, held)
        self._map = self._connected()
        self._following: deque[Batch] = deque()  # made at once with the one before
        self._echo: EchoedBatches | None = None
        if streams.echoes_batches:
            self._echo = EchoedBatches(
                self._next_made, streams.batches(position), position,
                lambda number: self._batches.remade(held.batches.pop(number)),
            )  # fmt: skip

    def _made(self, position: Position, held: Held) -> Batches:
        """The middle stages: [echo >] shuffle > [augment >] batch."""
        parts, settings = self._parts, self._parts.settings
        block = max(settings.batch_size or 1, _LEAST_BLOCK)
        pool: ExamplePool | ResidentPool = ExamplePool(settings.shuffle_buffer, block)
        rows, lookahead = 0, 1
        rows_of: RowsOf = absent
        if parts.resident is not None:
            pool = ResidentPool(parts.resident)
            rows, lookahead, rows_of = len(parts.resident), _FREE_LOOKAHEAD, parts.rows_of
        stream = parts.streams.examples(position)
        stage = Stage(self.queue.take, pool, stream, rows=rows, block=block, lookahead=lookahead)
        stage.resume(position.examples, position.next_index, held.examples, rows_of)
        return Batches(
            stage, pool, parts.making, parts.reader, group=parts.group, drop_last=settings.drop_last,
            skipped=position.skipped, fresh_examples=position.fresh_examples,
            absent=len(held.examples.items) if rows_of is absent else 0,
        )  # fmt: skip

    def _connected(self) -> AnyMap:
        """Let threads read, and make batches; gives the latter's map."""
        parts, batches = self._parts, self._batches
        batch_map: AnyMap
        if self.pool is None:
            batch_map = InlineMap(batches.claim, batches.work)
        else:
            workers, size = parts.num_workers, parts.making.batch_size
            if parts.resident is None and not parts.streams.whole:
                small = math.ceil(size / (2 * workers))
                chunk = parts.group * size if parts.group > 1 else small
                window = math.ceil(parts.prefetch * size / chunk) + workers
                claim = partial(parts.claim, chunk)
                self.queue.read_ahead(
                    OrderedMap(
                        self.pool, claim, parts.reader.work, threads=workers, window=window, name="read"
                    )
                )
            ahead = parts.prefetch if parts.settings.variant.batches_upstream else DOWNSTREAM_QUEUE
            threads = 1 if parts.streams.whole else workers
            batch_map = OrderedMap(
                self.pool, batches.claim, self._make_ahead, threads=threads, window=ahead + threads - 1,
                name="batch",
            )  # fmt: skip
        batch_map.upstream = self.queue.map
        return batch_map

    def _make_ahead(self, claim: Claim) -> list[Batch]:
        batches = self._batches.work(claim)
        if self._echo is not None:
            self._echo.copy_ahead(batches)
        return batches

    def _next_made(self) -> Batch | None:
        """The next batch before an echo of batches; None after the last."""
        if not self._following:
            self._following.extend(self._map.get() or ())
        return self._following.popleft() if self._following else None

    def next(self) -> Batch | None:
        """The next batch; None at the end of the pass. Starts the threads it needs."""
        if self.pool is not None:
            self.pool.go()
        try:
            return self._next_made() if self._echo is None else self._echo.next()
        except StopIteration as error:
            raise RuntimeError(
                "__getitem__, decode, augment or collate raised StopIteration (see above), which would end "
                "the loop as if there were no more batches"
            ) from error

    def stop(self) -> None:
        """Let the threads end after the work in their hands, and let go of what can be opened again."""
        if self.pool is None:
            self._parts.reader.release()
        else:
            self.pool.stop()

    def counters(self) -> Counters:
        """What has been done so far."""
        read, batches = self.queue.map, self._map
        fresh_batches = self.queue.examples / self._parts.making.batch_size
        # Inline reading is a part of claiming a batch.
        inline_s = read.claim_s + read.work_s if isinstance(read, InlineMap) else 0.0
        read_s = (inline_s, 0.0) if isinstance(read, InlineMap) else _bounds(read)
        if self._parts.settings.variant.batches_upstream:
            echoed_s = 0.0 if self._echo is None else self._echo.busy_s
            return Counters((*read_s, *_bounds(batches, inline_s)), (echoed_s, 0.0), fresh_batches)
        return Counters((*read_s, 0.0, 0.0), _bounds(batches), fresh_batches)


def _bounds(stage: AnyMap, inline_s: float = 0.0) -> tuple[float, float]:
    """A stage takes as long as claiming does, in one thread at a time, or all its work over its threads.

    Args:
        stage: with its times.
        inline_s: of another stage, spent within its claims.
    """
    claim_s = stage.claim_s + inline_s
    return claim_s, (claim_s + stage.work_s) / stage.wanted
