"""What a loader keeps as long as it lives, and its run from the present position on."""

import _thread
import atexit
import os
import threading
import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from adaecho.echo.batch.augment import Origin
from adaecho.echo.batch.batch_length import batch_length
from adaecho.echo.batch.batches import Batch, Making
from adaecho.echo.batch.device import ToDevice
from adaecho.echo.functions import Functions
from adaecho.echo.memory.budget import check_slots
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.permutation import Permutation, SampledOrder
from adaecho.echo.order.stage import absent
from adaecho.echo.place import Held, Log, Position, Streams
from adaecho.echo.read import Source
from adaecho.echo.read.around import IterableSource
from adaecho.echo.read.chunks import Preparation, Reader
from adaecho.echo.read.failures import BadExamples
from adaecho.echo.read.rows import ArraySource, MapSource, RandomReader
from adaecho.echo.read.sequential import SequentialReader
from adaecho.echo.run import Parts, Run
from adaecho.echo.settings import Settings
from adaecho.echo.threads.timers import Counters, Deliveries
from adaecho.echo.threads.workers import ThreadPool

_GROUP, _GROUP_BYTES = 1024, 1 << 22  # examples of small arrays that are worked on at once, at most
_EXIT_WAIT_S = 10.0  # for a source that does not answer, when the process ends
_OPEN: dict["Pipeline", int] = {}  # what a process's exit has to close, by the order of its making


class Pipeline:
    """The parts of one loader, and the run that is made of them.

    Args:
        source: where examples come from.
        settings, functions: of the loader.
        sampler: an order of rows, or None.
        device: where batches go.
        num_workers, prefetch: threads, and batches read ahead of the echo.

    Attributes:
        log, streams: of the loader.
        deliveries: of a source that works ahead by itself, timed.
        run: the newest; None before the first.
        source_length: of what is not only iterated.
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
        prefetch: int,
    ) -> None:
        self._source, self._settings = source, settings
        _check(source, settings, functions)
        self.iterated = isinstance(source, IterableSource)
        self.source_length = None if isinstance(source, IterableSource) else source.length
        order = None if isinstance(source, IterableSource) else _order(source, settings, sampler)
        first = settings.first_factor if settings.variant.repeats == "batches" else 1.0
        self.log = Log(
            BadExamples(settings.max_bad_examples), Factor(settings.seed, settings.example_factor),
            Factor(settings.seed + 1, first),
        )  # fmt: skip
        self.streams = Streams(settings, self.log)
        origin = _origin_of(source, order)
        place = functions.choose_place((lambda: source.peek(0)) if isinstance(source, MapSource) else None)
        before, after = functions.around_the_buffer(place, origin, threads=bool(num_workers))
        length = (functions.batch_length or batch_length) if self.streams.whole else None
        making = Making(
            self.streams.batch_size, after, functions.collate, device.move, origin, length,
            kept=isinstance(source, MapSource),
        )  # fmt: skip
        resident = None
        if isinstance(source, ArraySource) and source.resident and before == Preparation():
            resident = source.arrays
        as_stored = before.decode is None and place == "decoded"
        if length is not None:
            before = replace(before, stacked=False, length=length)
        self.reader = self._reader(order, before, num_workers, resident=resident is not None)
        self.deliveries = Deliveries(self.reader.claim) if source.works_ahead else None
        self._parts = Parts(
            settings, self.streams, self.reader, making, (self.deliveries or self.reader).claim, resident,
            self.reader.rows if isinstance(self.reader, RandomReader) else absent,
            _batches_at_once(source, settings.batch_size) if as_stored else 1, num_workers, prefetch,
        )  # fmt: skip
        self.run: Run | None = None
        self._read_before = 0  # examples, by runs that were dropped
        self._closing, self._closed = threading.Lock(), False
        _OPEN[self] = os.getpid()

    def _reader(
        self, order: Permutation | None, preparation: Preparation, num_workers: int, *, resident: bool
    ) -> Reader:
        """The first stage: read > decode [> augment]."""
        settings, rank, world = self._settings, self.streams.rank, self.streams.world
        if isinstance(self._source, IterableSource):
            return SequentialReader(
                self._source, preparation, rank=rank, world=world, check_length=settings.check_filling
            )
        assert order is not None
        return RandomReader(
            self._source, order, preparation, rank=rank, world=world, resident=resident,
            seed=settings.seed, num_workers=num_workers,
        )  # fmt: skip

    def begin(self, position: Position, iteration: int) -> Position:
        """Begin an iteration, giving up the one before if it hasn't ended; where that is."""
        self._drop()
        self.log.go_back(position)
        abandoned_at = position.next_index if position.in_pass else None
        index = self.reader.begin(iteration, self._settings.epochs, abandoned_at)
        position = position.begun(iteration, index)
        self.run = Run(self._parts, position, Held())
        return position

    def resume(self, position: Position, progress: list[Any], witnesses: list[Any]) -> Position:
        """Take up a position; where that is, with what has been read again.

        Args:
            position: where.
            progress, witnesses: what the reader told of it.
        """
        self._drop()
        self.log.go_back(position)
        held = self.streams.held(position)
        self.reader.witnesses.expect(witnesses)
        reread = self.reader.resume(
            position.next_index, position.iteration, self._settings.epochs, held.serials, progress
        )
        position = position._replace(reread_examples=position.reread_examples + reread)
        self.run = Run(self._parts, position, held)
        return position

    def told(self, position: Position) -> tuple[list[Any], list[Any]]:
        """What the reader tells of a position: progress and witnesses."""
        index = position.next_index
        progress = self.reader.progress(self.streams.oldest_serial(position) if self.iterated else 0, index)
        return progress, self.reader.witnesses.before(index * self.streams.world)

    @property
    def examples_read(self) -> int:
        """Examples that have gone into the pipeline."""
        return self._read_before + (0 if self.run is None else self.run.queue.examples)

    @property
    def pool(self) -> ThreadPool | None:
        """The threads, if there are any."""
        return None if self.run is None else self.run.pool

    @property
    def next_index(self) -> int:
        """Local number of the first example that the run has not taken."""
        assert self.run is not None
        return self.run.queue.index

    def next(self) -> Batch | None:
        """The next batch; None at the end of the pass."""
        assert self.run is not None
        return self.run.next()

    def counters(self) -> Counters:
        """What has been done so far."""
        delivered_s = 0.0 if self.deliveries is None else self.deliveries.busy_s
        counters = (
            Counters((0.0, 0.0, 0.0, 0.0), (0.0, 0.0), 0.0) if self.run is None else self.run.counters()
        )
        return replace(counters, upstream_s=(delivered_s, *counters.upstream_s))

    def stop(self) -> None:
        """Let the threads end after the work in their hands, and let go of what can be opened again."""
        if self.run is not None:
            self.run.stop()

    def _drop(self) -> None:
        """End all threads, and forget what they were ahead."""
        if self.run is None:
            return
        if self.pool is not None:
            self.pool.stop()
            self.pool.join()
        self._read_before, self.run = self.examples_read, None

    def close(self, wait_s: float | None = None) -> None:
        """End all threads and let go of the source.

        Threads that are in a call of the source's after ``wait_s`` are left there, with a warning: nothing
        can end them, and they end with the process.
        """
        pool = self.pool
        if pool is not None:
            pool.closing = True
            pool.stop()
            if not pool.join(wait_s):
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

    def num_batches(self, iteration: int, first_index: int, first_number: int) -> int:
        """Batches of one iteration, which begins at a local number and at a number of a fresh batch.

        Raises:
            TypeError: it isn't known.
        """
        settings, streams = self._settings, self.streams
        if settings.epochs is None:
            raise TypeError("len() of an EchoLoader needs epochs=: without, it never ends")
        if settings.factor == "auto":
            raise TypeError("len() of an EchoLoader with factor='auto' isn't known beforehand")
        if isinstance(self.reader, RandomReader):
            first_index, end = self.reader.span(iteration)
        else:
            end = first_index + self._iterated() * settings.epochs
        items = self.log.examples.total(first_index, end - first_index)
        batches = items // streams.batch_size if settings.drop_last else -(-items // streams.batch_size)
        return self.log.batches.total(first_number, batches)

    def _iterated(self) -> int:
        """Examples (or whole batches) of a pass of what is iterated."""
        source = self._source
        assert isinstance(source, IterableSource)
        if source.length is None:
            raise TypeError(f"len() of an EchoLoader around a {source.name} isn't known: that has no length")
        return source.length


@atexit.register
def _close_all() -> None:
    """Close every pipeline of this process, before daemon threads would be cut off in the middle."""
    for pipeline, process in reversed(list(_OPEN.items())):
        if process == os.getpid():
            pipeline.close(_EXIT_WAIT_S)


def _check(source: Source, settings: Settings, functions: Functions) -> None:
    """Raises ValueError where source and settings don't go together, or a buffer can't fit."""
    if isinstance(source, IterableSource) and settings.order == "shards" and not source.reordered:
        raise ValueError(
            "order='shards': this source can only be iterated, in an order of its own; leave order out, and "
            "let the source shuffle its shards"
        )
    if settings.batch_size is None and isinstance(source, ArraySource):
        raise ValueError("batch_size=None: arrays hold examples, not batches; give a batch_size")
    if isinstance(source, IterableSource):
        settings.check_ranks_can_iterate(source.name)
    # Of rows of a memory map the size is known; rows in memory are not copied; others tell it when they come.
    copied = isinstance(source, ArraySource) and not source.resident and functions.decode is None
    example_bytes = source.arrays.example_bytes if copied and isinstance(source, ArraySource) else 0
    check_slots(settings.shuffle_buffer, example_bytes, "shuffle_buffer")
    check_slots(settings.batch_shuffle_buffer, 0, "batch_shuffle_buffer")


def _batches_at_once(source: Source, batch_size: int | None) -> int:
    """Arrays are read and worked on in groups of batches; anything slower comes batch by batch."""
    if batch_size is None or not isinstance(source, ArraySource):
        return 1
    examples = min(_GROUP, _GROUP_BYTES // max(source.arrays.example_bytes, 1))
    return max(1, examples // batch_size)


def _order(source: ArraySource | MapSource, settings: Settings, sampler: Any) -> Permutation:
    shard_lengths = getattr(source, "shard_lengths", None)
    if settings.order == "shards" and shard_lengths is None:
        raise ValueError("order='shards': this source has no shard_lengths; choose permutation or stored")
    whole = settings.batch_size is None
    world = 1 if whole else settings.world_size
    if sampler is not None:
        return SampledOrder(
            sampler,
            source.length,
            settings.seed,
            passes=settings.epochs,
            world=world,
            drop_last=settings.drop_last,
        )
    return Permutation(
        source.length, "stored" if whole else settings.order, settings.seed, shard_lengths,
        passes=settings.epochs, world=world, drop_last=settings.drop_last,
    )  # fmt: skip


def _origin_of(source: Source, order: Permutation | None) -> Origin:
    def origin(serial: int) -> str:
        return source.origin(serial if order is None else int(order.rows(np.array([serial]))[0]))

    return origin
