"""The stages of each variant in the paper's order, in one thread or several, as a stream of batches.

With worker threads the queue that reads ahead lies before the echo: a bottleneck upstream must never wait
for a burst of repeats downstream.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from adaecho.echo.batch.batch_echo import EchoedBatches
from adaecho.echo.batch.batches import ExampleBatches, OneByOne, Ready, WholeBatches
from adaecho.echo.memory.snapshot import Recent
from adaecho.echo.read.chunks import FreshQueue, Reader
from adaecho.echo.threads.timers import Counters, Deliveries
from adaecho.echo.threads.workers import AnyMap, Crew, InlineMap, OrderedMap
from adaecho.echo.variants import Variant


class Pipeline:
    """The stages wired up, inline or over threads.

    Args:
        reader: claims and reads fresh examples (or whole batches).
        queue: takes from the reader in any number.
        batches: makes batches from the queue, through the example stage or whole.
        variant: where the echo lies.
        num_workers: threads for reading, and as many for making batches; 0 does everything inline.
        batch_size: examples per batch, 1 where whole batches are read.
        chunk: examples that one read claims.
        prefetch_examples: examples (or whole batches) read ahead of the echo.
        prefetch: batches made ahead, where making them is upstream of the echo.
        reads_inline: reading needs no threads of its own.
        deliveries: of a source that works ahead by itself.
    """

    DOWNSTREAM_QUEUE = 2  # more only takes memory, and the interpreter's lock from the training step

    def __init__(
        self,
        reader: Reader,
        queue: FreshQueue,
        batches: ExampleBatches | WholeBatches,
        *,
        variant: Variant,
        num_workers: int,
        batch_size: int,
        chunk: int,
        prefetch_examples: int,
        prefetch: int,
        reads_inline: bool,
        deliveries: Deliveries[Any] | None,
    ) -> None:
        self._reader, self._queue, self._batch_size = reader, queue, batch_size
        self.crew = Crew(reader.release) if num_workers else None
        self.deliveries = deliveries
        whole = isinstance(batches, WholeBatches)
        self._work: Callable[[Any], list[Ready]] = batches.work
        self._batches_upstream = variant.batches_upstream
        if self.crew is None:
            self._batch_map: AnyMap = InlineMap(batches.claim, batches.work)
        else:
            if not reads_inline:
                window = math.ceil(prefetch_examples / chunk) + num_workers
                queue.read_ahead(
                    OrderedMap(
                        self.crew,
                        partial(queue.claim, chunk),
                        reader.work,
                        threads=num_workers,
                        window=window,
                        name="read",
                    )
                )
            ahead = prefetch if self._batches_upstream else self.DOWNSTREAM_QUEUE
            threads = 1 if whole else num_workers
            self._batch_map = OrderedMap(
                self.crew, batches.claim, self._work_ahead, threads=threads, window=ahead + threads - 1,
                name="batch",
            )  # fmt: skip
        self._batch_map.upstream = queue.map
        self._batches = OneByOne(self._batch_map)
        self._echo_inline: InlineMap[Ready, Ready] | None = None
        self._echo_behind: OrderedMap[Ready, Ready] | None = None
        self.echoed: EchoedBatches | None = None

    def echo_batches(
        self, *, seed: int, factor: float, buffer: int, rank: int, world: int, recent: Recent | None
    ) -> None:
        """Add the batch echo at the end.

        The consumer repeats small batches itself, with copies made upstream: to wake a thread, which takes
        the interpreter's lock from the step, costs more. Large ones are copied by a thread beside the step.
        """
        echoed = EchoedBatches(
            self._batches, seed=seed, factor=factor, buffer=buffer, rank=rank, world=world, recent=recent
        )
        self.echoed = echoed
        self._echo_inline = InlineMap(partial(echoed.claim, by_crew=False), _same)
        self._echo_inline.upstream = self._batch_map
        if self.crew is not None:
            self._echo_behind = OrderedMap(
                self.crew, partial(echoed.claim, by_crew=True), _same,
                threads=0, window=self.DOWNSTREAM_QUEUE, name="echo",
            )  # fmt: skip
            self._echo_behind.upstream = self._batch_map

    def _work_ahead(self, claim: Any) -> list[Ready]:
        made = self._work(claim)
        if self.echoed is not None and made:
            self.echoed.copy_ahead(made)
        return made

    def next(self) -> Ready | None:
        """The next batch; None at the end of the pass. Starts the threads it needs."""
        if self.crew is not None:
            self.crew.go()
        try:
            return self._next()
        except StopIteration as error:
            raise RuntimeError(
                "__getitem__, decode, augment or collate raised StopIteration (see above), which would end "
                "the loop as if there were no more batches"
            ) from error

    def _next(self) -> Ready | None:
        if self._echo_inline is None or self.echoed is None:
            return self._batches.get(by_crew=False)
        behind = self._echo_behind
        if behind is not None and behind.wanted:
            return behind.get(by_crew=False)
        ready = self._echo_inline.get(by_crew=False)
        if self.crew is not None and behind is not None and self.echoed.slow:
            self.crew.staff(behind, 1)
        return ready

    def counters(self) -> Counters:
        """What has been done so far."""
        read, made = self._queue.map, self._batch_map
        echo_maps = (self._echo_inline, self._echo_behind)
        echoed_s = sum(one.claim_s + one.work_s for one in echo_maps if one is not None)
        fresh_batches = self._queue.examples / self._batch_size
        delivered_s = 0.0 if self.deliveries is None else self.deliveries.busy_s
        # Inline reading is a part of claiming a batch.
        inline_s = read.claim_s + read.work_s if isinstance(read, InlineMap) else 0.0
        read_s = (inline_s, 0.0) if isinstance(read, InlineMap) else _bounds(read)
        if self._batches_upstream:
            made_s = _bounds(made, inline_s)
            return Counters((delivered_s, *read_s, *made_s), (echoed_s, 0.0), fresh_batches)
        return Counters((delivered_s, *read_s, 0.0, 0.0), _bounds(made), fresh_batches)

    def stop(self) -> None:
        """Let the threads end after the work in their hands, and let go of what can be opened again."""
        if self.crew is None:
            self._reader.release()
        else:
            self.crew.stop()

    def halt(self) -> None:
        """End all threads and forget what they were ahead; positions must be set anew afterwards."""
        if self.crew is not None:
            self.crew.stop()
            self.crew.join()
            if self._echo_behind is not None:
                self.crew.staff(self._echo_behind, 0)
        for one in (self._queue.map, self._batch_map, self._echo_inline, self._echo_behind):
            if one is not None:
                one.reset()
        self._batches.clear()

    def close(self) -> None:
        """End all threads and let go of the source."""
        self.halt()
        self._reader.close()


def _bounds(stage: AnyMap, inline_s: float = 0.0) -> tuple[float, float]:
    """A stage takes the larger of claiming, in one thread at a time, and all its work over its threads.

    Args:
        stage: with its times.
        inline_s: of another stage, spent within its claims.
    """
    claim_s = stage.claim_s + inline_s
    return claim_s, (claim_s + stage.work_s) / stage.wanted


def _same(ready: Ready) -> Ready:
    return ready
