"""The permanent parts of a loader (``Pipeline``), and its threads, processes and buffers (``Run``).

After an error, or to resume from a state, the loader discards its ``Run`` and creates another.
"""

import _thread
import atexit
import json
import math
import os
import threading
import warnings
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from adaecho.echo.batch.augment import Functions, Origin
from adaecho.echo.batch.batches import Batch, BatchBuilder, Batches, Collator, EchoedBatches
from adaecho.echo.batch.device import ToDevice, batch_length
from adaecho.echo.batch.process_workers import WorkerProcesses, can_fork
from adaecho.echo.memory.pool import ExamplePool, ResidentPool, check_memory
from adaecho.echo.order import keyed
from adaecho.echo.order.permutation import Permutation
from adaecho.echo.order.stage import EchoStage
from adaecho.echo.order.stream import Rows
from adaecho.echo.read import Reader, Source
from adaecho.echo.read.chunks import PrefetchQueue, Preparation, ReaderState, warn_caller
from adaecho.echo.read.iterables import IterableSource
from adaecho.echo.read.rows import ArraySource, MapSource, RandomReader
from adaecho.echo.read.sequential import SequentialReader
from adaecho.echo.settings import Settings, order_of, refuse, whole
from adaecho.echo.state import VERSION, Held, LoaderCursor, Streams
from adaecho.echo.threads import InlineMap, OrderedMap, ThreadPool

DOWNSTREAM_QUEUE = 2  # batches made ahead; more would take memory and compete with the step for the GIL
_LEAST_BLOCK = 1024  # smallest number of items that enter the buffer at once while it fills
_FREE_LOOKAHEAD = 2048  # rows planned at once for arrays in memory, for which reading ahead costs nothing
_SLOT_BYTES = 16  # bytes in a buffer for the identity and the row of each item
CLOSE_WAIT_S = 10.0  # longest time to wait for a call to the source
# The pipelines to close at exit, in order of creation, each with the id of the process that created it.
_OPEN: dict["Pipeline", int] = {}
_NO_FORK = (
    "num_workers: the dataset, decode or augment does not declare thread_safe = True, and this platform "
    "cannot fork worker processes, so all work is inline, as with num_workers=0; to use threads, declare "
    "thread_safe = True on code that threads may call in parallel"
)


class Counters(NamedTuple):
    """How long the stages of a loader have worked so far, and how many batches they have read."""

    # For each stage, two lower bounds on its time so far, in seconds (see ``_bounds``). The stages work in
    # parallel, so the largest of all bounds is the time of the slowest stage.
    upstream_s: tuple[float, ...]  # of the stages before the echo
    own_s: tuple[float, ...]  # of the stages after the echo
    fresh_batches: float  # number of fresh examples read so far, divided by the batch size


class Pipeline:
    """The parts that a loader keeps for its whole lifetime, such as its source and its reader."""

    def __init__(
        self,
        source: Source,
        settings: Settings,
        functions: Functions,
        sampler: Any,
        device: ToDevice,
        *,
        num_workers: int,
        prefetch: int | None,  # number of batches to read before the echo; None for two per worker
        processes: bool = False,  # whether to use processes even for thread-safe code
    ) -> None:
        # The streams determine how examples and batches are repeated and shuffled.
        self.source, self.settings, self.streams = source, settings, Streams(settings)
        self.num_workers, self.prefetch = max(whole("num_workers", num_workers, 0), int(processes)), prefetch
        # Only one thread decodes whole batches, so ``decode`` need not be thread-safe for them.
        thread_safe = source.thread_safe and (self.streams.whole or functions.thread_safe)
        # Whether the workers are processes instead of threads.
        self.processes = self.num_workers > 0 and (processes or not thread_safe) and can_fork()
        if self.num_workers and not (thread_safe or self.processes):
            self.num_workers = 0
            warn_caller(_NO_FORK)
        refuse(
            processes and settings.batch_size is None,
            "processes=True with batch_size=None: the source yields whole batches; set num_workers= there",
        )
        # The size of the examples is checked once the first ones have been read.
        check_memory(_SLOT_BYTES * settings.shuffle_buffer)
        check_memory(_SLOT_BYTES * settings.batch_shuffle_buffer, "batch_shuffle_buffer")
        order = None if isinstance(source, IterableSource) else order_of(source, settings, sampler)
        self.source_length = None if isinstance(source, IterableSource) else source.length
        origin = _origin_of(source, order)
        before, after = functions.split_at_buffer(origin)
        length = (functions.batch_length or batch_length) if self.streams.whole else None
        collating = Collator(functions.collate, settings.seed, origin)
        self.builder = BatchBuilder(
            self.streams.batch_size, after, collating, device.move, length, copy=isinstance(source, MapSource)
        )
        # If the source's rows can serve as the pool, no examples are copied.
        self.resident, self.group = None, 1
        if isinstance(source, ArraySource) and not self.processes:
            self.resident = source.arrays if source.resident and before == Preparation() else None
            if functions.decode is None:
                self.group = source.batches_at_once(self.streams.batch_size)
        if length is not None:
            before = replace(before, stacked=False, length=length)
        self.reader = self._reader(order, before)
        # Makes the next batch. None while it is making one, and after it has been discarded.
        self.run: Run | None = None
        # Set while the reader moves to another position. If an interrupt stops it, ``state`` returns the
        # position and the reader's state from before the move.
        self.left: tuple[LoaderCursor, ReaderState] | None = None
        self._newest: Run | None = None
        self._read_before = 0  # number of examples that earlier runs have read
        self._closing = threading.Lock()
        # Only this variant promises new random numbers for each repeat. The others repeat the augmented
        # example or the batch, or repeat nothing.
        self._draw_once = settings.echo == "example_before_augmentation" and settings.factor != 1
        _OPEN[self] = os.getpid()

    def _reader(self, order: Permutation | None, preparation: Preparation) -> Reader:
        """Create the stage that reads, decodes and, in some variants, augments examples."""
        settings, rank, world = self.settings, self.streams.rank, self.streams.world
        if isinstance(self.source, IterableSource):
            return SequentialReader(self.source, preparation, rank=rank, world=world)
        assert order is not None
        return RandomReader(
            self.source, order, preparation, rank=rank, world=world, resident=self.resident is not None,
            seed=settings.seed,
        )  # fmt: skip

    def reason_to_wait(self) -> str:
        """Return text for a log line: what the next batch is waiting for."""
        return f"{self.source.name}: {'reading again' if self._newest is None else self._newest.progress()}"

    def warn_of_draws(self) -> None:
        """Warn once that the dataset draws random numbers before the echo, so repeats share them."""
        if self._draw_once:
            self._draw_once = False
            warn_caller(
                f"source: {self.source.name} draws random numbers when it reads an example, and echoing "
                "repeats them; pass its random transform as augment=, so that each repeat draws new ones"
            )

    def begin(self, position: LoaderCursor, iteration: int) -> tuple[LoaderCursor, "Run"]:
        """Abandon the current iteration, and begin iteration number ``iteration``, counted from 1."""
        self._leave(position)
        abandoned_at = position.next_index if position.in_pass else None
        index = self.reader.begin(iteration, self.settings.epochs, abandoned_at)
        if iteration > 1 and not position.iteration and not index:
            warn_caller(
                f"set_epoch({iteration - 1}) of a new EchoLoader around an iterable: the number of earlier "
                "examples is unknown, so it draws as in epoch 0; load a state, or pass a different seed"
            )
        self.streams.log.begin(index)
        position = position.begun(iteration, index)
        self._newest = Run(self, position, Held())
        return position, self._newest

    def resume(self, position: LoaderCursor) -> tuple[LoaderCursor, "Run"]:
        """Move the reader to a position of the training loop, and return a ``Run`` that continues there."""
        state, held = self._leave(position), self.streams.held(position)
        reread = self.reader.resume(
            position.next_index, position.iteration, self.settings.epochs, held.serials, state
        )
        # The returned position also counts the examples that the reader has just read again.
        position = position._replace(reread_examples=position.reread_examples + reread)
        self._newest = Run(self, position, held)
        return position, self._newest

    def _leave(self, position: LoaderCursor) -> ReaderState:
        """Discard the ``Run`` and the log entries after a position. Return the reader's state there."""
        if self.left is None:  # the reader has not moved yet, so its state is known
            self.left = position, self._reader_state(position)
        self._drop()
        self.streams.log.go_back(position)
        return self.left[1]

    def _reader_state(self, position: LoaderCursor) -> ReaderState:
        """Return the state of the reader at a position of the training loop."""
        # Only an iterable needs the oldest example, and finding it takes a while. Between two iterations of
        # other sources, the state is empty, because the ranks and the order of rows may change then.
        iterated = isinstance(self.source, IterableSource)
        oldest = self.streams.oldest_serial(position) if iterated else 0
        return self.reader.state(oldest, position.next_index) if iterated or position.in_pass else ([], [])

    def state(self, position: LoaderCursor) -> dict[str, Any]:
        """Return the loader's state at a position of the training loop as a flat dict."""
        if self.left is None:
            return self._state(position, self._reader_state(position))
        return self._state(*self.left)

    def _state(self, position: LoaderCursor, reader_state: ReaderState) -> dict[str, Any]:
        progress, fingerprints = reader_state
        return {
            "version": VERSION,
            "settings": json.dumps(self.settings.plain()),
            "source_length": -1 if self.source_length is None else self.source_length,
            **self.streams.state(position),
            "progress": json.dumps(progress),
            "fingerprints": fingerprints,
        }

    def restore(self, state: dict[str, Any]) -> LoaderCursor:
        """Restore a state that has been checked, and return its position of the training loop."""
        position, self.streams.log = self.streams.restored(state)
        self.run, self.left = None, (position, (json.loads(state["progress"]), state["fingerprints"]))
        return position

    @property
    def examples_read(self) -> int:
        """Number of examples that have been read so far, including examples read ahead."""
        return self._read_before + (0 if self._newest is None else self._newest.queue.examples)

    @property
    def pool(self) -> ThreadPool | None:
        """The current thread pool; None without workers."""
        return None if self._newest is None else self._newest.pool

    @property
    def owners(self) -> WorkerProcesses | None:
        """The current worker processes; None without processes."""
        return None if self._newest is None else self._newest.owners

    def counters(self) -> Counters:
        """Return the seconds that the stages have worked so far."""
        return Counters((0.0,) * 4, (0.0, 0.0), 0.0) if self._newest is None else self._newest.counters()

    def stop(self) -> None:
        """Make the threads end after their current work, without waiting for them."""
        if self.pool is not None:
            self.pool.stop()

    def _drop(self) -> None:
        """Stop all threads and processes, and discard the examples that were read ahead."""
        if self.pool is not None:
            self.pool.stop()
            self.pool.join()
        if self.pool is not None and self.owners is not None and self.pool.started_here:
            # Processes are closed in a thread that no interrupt reaches. An interrupt after waitpid() but
            # before Python records its result would leave a process that seems to live forever.
            self.pool.run_in_thread(self.owners.close, after_stop=True)
        self._read_before, self._newest, self.run = self.examples_read, None, None

    def close(self) -> None:
        """Stop all threads and processes and close the source. Warn if a source call does not return."""
        pool, owners = self.pool, self.owners
        if pool is not None and pool.started_here:
            pool.stop()
            in_time = pool.join(CLOSE_WAIT_S)
            if not in_time and owners is not None:
                owners.kill()
                in_time = pool.join(CLOSE_WAIT_S)
            if not in_time:
                _OPEN.pop(self, None)
                warnings.warn(
                    f"a call to the source has not returned for {CLOSE_WAIT_S:g} s; its thread still runs",
                    RuntimeWarning,
                    stacklevel=3,
                )
                return
        with self._closing:  # at exit, the thread that ``forgotten`` started may be closing this pipeline too
            if _OPEN.pop(self, None) is not None:
                self._drop()
                self.reader.close()

    def forgotten(self) -> None:
        """Close the pipeline, because its loader has been garbage-collected."""
        if self.pool is None:
            self.close()
        else:
            # The garbage collector may run in one of the loader's threads, or while holding a lock that they
            # need. Waiting for them here could deadlock.
            _thread.start_new_thread(self.close, ())


@atexit.register
def _close_all() -> None:
    """Close every pipeline of this process before the interpreter kills daemon threads."""
    for pipeline, process in reversed(list(_OPEN.items())):
        # A forked child inherits this list, but must close only loaders whose threads it has started.
        pool = pipeline.pool
        if process == os.getpid() or (pool is not None and pool.started_here):
            pipeline.close()


class Run:
    """The threads, processes and buffers that make the batches of a loader, starting at a given position."""

    def __init__(self, parts: Pipeline, position: LoaderCursor, held: Held) -> None:
        # The reader of ``parts`` is already at this position. ``held`` lists the contents of the buffers at
        # this position, which are read again, because a state does not contain them.
        self._parts, self._reread, self._in_whole = parts, position.reread_examples, position.fresh_examples
        streams, reader = parts.streams, parts.reader
        self.owners: WorkerProcesses | None = None  # the worker processes, if any
        if parts.processes:
            self.owners = WorkerProcesses(parts.num_workers, reader, parts.builder)
        self._read = reader.work if self.owners is None else self.owners.read
        # Returns the fresh examples in reading order.
        self.queue = PrefetchQueue(
            self._claim, self._read, streams.log.bad, position.next_index, parts.warn_of_draws,
            begins=position.next_index == position.first_index,
        )  # fmt: skip
        self.pool = ThreadPool() if parts.num_workers else None  # None: the calling thread does all work
        # The examples in the buffers are reread first, each only once, no matter how often it is used.
        self._held, (self._again, self._uses) = held, np.unique(held.serials, return_counts=True)
        self._num_claimed = self._num_restored = 0  # counts of the buffers' examples
        # read > decode > [augment >] [echo >] shuffle > [augment >] batch [> echo > shuffle batches]
        self._batches = self._made(position)
        self._map = self._connect_stages()
        self._following: deque[Batch] = deque()  # batches that were made together with the previous one
        self._begun = False
        self._position = position
        self._echo: EchoedBatches | None = None

    def progress(self) -> str:
        """Return text for a log line, such as "reading the source, 100 examples so far"."""
        again, read = len(self._again), self.queue.examples
        if self._num_restored < again:
            return f"reading the buffer again, {self._num_restored:,} of {again:,} examples"
        to_fill = sum(self._parts.settings.to_fill.values())
        if not again and read < to_fill:
            return f"filling the buffer, {read:,} of about {to_fill:,.0f} examples"
        return f"reading the source, {read:,} examples so far"

    def _claim(self, count: int) -> Any | None:
        """Select the next examples to read. After a resume, the examples of the buffers come first."""
        reader, start = self._parts.reader, self._num_claimed
        if start == len(self._again):
            return reader.claim(count)
        self._num_claimed = min(start + count, len(self._again))
        return reader.again(self._again[start : self._num_claimed])

    def _started(self) -> EchoedBatches | None:
        """Start the processes and reading threads. Return the result of ``_refill_buffers``."""
        if self.owners is not None:
            self.owners.begin()  # this must fork before other threads start
        if self.pool is not None and isinstance(self.queue.map, OrderedMap):
            self.pool.start(self.queue.map)
        return self._refill_buffers()

    def _refill_buffers(self) -> EchoedBatches | None:
        """Read the buffers' examples again after a resume. Return the stage that repeats batches, or None."""
        parts, position, serials = self._parts, self._position, self._again
        rows = np.empty(len(serials), dtype=np.int64)  # [serials], the row of each example in the pool
        start = 0
        while start < len(serials):
            fresh = self.queue.take_again(_LEAST_BLOCK)
            end = start + len(fresh.serials)
            rows[start:end] = self._pool.insert(fresh.examples, self._uses[start:end])
            if parts.reader.reads_again:
                length, read = parts.builder.length, fresh.examples
                counted = length is not None and isinstance(read, list)
                self._reread += sum(map(length, read)) if counted else end - start  # type: ignore[arg-type]
            start = self._num_restored = end

        def rows_of(items: keyed.Items) -> Rows:
            return rows[np.searchsorted(serials, items >> keyed.ECHO_BITS)]

        self._stage.resume(position.examples, position.next_index, self._held.examples, rows_of)
        if not parts.streams.echoes_batches:
            return None
        batches = {
            number: self._batches.remade(items, self._pool.take(rows_of(items), items))
            for number, items in self._held.batches.items()
        }
        return EchoedBatches(self._next_made, parts.streams.batches(position), position, batches)

    def _made(self, position: LoaderCursor) -> Batches:
        """Create the stages that repeat and shuffle examples and build batches from them."""
        parts, settings = self._parts, self._parts.settings
        block = max(settings.batch_size or 1, _LEAST_BLOCK)
        pool: Any = ExamplePool(settings.shuffle_buffer, block)
        builder = parts.builder
        if self.owners is not None:
            pool, builder = self.owners, replace(builder, augment=self.owners.augmented)
        elif parts.resident is not None:
            pool = ResidentPool(parts.resident)
        lookahead = 1 if parts.resident is None else _FREE_LOOKAHEAD
        stream = parts.streams.examples(position)
        self._pool = pool
        self._stage = EchoStage(self.queue.take, pool, stream, block=block, lookahead=lookahead)
        return Batches(self._stage, pool, builder, position, group=parts.group, drop_last=settings.drop_last)

    def _connect_stages(self) -> InlineMap[Any, Any]:
        """Connect the stage that reads examples and the stage that builds batches. Return the latter."""
        parts, batches = self._parts, self._batches
        batch_map: InlineMap[Any, Any]
        if self.pool is None:
            batch_map = InlineMap(batches.claim, batches.work)
        else:
            workers, size, whole = parts.num_workers, parts.builder.batch_size, parts.streams.whole
            # Each of n threads reads 1/(2n) of a batch at a time. A process reads four times this number,
            # because each transfer has a fixed cost, and receives a second claim while it works on the first.
            # Most batches have to wait for the slowest process, so twice as many batches are in progress.
            readers, makers, share = workers, workers, 0.5
            if self.owners is not None:
                readers, makers, share = 2 * workers, 2 * workers, 2.0
            # The threads that build batches also read arrays in memory and whole batches. For other sources,
            # the queue is before the echo, so slow reading continues while the loop uses the repeats.
            if parts.resident is None and not whole:
                chunk = parts.group * size if parts.group > 1 else math.ceil(size * share / workers)
                first = 2 * workers if parts.prefetch is None else parts.prefetch
                self.queue.map = OrderedMap(
                    self.pool, partial(self._claim, chunk), self._read, threads=readers,
                    window=math.ceil(first * size / chunk) + readers, name="read", at_once=workers,
                )  # fmt: skip
            ahead, makers = DOWNSTREAM_QUEUE, 1 if whole else makers
            if parts.prefetch is not None and parts.settings.variant.batches_upstream:
                ahead = parts.prefetch
            batch_map = OrderedMap(
                self.pool, batches.claim, batches.work, threads=makers, window=ahead + makers - 1,
                name="batch", at_once=min(makers, workers),
            )  # fmt: skip
        batch_map.upstream = self.queue.map
        return batch_map

    def _next_made(self) -> Batch | None:
        """Return the next batch, before batches are repeated; None after the last one."""
        if not self._following:
            self._following.extend(self._map.get() or ())
        if not self._following:
            return None
        batch = self._following.popleft()
        if self._parts.streams.whole:  # the length of a whole batch is known only after reading it
            self._in_whole += batch.length
            batch.position = batch.position._replace(fresh_examples=self._in_whole)
        return batch

    def next(self) -> Batch | None:
        """Return the next batch, or None at the end of the iteration. The first call starts the threads."""
        try:
            if not self._begun:
                self._echo = self._started() if self.pool is None else self.pool.run_in_thread(self._started)
                if self.pool is not None and isinstance(self._map, OrderedMap):
                    self.pool.start(self._map)
                self._begun = True
            batch = self._next_made() if self._echo is None else self._echo.next()
        except StopIteration as error:
            raise RuntimeError(
                "__getitem__, decode, augment or collate raised StopIteration (see above), which would look "
                "like the end of the iteration"
            ) from error
        if batch is not None and self._reread != batch.position.reread_examples:
            batch.position = batch.position._replace(reread_examples=self._reread)
        return batch

    def counters(self) -> Counters:
        """Return the seconds that the stages have worked so far."""
        read, batches = self.queue.map, self._map
        fresh_batches = self.queue.examples / self._parts.builder.batch_size
        # Without reading threads, examples are read while a batch is claimed, so the two times add up.
        ahead = isinstance(read, OrderedMap)
        inline_s = 0.0 if ahead else read.claim_s + read.work_s
        read_s = _bounds(read) if ahead else (inline_s, 0.0)
        if self._parts.settings.variant.batches_upstream:
            echoed_s = 0.0 if self._echo is None else self._echo.busy_s
            made_s = _bounds(batches, inline_s)
            return Counters((*read_s, *made_s), (echoed_s, 0.0), fresh_batches)
        return Counters((*read_s, 0.0, 0.0), _bounds(batches), fresh_batches)


def _bounds(stage: InlineMap[Any, Any], inline_s: float = 0.0) -> tuple[float, float]:
    """Return two lower bounds on a stage's seconds: its serial part, and all work divided by its workers."""
    # ``claim`` runs in one thread at a time, and ``work`` on ``at_once`` workers in parallel.
    claim_s = stage.claim_s + inline_s
    return claim_s, (claim_s + stage.work_s) / stage.at_once


def _origin_of(source: Source, order: Permutation | None) -> Origin:
    def origin(serial: int) -> str:
        return source.origin(serial if order is None else int(order.rows(np.array([serial]))[0]))

    return origin
