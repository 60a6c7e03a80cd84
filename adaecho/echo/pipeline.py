"""What a loader keeps as long as it lives, and its run: all caches and threads from a position on.

The stages of each variant in the paper's order, in one thread or several, as a stream of batches. With worker
threads the queue that reads ahead lies before the echo: a bottleneck upstream must never wait for a burst of
repeats downstream.
"""

import _thread
import atexit
import math
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from adaecho.echo.batch.augment import Functions, Origin
from adaecho.echo.batch.batches import Batch, Batches, Collating, Completing, EchoedBatches, Making
from adaecho.echo.batch.owners import Owners
from adaecho.echo.batch.whole import ToDevice, batch_length
from adaecho.echo.memory.budget import check_slots
from adaecho.echo.memory.pool import ExamplePool, ResidentPool
from adaecho.echo.order import keyed
from adaecho.echo.order.permutation import Permutation
from adaecho.echo.order.stage import RowsOf, Stage, absent
from adaecho.echo.read import Source
from adaecho.echo.read.around import IterableSource
from adaecho.echo.read.chunks import FreshQueue, Preparation, Reader
from adaecho.echo.read.failures import warn_caller
from adaecho.echo.read.rows import ArraySource, MapSource, RandomReader
from adaecho.echo.read.sequential import SequentialReader
from adaecho.echo.settings import Settings, check_workers, order_of, refuse
from adaecho.echo.state import VERSION, Held, Position, Streams, Told
from adaecho.echo.threads.processes import can_fork
from adaecho.echo.threads.timers import Counters
from adaecho.echo.threads.workers import InlineMap, OrderedMap, ThreadPool, apart

DOWNSTREAM_QUEUE = 2  # more only takes memory, and the interpreter's lock from the training step
_LEAST_BLOCK = 1024  # items that may enter the buffer at once while it fills
_FREE_LOOKAHEAD = 2048  # rows planned at once where reading costs nothing
_EXIT_WAIT_S = 10.0  # for a source that does not answer, when the process ends
_OPEN: dict["Pipeline", int] = {}  # what a process's exit has to close, by the order of its making


class Pipeline:
    """The parts of one loader, and the run that is made of them.

    Args:
        source: where examples come from.
        settings, functions: of the loader.
        sampler: an order of rows, or None.
        device: where batches go.
        num_workers: threads.
        prefetch: batches read ahead of the echo; None for two of each worker, if memory has them.
        processes: workers are processes.

    Attributes:
        streams: of the loader.
        source_length: of what is not only iterated.
        permutation: how that is permuted (``Permutation.method``).
        run: that stands at the consumer's position; None where it has been given up.
        noted: the consumer's position and what the reader told of it, while that may be elsewhere.
        moves: how often that began, times two; odd while the log is exchanged.
    """

    def __init__(
        self,
        source: Source,
        settings: Settings,
        functions: Functions,
        sampler: Any,
        device: ToDevice,
        *,
        num_workers: int,
        prefetch: int | None,
        processes: bool = False,
    ) -> None:
        self.source, self.settings, self.streams = source, settings, Streams(settings)
        self.num_workers, self.prefetch = max(check_workers(num_workers), int(processes)), prefetch
        self._processes = processes or (bool(num_workers) and functions.draws)
        self._one_place, self._warned = functions.draws, False  # where processes can't be had
        refuse(
            processes and settings.batch_size is None,
            "processes=True with batch_size=None: the source makes whole batches; give it num_workers=",
        )
        example_bytes = 0  # rows in memory are not copied, and others than a memory map's tell it later
        if isinstance(source, ArraySource) and functions.decode is None and not source.resident:
            example_bytes = source.arrays.example_bytes
        check_slots(settings.shuffle_buffer, example_bytes, "shuffle_buffer")
        check_slots(settings.batch_shuffle_buffer, 0, "batch_shuffle_buffer")
        order = None if isinstance(source, IterableSource) else order_of(source, settings, sampler)
        self.source_length = None if isinstance(source, IterableSource) else source.length
        self.permutation = "drawn" if order is None else order.method
        origin = _origin_of(source, order)
        peek = partial(source.peek, 0, self.num_workers) if isinstance(source, MapSource) else None
        place = functions.choose_place(peek)
        before, after = functions.around_the_buffer(place, origin)
        length = (functions.batch_length or batch_length) if self.streams.whole else None
        collating = Collating(functions.collate, settings.seed, origin, workers=self.num_workers > 0)
        self.making = Making(
            self.streams.batch_size, after, collating, device.move, length, kept=isinstance(source, MapSource)
        )
        self.resident, self.group = None, 1  # the source's rows, where they need not be copied into a pool
        if isinstance(source, ArraySource):
            self.resident = source.arrays if source.resident and before == Preparation() else None
            if before.decode is None and place == "decoded":
                self.group = source.batches_at_once(self.streams.batch_size)
        if length is not None:
            before = replace(before, stacked=False, length=length)
        self.reader = self._reader(order, before)
        self.run: Run | None = None
        self.noted: tuple[Position, Told] | None = None
        self.moves = 0
        self._newest: Run | None = None
        self._read_before = 0  # examples, by runs that were dropped
        self._closing, self._closed = threading.Lock(), False
        _OPEN[self] = os.getpid()

    def _reader(self, order: Permutation | None, preparation: Preparation) -> Reader:
        """The first stage: read > decode [> augment]."""
        settings, rank, world = self.settings, self.streams.rank, self.streams.world
        if isinstance(self.source, IterableSource):
            return SequentialReader(
                self.source, preparation, rank=rank, world=world, check_length=settings.check_filling
            )
        assert order is not None
        return RandomReader(
            self.source, order, preparation, rank=rank, world=world, resident=self.resident is not None,
            seed=settings.seed, num_workers=self.num_workers, processes=self._processes,
        )  # fmt: skip

    def workers(self) -> tuple[int, bool]:
        """How many, and whether they are processes."""
        draws = getattr(self.source, "draws", False) and not isinstance(self.source, IterableSource)
        wanted = bool(self.num_workers) and (self._processes or draws)
        if not wanted or can_fork():
            return self.num_workers, wanted
        one_place = self._one_place or draws
        if not self._warned:
            self._warned = True
            warn_caller(
                "processes can't be forked here: "
                + ("what draws from the global generators works in one place, as with num_workers=0"
                   if one_place else "workers are threads")
            )  # fmt: skip
        return (0 if one_place else self.num_workers), False

    def begin(self, position: Position, iteration: int) -> tuple[Position, "Run"]:
        """Begin an iteration, giving up the one before if it hasn't ended: where it is, and its run."""
        self._leave(position)
        abandoned_at = position.next_index if position.in_pass else None
        index = self.reader.begin(iteration, self.settings.epochs, abandoned_at)
        if iteration > 1 and not position.iteration and not index:
            warn_caller(
                f"set_epoch({iteration - 1}) of a new EchoLoader around what is only iterated: how many "
                "examples came before isn't known: it draws as in epoch 0; load a state, or give another seed"
            )
        self.streams.log.begin(index)
        position = position.begun(iteration, index)
        self._newest = Run(self, position, Held())
        return position, self._newest

    def resume(self, position: Position) -> tuple[Position, "Run"]:
        """Take up a position: where it is with what has been read again, and a run from there on."""
        progress, witnesses = self._leave(position)
        held = self.streams.held(position)
        self.reader.witnesses.expect(witnesses)
        reread = self.reader.resume(
            position.next_index, position.iteration, self.settings.epochs, held.serials, progress
        )
        position = position._replace(reread_examples=position.reread_examples + reread)
        self._newest = Run(self, position, held)
        return position, self._newest

    def _leave(self, position: Position) -> Told:
        """Drop the run, and what it was ahead of a position; what the reader told of that."""
        if self.noted is None:  # before the reader moves
            self.noted = position, self.told(position)
            self.moves += 2
        self._drop()
        self.streams.log.go_back(position)
        return self.noted[1]

    def told(self, position: Position) -> Told:
        """What the reader tells of a position, while it is not elsewhere."""
        index, streams = position.next_index, self.streams
        # Only what is iterated needs to know, and to look for the oldest takes a while.
        iterated = isinstance(self.source, IterableSource)
        oldest = streams.oldest_serial(position) if iterated else 0
        # Between two iterations rows may be shared out otherwise, and come in another order.
        progress = self.reader.progress(oldest, index) if iterated or position.in_pass else []
        return progress, self.reader.witnesses.before(index * streams.world)

    def state(self, position: Callable[[], Position]) -> dict[str, Any]:
        """What a loader of the same settings and source needs to go on from a position: plain values.

        Any thread may ask: one that meets the consumer's as that begins an iteration tries again.
        """
        while True:
            moves, noted = self.moves, self.noted
            try:
                now = position() if noted is None else noted[0]
                state = self._state(now, self.told(now) if noted is None else noted[1])
            except Exception:
                if moves == self.moves and not moves % 2:
                    raise
            else:
                if moves == self.moves and not moves % 2:
                    return state

    def _state(self, position: Position, told: Told) -> dict[str, Any]:
        progress, witnesses = told
        return {
            "version": VERSION,
            "settings": self.settings.plain(),
            "source_length": self.source_length,
            "permutation": self.permutation,
            **self.streams.state(position),
            "progress": progress,
            "witnesses": witnesses,
        }

    def restore(self, state: dict[str, Any]) -> Position:
        """The position of a state, which has been checked; the log is as it was there, the run given up."""
        position, log = self.streams.restored(state)
        self.run = None
        # At once, for threads that ask for the state meanwhile.
        self.moves += 1
        self.streams.log, self.noted = log, (position, (state["progress"], state["witnesses"]))
        self.moves += 1
        return position

    @property
    def examples_read(self) -> int:
        """Examples that have gone into the pipeline."""
        return self._read_before + (0 if self._newest is None else self._newest.queue.examples)

    @property
    def pool(self) -> ThreadPool | None:
        """The threads, if there are any."""
        return None if self._newest is None else self._newest.pool

    @property
    def owners(self) -> Owners | None:
        """The processes, if there are any."""
        return None if self._newest is None else self._newest.owners

    def counters(self) -> Counters:
        """What has been done so far."""
        return Counters((0.0,) * 4, (0.0, 0.0), 0.0) if self._newest is None else self._newest.counters()

    def stop(self) -> None:
        """Let the threads end after the work in their hands, and let go of what can be opened again."""
        if self.pool is not None:
            self.pool.stop()
        elif self._newest is not None:
            self.reader.release()

    def _drop(self) -> None:
        """End all threads, and forget what they were ahead."""
        if self.pool is not None:
            self.pool.stop()
            self.pool.join()
        if self.owners is not None:
            self.owners.close()
        self._read_before, self._newest, self.run = self.examples_read, None, None

    def close(self, wait_s: float | None = None) -> None:
        """End all threads and let go of the source.

        Threads that are in a call of the source's after ``wait_s`` are left there, with a warning: nothing
        can end them, and they end with the process.
        """
        pool = self.pool
        if pool is not None:
            pool.closing = True
            pool.stop()
            in_time = pool.join(wait_s)
            if not in_time and self.owners is not None:
                self.owners.kill()
                in_time = pool.join(wait_s)
            if not in_time:
                _OPEN.pop(self, None)
                warnings.warn(
                    f"the source has not answered a reading thread for {wait_s:g} s: it is left behind",
                    RuntimeWarning,
                    stacklevel=3,
                )
                return
        with self._closing:  # the thread of `forgotten` may be at it when the process ends
            if self._closed:
                return
            self._closed = True
            try:
                self._drop()
                self.reader.close()
            finally:
                _OPEN.pop(self, None)

    def forgotten(self) -> None:
        """The garbage collector has come to the loader: close, and wait for no thread here.

        The collector may run anywhere: in one of these threads, or in one that holds a lock which they, or
        ``threading`` for them, have to take before they can end.
        """
        if self.pool is None:
            self.close()
            return
        try:
            _thread.start_new_thread(self.close, ())
        except RuntimeError:  # none can be had
            self.close(_EXIT_WAIT_S)


@atexit.register
def _close_all() -> None:
    """Close every pipeline of this process, before daemon threads would be cut off in the middle."""
    for pipeline, process in reversed(list(_OPEN.items())):
        pool = pipeline.pool  # a forked child may have started the threads of what was made before
        if process == os.getpid() or (pool is not None and pool.started_here):
            pipeline.close(_EXIT_WAIT_S)


class Run:
    """Batches from a position on.

    Args:
        parts: of the loader.
        position: where it begins, at which the reader stands.
        held: what the buffers hold there.

    Attributes:
        pool: the threads; None inline.
        owners: the processes; None without.
        queue: of fresh examples.
    """

    def __init__(self, parts: Pipeline, position: Position, held: Held) -> None:
        self._parts, self._reread, self._in_whole = parts, position.reread_examples, position.fresh_examples
        streams, reader = parts.streams, parts.reader
        self._workers, processes = parts.workers()
        self.owners: Owners | None = None
        if processes:
            self.owners = Owners(
                self._workers, reader, parts.making, world=streams.world,
                buffered=parts.settings.shuffle_buffer, resident=parts.resident,
            )  # fmt: skip
        self._read = reader.work if self.owners is None else self.owners.read
        self.queue = FreshQueue(reader.claim, self._read, streams.log.bad, position.next_index)
        self.pool = ThreadPool(self._released) if self._workers else None
        # read > decode > [augment >] [echo >] shuffle > [augment >] batch [> echo > shuffle batches]
        self._batches = self._made(position, held)
        self._map = self._connected()
        self._following: deque[Batch] = deque()  # made at once with the one before
        self._completed = Completing(parts.making.collating, threads=self.pool is not None)
        self._echo: EchoedBatches | None = None
        if streams.echoes_batches:
            self._echo = EchoedBatches(
                self._next_made, streams.batches(position), position,
                lambda number: self._remade(held.batches.pop(number)),
            )  # fmt: skip

    def _remade(self, items: Any) -> Batch:
        remade = partial(self._batches.remade, items)
        return self._completed(remade() if self.owners is None else apart(remade))

    def _released(self) -> None:
        """No thread works any more, after a stop."""
        self._parts.reader.release()
        if self.owners is not None and not isinstance(self._parts.source, IterableSource):
            self.owners.close()  # what they have can be read again

    def _made(self, position: Position, held: Held) -> Batches:
        """The middle stages: [echo >] shuffle > [augment >] batch."""
        parts, settings = self._parts, self._parts.settings
        block = max(settings.batch_size or 1, _LEAST_BLOCK)
        pool: Any = ExamplePool(settings.shuffle_buffer, block)
        making, at_once = parts.making, lambda: parts.group
        rows, lookahead, again = 0, 1, held.serials
        rows_of: RowsOf = absent
        if self.owners is not None:
            pool, rows, rows_of = self.owners.pool, self.owners.pool.rows, self.owners.tokens_of
            making, at_once = replace(making, augment=self.owners.augmented), self.owners.batches_at_once
            self.owners.hold(again)
        if parts.resident is not None and isinstance(parts.reader, RandomReader):
            lookahead, again = _FREE_LOOKAHEAD, keyed.NO_ITEMS
            if self.owners is None:
                pool, rows_of, rows = ResidentPool(parts.resident), parts.reader.rows, len(parts.resident)
        stream = parts.streams.examples(position)
        stage = Stage(self.queue.take, pool, stream, rows=rows, block=block, lookahead=lookahead)
        stage.resume(position.examples, position.next_index, held.examples, rows_of)
        return Batches(
            stage, pool, making, parts.reader, position, rows_of, again, group=at_once,
            drop_last=settings.drop_last,
        )  # fmt: skip

    def _connected(self) -> InlineMap[Any, Any]:
        """Let threads read, and make batches; gives the latter's map."""
        parts, batches = self._parts, self._batches
        batch_map: InlineMap[Any, Any]
        if self.pool is None:
            batch_map = InlineMap(batches.claim, batches.work)
        else:
            workers, size = self._workers, parts.making.batch_size
            # A worker has half a batch's share at a time; a process four times that, since each crossing
            # costs, and another before it while it works on one.
            readers, makers, share = workers, workers, 0.5
            if self.owners is not None:
                readers, makers, share = 2 * workers, workers + 1, 2.0
            if parts.resident is None and not parts.streams.whole:
                grouped = parts.group > 1 and self.owners is None
                chunk = parts.group * size if grouped else math.ceil(size * share / workers)
                first = DOWNSTREAM_QUEUE if parts.prefetch is None else parts.prefetch
                window = math.ceil(first * size / chunk) + readers
                claim = partial(parts.reader.claim, chunk)
                self.queue.map = OrderedMap(
                    self.pool, claim, self._read, threads=readers, window=window, name="read",
                    at_once=workers,
                )  # fmt: skip
                self.queue.more = 0 if parts.prefetch is not None else 2 * (workers - 1) * size
            ahead = DOWNSTREAM_QUEUE
            if parts.prefetch is not None and parts.settings.variant.batches_upstream:
                ahead = parts.prefetch
            threads = 1 if parts.streams.whole else makers
            batch_map = OrderedMap(
                self.pool, batches.claim, batches.work, threads=threads, window=ahead + threads - 1,
                name="batch", at_once=min(threads, workers),
            )  # fmt: skip
        batch_map.upstream = self.queue.map
        return batch_map

    def _next_made(self) -> Batch | None:
        """The next batch before an echo of batches; None after the last."""
        if not self._following:
            self._following.extend(self._map.get() or ())
        if not self._following:
            return None
        batch = self._completed(self._following.popleft())
        if self._parts.streams.whole:  # whose lengths are not known before they come
            self._in_whole += batch.length
            batch.position = batch.position._replace(fresh_examples=self._in_whole)
        return batch

    def next(self) -> Batch | None:
        """The next batch; None at the end of the pass. Starts the threads it needs."""
        if self.pool is not None:
            if self.owners is not None and self.pool.stopping:
                self.pool.join()  # a fork would copy what they hold
                self.owners.begin()
            self.pool.go()
        try:
            batch = self._next_made() if self._echo is None else self._echo.next()
        except StopIteration as error:
            raise RuntimeError(
                "__getitem__, decode, augment or collate raised StopIteration (see above), which would end "
                "the loop as if there were no more batches"
            ) from error
        if batch is not None:
            self._reread += batch.reread
            if self._reread != batch.position.reread_examples:
                batch.position = batch.position._replace(reread_examples=self._reread)
        return batch

    def counters(self) -> Counters:
        """What has been done so far."""
        read, batches = self.queue.map, self._map
        fresh_batches = self.queue.examples / self._parts.making.batch_size
        # Inline reading is a part of claiming a batch.
        ahead = isinstance(read, OrderedMap)
        inline_s, completed_s = 0.0 if ahead else read.claim_s + read.work_s, self._completed.busy_s
        read_s = _bounds(read) if ahead else (inline_s, 0.0)
        if self._parts.settings.variant.batches_upstream:
            echoed_s = 0.0 if self._echo is None else self._echo.busy_s
            made_s = _bounds(batches, inline_s + completed_s)
            return Counters((*read_s, *made_s), (echoed_s, 0.0), fresh_batches)
        return Counters((*read_s, 0.0, 0.0), _bounds(batches, completed_s), fresh_batches)


def _bounds(stage: InlineMap[Any, Any], inline_s: float = 0.0) -> tuple[float, float]:
    """A stage takes as long as claiming does, in one thread at a time, or all its work over its threads.

    Args:
        stage: with its times.
        inline_s: of what else one thread does at a time, as inline reading.
    """
    claim_s = stage.claim_s + inline_s
    return claim_s, (claim_s + stage.work_s) / stage.at_once


def _origin_of(source: Source, order: Permutation | None) -> Origin:
    def origin(serial: int) -> str:
        return source.origin(serial if order is None else int(order.rows(np.array([serial]))[0]))

    return origin
