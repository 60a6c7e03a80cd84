"""From the arguments of an EchoLoader to its stages."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from adaecho.echo.batch.augment import Augmentation, DecodeThenAugment, Origin
from adaecho.echo.batch.batch_length import batch_length
from adaecho.echo.batch.batches import ExampleBatches, WholeBatches
from adaecho.echo.batch.device import ToDevice
from adaecho.echo.batch.example_echo import EchoStage
from adaecho.echo.memory.budget import check_memory, check_slots, free_bytes
from adaecho.echo.memory.pool import ResidentPool
from adaecho.echo.memory.snapshot import Recent
from adaecho.echo.memory.tree import num_bytes
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.permutation import Permutation
from adaecho.echo.order.sampled import SampledOrder
from adaecho.echo.pipeline import Pipeline
from adaecho.echo.read.chunks import BadExamples, FreshQueue, Preparation, Reader, Tried
from adaecho.echo.read.map_source import MapSource
from adaecho.echo.read.random_access import RandomReader
from adaecho.echo.read.sequential import SequentialReader
from adaecho.echo.read.sources import ArraySource, IterableSource
from adaecho.echo.settings import Settings
from adaecho.echo.threads.timers import Deliveries

_LEAST_BLOCK = 1024  # items that may enter the buffer at once while it fills
_GROUP, _GROUP_BYTES = 1024, 1 << 22  # examples of small arrays that are worked on at once, at most
_FREE_LOOKAHEAD = 2048  # rows planned at once where reading costs nothing


AfterEcho = Augmentation | DecodeThenAugment


class Stages:
    """The stages of one loader.

    Attributes:
        reader, queue: fresh examples.
        examples, whole: the example stage with its batches, or whole batches as they are read.
        pipeline: everything wired up.
        rank, world: whose serials are read.
        deliveries: of a source that works ahead by itself, timed.
        bad: bad examples so far.
        snapshots: whether states hold contents.
        source_length: examples (or whole batches) of the source, where it has a length.
    """

    def __init__(
        self,
        source: ArraySource | MapSource | IterableSource,
        settings: Settings,
        *,
        decode: Callable[[Any], Any] | None,
        augment: Any,
        collate: Callable[[list[Any]], Any] | None,
        sampler: Any,
        length_of: Callable[[Any], int] | None,
        place: str,
        device: ToDevice,
        snapshots: bool,
        num_workers: int,
        prefetch: int,
        ahead: bool,
    ) -> None:
        if settings.batch_size is None and isinstance(source, ArraySource):
            raise ValueError("batch_size=None: arrays hold examples, not batches; give a batch_size")
        if isinstance(source, IterableSource):
            settings.check_ranks_can_iterate(source.name)
        _check_buffers(source, settings, decode)
        order = None if isinstance(source, IterableSource) else _order(source, settings, sampler)
        origin = _origin_of(source, order)
        augmentation = _augmentation(augment, settings, origin, num_workers)
        stage: AfterEcho | None = augmentation
        if decode is not None and place == "encoded":
            stage = DecodeThenAugment(decode, augmentation, origin)
            # What is found bad after the buffer can't be skipped any more.
            decode = Tried(decode) if settings.max_bad_examples else None
        before = settings.variant.augments_before
        resident = isinstance(source, ArraySource) and source.resident and decode is None and not before
        whole = settings.batch_size is None
        # Arrays are read and worked on in groups of batches; anything slower comes batch by batch.
        group = 1
        if isinstance(source, ArraySource) and decode is None and place == "decoded":
            group = _batches_at_once(source, settings.batch_size)
        length = length_of or batch_length
        preparation = Preparation(
            decode, stage if before else None, stacked=not whole, length=length if whole else None
        )
        # Whoever makes whole batches has divided them among the ranks already.
        self.rank, self.world = (0, 1) if whole else (settings.rank, settings.world_size)
        self.snapshots = snapshots and isinstance(source, IterableSource)
        self.source_length = None if isinstance(source, IterableSource) else source.length
        self._source = source
        self.reader = self._reader(source, order, preparation, resident, settings, num_workers)
        self.bad = BadExamples(settings.max_bad_examples)
        by_itself = ahead and isinstance(source, IterableSource)
        self.deliveries = Deliveries(self.reader.claim) if by_itself else None
        claim = self.reader.claim if self.deliveries is None else self.deliveries.claim
        self.queue = FreshQueue(claim, self.reader.work, self.bad)
        self.examples: ExampleBatches | None = None
        self.whole: WholeBatches | None = None
        if settings.batch_size is None:
            self.whole = WholeBatches(self.queue, device.move, length, kept=isinstance(source, MapSource))
        else:
            pool = ResidentPool(source.arrays) if resident and isinstance(source, ArraySource) else None
            self.examples = ExampleBatches(
                self._example_stage(settings, settings.batch_size, pool), settings.batch_size,
                None if before else stage, collate, group, Recent() if self.snapshots else None, device.move,
                origin, drop_last=settings.drop_last,
            )  # fmt: skip
        self.pipeline = self._pipeline(settings, num_workers, prefetch, group, reads_inline=resident or whole)

    def _pipeline(
        self, settings: Settings, num_workers: int, prefetch: int, group: int, *, reads_inline: bool
    ) -> Pipeline:
        batch_size = settings.batch_size or 1
        chunk = group * batch_size if group > 1 else math.ceil(batch_size / (2 * max(num_workers, 1)))
        pipeline = Pipeline(
            self.reader,
            self.queue,
            self.examples or self.whole,  # type: ignore[arg-type]
            variant=settings.variant,
            num_workers=num_workers,
            batch_size=batch_size,
            chunk=chunk,
            prefetch_examples=prefetch * batch_size,
            prefetch=prefetch,
            reads_inline=reads_inline,
            deliveries=self.deliveries,
        )
        if settings.variant.repeats == "batches":
            pipeline.echo_batches(
                seed=settings.seed + 1,
                factor=settings.first_factor,
                buffer=settings.batch_shuffle_buffer,
                rank=self.rank,
                world=self.world,
                recent=Recent() if self.snapshots else None,
            )
        return pipeline

    def _reader(
        self,
        source: Any,
        order: Permutation | None,
        preparation: Preparation,
        resident: bool,
        settings: Settings,
        num_workers: int,
    ) -> Reader:
        if order is None:
            return SequentialReader(source, preparation, rank=self.rank, world=self.world)
        return RandomReader(
            source, order, preparation, rank=self.rank, world=self.world, resident=resident,
            seed=settings.seed, num_workers=num_workers, echo=settings.echo,
        )  # fmt: skip

    def _example_stage(self, settings: Settings, batch_size: int, pool: ResidentPool | None) -> EchoStage:
        return EchoStage(
            self.queue.take,
            seed=settings.seed,
            factor=settings.first_factor if settings.variant.repeats == "examples" else 1.0,
            buffer=settings.shuffle_buffer,
            rank=self.rank,
            world=self.world,
            block=max(batch_size, _LEAST_BLOCK),
            pool=pool,
            lookahead=1 if pool is None else _FREE_LOOKAHEAD,
            check_memory=check_memory,
        )

    @property
    def factor(self) -> Factor | None:
        """The loader's echoing factor."""
        if self.pipeline.echoed is not None:
            return self.pipeline.echoed.factor
        return None if self.examples is None else self.examples.stage.factor

    def num_batches(self, settings: Settings, iteration: int, first_index: int, first_number: int) -> int:
        """Batches of one iteration, which begins at a local number and at a number of a fresh batch.

        Raises:
            TypeError: it isn't known.
        """
        if settings.epochs is None:
            raise TypeError("len() of an EchoLoader needs epochs=: without, it never ends")
        if settings.factor == "auto":
            raise TypeError("len() of an EchoLoader with factor='auto' isn't known beforehand")
        if isinstance(self.reader, RandomReader):
            serials = self.reader.serials_of(iteration)
        else:
            serials = first_index + np.arange(self._iterated() * settings.epochs)
        if self.examples is None or settings.batch_size is None:
            batches = len(serials)
        else:
            items = int(self.examples.stage.factor.repeats(serials).sum())
            batches = items // settings.batch_size
            if items % settings.batch_size and not settings.drop_last:
                batches += 1
        if self.pipeline.echoed is None:
            return batches
        return self.pipeline.echoed.num_repeats(first_number, batches)

    def _iterated(self) -> int:
        """Examples (or whole batches) of a pass of what is iterated."""
        source = self._source
        assert isinstance(source, IterableSource)
        if source.length is None:
            raise TypeError(f"len() of an EchoLoader around a {source.name} isn't known: that has no length")
        return source.length


def choose_place(place: str, decode: Callable[[Any], Any] | None, source: Any, settings: Settings) -> str:
    """``auto`` resolved: whether the buffer holds examples decoded or as they are stored."""
    if place != "auto":
        return place
    if decode is None or settings.batch_size is None or settings.variant.augments_before:
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


def _augmentation(augment: Any, settings: Settings, origin: Origin, num_workers: int) -> Augmentation | None:
    if augment is None:
        return None
    augmentation = Augmentation(augment, settings.seed, origin)
    if num_workers:
        augmentation.check_threads()
    return augmentation


def _check_buffers(
    source: ArraySource | MapSource | IterableSource, settings: Settings, decode: Callable[[Any], Any] | None
) -> None:
    # Of rows of a memory map the size is known; rows in memory are not copied; others tell it when they come.
    copied = isinstance(source, ArraySource) and not source.resident and decode is None
    example_bytes = source.arrays.example_bytes if copied and isinstance(source, ArraySource) else 0
    check_slots(settings.shuffle_buffer, example_bytes, "shuffle_buffer")
    check_slots(settings.batch_shuffle_buffer, 0, "batch_shuffle_buffer")


def _batches_at_once(source: ArraySource, batch_size: int | None) -> int:
    if batch_size is None:
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


def _origin_of(source: ArraySource | MapSource | IterableSource, order: Permutation | None) -> Origin:
    def origin(serial: int) -> str:
        return source.origin(serial if order is None else int(order.rows(np.array([serial]))[0]))

    return origin
