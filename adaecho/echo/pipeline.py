"""The stages of each variant in the paper's order, in one thread or several, as a stream of batches.

With worker threads the queue that reads ahead lies before the echo: a bottleneck upstream must never wait
for a burst of repeats downstream.
"""

import _thread
import atexit
import math
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from adaecho.echo.batch.augment import Augment, DecodeThenAugment, Origin, augmentations, in_turn
from adaecho.echo.batch.batch_echo import DOWNSTREAM_QUEUE, EchoedBatches, NotEchoed
from adaecho.echo.batch.batch_length import batch_length
from adaecho.echo.batch.batches import Batch, ExampleBatches, OneByOne, WholeBatches
from adaecho.echo.batch.device import ToDevice
from adaecho.echo.batch.patches import CutPatches, take_patches
from adaecho.echo.memory.budget import check_slots, free_bytes
from adaecho.echo.memory.pool import ExamplePool, ResidentPool
from adaecho.echo.memory.tree import num_bytes
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.permutation import Permutation
from adaecho.echo.order.sampled import SampledOrder
from adaecho.echo.order.stage import EchoStage
from adaecho.echo.order.uses import Uses
from adaecho.echo.read.chunks import BadExamples, FreshQueue, Preparation, Reader, Tried
from adaecho.echo.read.map_source import MapSource
from adaecho.echo.read.random_access import RandomReader
from adaecho.echo.read.sequential import SequentialReader
from adaecho.echo.read.sources import ArraySource, IterableSource
from adaecho.echo.settings import Settings
from adaecho.echo.state import Stages
from adaecho.echo.threads.timers import Counters, Deliveries
from adaecho.echo.threads.workers import AnyMap, InlineMap, OrderedMap, ThreadPool

_LEAST_BLOCK = 1024  # items that may enter the buffer at once while it fills
_GROUP, _GROUP_BYTES = 1024, 1 << 22  # examples of small arrays that are worked on at once, at most
_FREE_LOOKAHEAD = 2048  # rows planned at once where reading costs nothing
_EXIT_WAIT_S = 10.0  # for a source that does not answer, when the process ends
_OPEN: dict["Pipeline", int] = {}  # what a process's exit has to close, by the order of its making

Source = ArraySource | MapSource | IterableSource


@dataclass(frozen=True)
class Work:
    """What an EchoLoader is given beside its settings: functions, and how and where they work.

    Attributes:
        decode, augment, collate, batch_length: the functions.
        sampler: an order of rows, or None.
        place: "decoded", "encoded" or "augmented", what the buffer holds.
        device: where batches go.
        num_workers, prefetch: threads, and batches read ahead of the echo.
        works_ahead: the source does so by itself.
        ages: each batch comes in a pair with its own.
    """

    decode: Callable[[Any], Any] | None
    augment: Any
    collate: Callable[[list[Any]], Any] | None
    batch_length: Callable[[Any], int] | None
    sampler: Any
    place: str
    device: ToDevice
    num_workers: int
    prefetch: int
    works_ahead: bool
    ages: bool


class Pipeline:
    """The stages of one loader, inline or over threads.

    Attributes:
        stages: from the source to the batch.
        deliveries: of a source that works ahead by itself, timed.
        thread_pool: the threads; None inline.
    """

    def __init__(self, source: Source, settings: Settings, work: Work) -> None:
        self._source, self._settings, self._work = source, settings, work
        _check(source, settings, work.decode)
        order = None if isinstance(source, IterableSource) else _order(source, settings, work.sampler)
        self._origin = _origin_of(source, order)
        before, after = _around_the_buffer(settings, work, self._origin)
        self._whole = settings.batch_size is None
        # Whole batches have been shared out among the ranks by their maker.
        self._rank, self._world = (0, 1) if self._whole else (settings.rank, settings.world_size)
        # Rows that lie in memory are not copied until they leave the buffer.
        in_memory = (
            isinstance(source, ArraySource) and source.resident and not settings.variant.augments_before
        )
        self._resident = in_memory and before == Preparation()
        as_stored = before.decode is None and work.place == "decoded"
        self._group = _batches_at_once(source, settings.batch_size) if as_stored else 1

        # read > decode > [augment >] [echo >] shuffle > [augment >] batch [> echo > shuffle batches]
        reader = self._reader(order, before)
        bad = BadExamples(settings.max_bad_examples)
        iterated = isinstance(source, IterableSource)
        self.deliveries = Deliveries(reader.claim) if work.works_ahead and iterated else None
        queue = FreshQueue((self.deliveries or reader).claim, reader.work, bad)
        batches = self._whole_batches(queue) if self._whole else self._example_batches(queue, after)
        self.thread_pool = ThreadPool(reader.release) if work.num_workers else None
        self._batch_map = self._connect(reader, queue, batches)
        self._batches = OneByOne(self._batch_map)
        echo = self._echo(batches)
        self.stages = Stages(
            reader, queue, bad, batches, echo,
            factor=echo.factor if settings.variant.repeats == "batches" else batches.factor,
            world=self._world, iterated=iterated, source_length=None if iterated else source.length,
        )  # fmt: skip
        self._closing, self._closed = threading.Lock(), False
        _OPEN[self] = os.getpid()

    def _reader(self, order: Permutation | None, preparation: Preparation) -> Reader:
        """The first stage: read > decode [> augment]."""
        if self._whole:
            length = self._work.batch_length or batch_length
            preparation = replace(preparation, stacked=False, length=length)
        if isinstance(self._source, IterableSource):
            return SequentialReader(
                self._source, preparation, rank=self._rank, world=self._world,
                check_length=self._settings.check_filling,
            )  # fmt: skip
        assert order is not None
        return RandomReader(
            self._source, order, preparation, rank=self._rank, world=self._world, resident=self._resident,
            seed=self._settings.seed, num_workers=self._work.num_workers, echo=self._settings.echo,
        )  # fmt: skip

    def _whole_batches(self, queue: FreshQueue) -> WholeBatches:
        """Batches as they are read."""
        kept = isinstance(self._source, MapSource)
        length = self._work.batch_length or batch_length
        return WholeBatches(queue, self._work.device.move, length, kept=kept, ages=self._work.ages)

    def _example_batches(self, queue: FreshQueue, augment: Augment | None) -> ExampleBatches:
        """The middle stages: [echo >] shuffle > [augment >] batch."""
        settings, work = self._settings, self._work
        assert settings.batch_size is not None
        block = max(settings.batch_size, _LEAST_BLOCK)
        # What holds all of its patches takes the memory of as many examples.
        slots = settings.shuffle_buffer / (settings.example_factor if work.place == "augmented" else 1)
        pool: ExamplePool | ResidentPool = ExamplePool(math.ceil(slots), block)
        if self._resident and isinstance(self._source, ArraySource):
            pool = ResidentPool(self._source.arrays)
        factor = Factor(settings.seed, settings.example_factor, world=self._world)
        stage = EchoStage(
            queue.take, pool, factor, seed=settings.seed, size=settings.shuffle_buffer, rank=self._rank,
            world=self._world, rows=pool.rows, block=block,
            lookahead=_FREE_LOOKAHEAD if self._resident else 1,
        )  # fmt: skip
        return ExampleBatches(
            stage, pool, settings.batch_size, augment, work.collate, self._group, work.device.move,
            self._origin, drop_last=settings.drop_last, world=self._world,
            uses=Uses(factor) if work.ages else None,
        )  # fmt: skip

    def _echo(self, batches: ExampleBatches | WholeBatches) -> EchoedBatches | NotEchoed:
        """The last stage: [echo > shuffle batches], with draws of its own."""
        settings = self._settings
        if settings.variant.repeats != "batches":
            return NotEchoed(self._batches)
        return EchoedBatches(
            batches, self._batches, self.thread_pool, seed=settings.seed + 1,
            factor=settings.first_factor, buffer=settings.batch_shuffle_buffer, rank=self._rank,
            world=self._world, ages=self._work.ages,
        )  # fmt: skip

    def _connect(
        self,
        reader: Reader,
        queue: FreshQueue,
        batches: ExampleBatches | WholeBatches,
    ) -> AnyMap:
        """Let threads read, and make batches; gives the latter's map."""
        work = self._work
        batch_map: AnyMap
        if self.thread_pool is None:
            batch_map = InlineMap(batches.claim, batches.work)
        else:
            workers, batch_size = work.num_workers, self._settings.batch_size or 1
            if not (self._resident or self._whole):
                small = math.ceil(batch_size / (2 * workers))
                chunk = self._group * batch_size if self._group > 1 else small
                window = math.ceil(work.prefetch * batch_size / chunk) + workers
                claim = partial(queue.claim, chunk)
                queue.read_ahead(
                    OrderedMap(
                        self.thread_pool, claim, reader.work, threads=workers, window=window, name="read"
                    )
                )
            ahead = work.prefetch if self._settings.variant.batches_upstream else DOWNSTREAM_QUEUE
            threads = 1 if batches.whole else workers
            batch_map = OrderedMap(
                self.thread_pool, batches.claim, partial(self._make_ahead, batches), threads=threads,
                window=ahead + threads - 1, name="batch",
            )  # fmt: skip
        batch_map.upstream = queue.map
        return batch_map

    def _make_ahead(self, stage: ExampleBatches | WholeBatches, claim: Any) -> list[Batch]:
        batches = stage.work(claim)
        if batches:
            self.stages.echo.copy_ahead(batches)
        return batches

    def next(self) -> Batch | None:
        """The next batch; None at the end of the pass. Starts the threads it needs."""
        if self.thread_pool is not None:
            self.thread_pool.go()
        try:
            batch = self.stages.echo.next()
        except StopIteration as error:
            raise RuntimeError(
                "__getitem__, decode, augment or collate raised StopIteration (see above), which would end "
                "the loop as if there were no more batches"
            ) from error
        if batch is not None and batch.ages is not None:
            batch.content = batch.content, batch.ages
        return batch

    def counters(self) -> Counters:
        """What has been done so far."""
        read, batches = self.stages.queue.map, self._batch_map
        echoed_s = self.stages.echo.busy_s
        fresh_batches = self.stages.queue.examples / (self._settings.batch_size or 1)
        delivered_s = 0.0 if self.deliveries is None else self.deliveries.busy_s
        # Inline reading is a part of claiming a batch.
        inline_s = read.claim_s + read.work_s if isinstance(read, InlineMap) else 0.0
        read_s = (inline_s, 0.0) if isinstance(read, InlineMap) else _bounds(read)
        if self._settings.variant.batches_upstream:
            batches_s = _bounds(batches, inline_s)
            return Counters((delivered_s, *read_s, *batches_s), (echoed_s, 0.0), fresh_batches)
        return Counters((delivered_s, *read_s, 0.0, 0.0), _bounds(batches), fresh_batches)

    def stop(self) -> None:
        """Let the threads end after the work in their hands, and let go of what can be opened again."""
        if self.thread_pool is None:
            self.stages.reader.release()
        else:
            self.thread_pool.stop()

    def stop_after_error(self) -> None:
        """Stop for good, until ``halt``; the error is in the caller's hands."""
        self.stop()
        self.stages.queue.map.forget_errors()
        self._batch_map.forget_errors()

    def halt(self) -> None:
        """End all threads and forget what they were ahead; positions must be set anew afterwards."""
        if self.thread_pool is not None:
            self.thread_pool.stop()
            self.thread_pool.join()
        self.stages.queue.map.reset()
        self._batch_map.reset()
        self.stages.echo.reset()
        self._batches.clear()

    def close(self, wait_s: float | None = None) -> None:
        """End all threads and let go of the source.

        Threads that are in a call of the source's after ``wait_s`` are left there, with a warning: nothing
        can end them, and they end with the process.
        """
        if self.thread_pool is not None:
            self.thread_pool.stop()
            if not self.thread_pool.join(wait_s):
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
                self.halt()
                self.stages.reader.close()
            finally:
                _OPEN.pop(self, None)

    def forgotten(self) -> None:
        """The garbage collector has come to the loader: close, and wait for no thread here.

        The collector may run anywhere: in one of these threads, or in one that holds a lock which they, or
        ``threading`` for them, have to take before they can end.
        """
        if self.thread_pool is None or not self.thread_pool.may_have_threads:
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
        if self._settings.epochs is None:
            raise TypeError("len() of an EchoLoader needs epochs=: without, it never ends")
        if self._settings.factor == "auto":
            raise TypeError("len() of an EchoLoader with factor='auto' isn't known beforehand")
        if isinstance(self.stages.reader, RandomReader):
            first_index, end = self.stages.reader.span(iteration)
        else:
            end = first_index + self._iterated() * self._settings.epochs
        batches = self.stages.batches.num_batches(first_index, end - first_index)
        return self.stages.echo.num_batches(first_number, batches)

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


def _bounds(stage: AnyMap, inline_s: float = 0.0) -> tuple[float, float]:
    """A stage takes as long as claiming does, in one thread at a time, or all its work over its threads.

    Args:
        stage: with its times.
        inline_s: of another stage, spent within its claims.
    """
    claim_s = stage.claim_s + inline_s
    return claim_s, (claim_s + stage.work_s) / stage.wanted


def _around_the_buffer(settings: Settings, work: Work, origin: Origin) -> tuple[Preparation, Augment | None]:
    """What happens to examples before the buffer, and what augments after it, decoding if nothing has."""
    parts = augmentations(work.augment, settings.seed, origin, threads=bool(work.num_workers))
    # Of (once, each_time) the first is done with before repeats of examples are made.
    cut = len(parts) if settings.variant.augments_before else len(parts) - 1
    cut = max(cut, 0) if settings.variant.repeats == "examples" else 0
    before, after = in_turn(parts[:cut]), in_turn(parts[cut:])
    if work.place == "augmented":
        counts = Factor(settings.seed, settings.example_factor, world=settings.world_size).repeats
        return Preparation(work.decode, cut=CutPatches(before, after, counts)), take_patches
    if work.decode is None or work.place == "decoded":
        return Preparation(work.decode, before), after
    # What is found bad after the buffer can't be skipped any more.
    tried = Tried(work.decode) if settings.max_bad_examples else None
    for_augment = getattr(work.decode, "for_augment", None)
    first = work.augment[0] if isinstance(work.augment, tuple) else work.augment
    decode = work.decode if for_augment is None else for_augment(first)
    return Preparation(tried, before), DecodeThenAugment(decode, after, origin)


def choose_place(
    place: str, decode: Callable[[Any], Any] | None, augment: Any, source: Any, settings: Settings
) -> str:
    """``auto`` resolved: whether the buffer holds examples decoded or as they are stored."""
    if place == "augmented" and (augment is None or settings.variant.augments_before):
        return "decoded"  # which is what it is there
    if place != "auto":
        return place
    if decode is None or settings.batch_size is None or settings.augments_before_buffer(augment):
        return "decoded"
    if settings.variant.batches_upstream and not settings.max_bad_examples:
        return "encoded"
    return "decoded" if _fits_decoded(source, decode, settings.shuffle_buffer) else "encoded"


def _fits_decoded(source: Any, decode: Callable[[Any], Any], buffer: int) -> bool:
    """Whether so many examples like the first would leave half of the free memory; unknown of a stream."""
    free = free_bytes()
    if free is None or not isinstance(source, MapSource):
        return True
    try:
        first = decode(source.peek(0))
    except Exception:  # a bad one, or a broken transfer: reading will tell
        return True
    return buffer * num_bytes(first) <= free / 2


def _check(source: Source, settings: Settings, decode: Callable[[Any], Any] | None) -> None:
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
    copied = isinstance(source, ArraySource) and not source.resident and decode is None
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
