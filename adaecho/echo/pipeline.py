"""The stages of each variant in the paper's order, in one thread or several, as a stream of batches.

With worker threads the queue that reads ahead lies before the echo: a bottleneck upstream must never wait
for a burst of repeats downstream.
"""

import math

from adaecho.echo.batch_echo import EchoedBatches
from adaecho.echo.batches import ExampleBatches, OneByOne, Ready, WholeBatches
from adaecho.echo.crew import Crew
from adaecho.echo.snapshot import Recent
from adaecho.echo.upstream import FreshQueue, Reader
from adaecho.echo.workers import AnyMap, InlineMap, OrderedMap


class Pipeline:
    """The stages wired up, inline or over threads.

    Args:
        reader: claims and reads fresh examples (or whole batches).
        queue: takes from the reader in any number.
        batches: makes batches from the queue, through the example stage or whole.
        echo: the variant.
        num_workers: threads for reading, and as many for making batches; 0 does everything inline.
        chunk: examples that one read claims.
        prefetch_examples: examples (or whole batches) read ahead of the echo.
        prefetch: batches made ahead, where making them is upstream of the echo.
        reads_inline: reading needs no threads of its own.
    """

    DOWNSTREAM_QUEUE = 2  # more only takes memory, and the interpreter's lock from the training step

    def __init__(
        self,
        reader: Reader,
        queue: FreshQueue,
        batches: ExampleBatches | WholeBatches,
        *,
        echo: str,
        num_workers: int,
        chunk: int,
        prefetch_examples: int,
        prefetch: int,
        reads_inline: bool,
    ) -> None:
        self._reader, self._queue = reader, queue
        self.crew = Crew() if num_workers else None
        self.workers = max(num_workers, 1)
        whole = isinstance(batches, WholeBatches)
        self._batches_upstream = not echo.startswith("example")
        if self.crew is None:
            self._batch_map: AnyMap = InlineMap(batches.claim, batches.work)
        else:
            if not reads_inline:
                window = math.ceil(prefetch_examples / chunk) + num_workers
                queue.read_ahead(
                    OrderedMap(
                        self.crew,
                        lambda: reader.claim(chunk),
                        reader.work,
                        threads=num_workers,
                        window=window,
                        name="read",
                    )
                )
            ahead = prefetch if self._batches_upstream else self.DOWNSTREAM_QUEUE
            threads = 1 if whole else num_workers
            self._batch_map = OrderedMap(
                self.crew, batches.claim, batches.work, threads=threads, window=ahead + threads - 1,
                name="batch",
            )  # fmt: skip
        self._batch_map.upstream = queue.map
        self._batches = OneByOne(self._batch_map)
        self._echo_map: AnyMap | None = None
        self.echoed: EchoedBatches | None = None

    def echo_batches(
        self, *, seed: int, factor: float, buffer: int, rank: int, world: int, recent: Recent | None
    ) -> None:
        """Add the batch echo at the end."""
        echoed = EchoedBatches(
            self._batches, seed=seed, factor=factor, buffer=buffer, rank=rank, world=world, recent=recent
        )
        self.echoed = echoed
        if self.crew is None:
            self._echo_map = InlineMap(echoed.claim, _same)
        else:
            self._echo_map = OrderedMap(
                self.crew, echoed.claim, _same, threads=1, window=self.DOWNSTREAM_QUEUE, name="echo"
            )
        self._echo_map.upstream = self._batch_map

    def next(self) -> Ready | None:
        """The next batch; None at the end of the pass. Starts the threads it needs."""
        if self.crew is not None:
            self.crew.go()
        if self._echo_map is None:
            return self._batches.get(by_crew=False)
        ready: Ready | None = self._echo_map.get(by_crew=False)
        return ready

    @property
    def upstream_busy_s(self) -> float:
        """Seconds that workers have been busy before the echo, all workers together."""
        return self._queue.map.busy_s + (self._batch_map.busy_s if self._batches_upstream else 0.0)

    @property
    def downstream_busy_s(self) -> float:
        """Seconds that the loader's own work after the echo has taken."""
        after_examples = 0.0 if self._batches_upstream else self._batch_map.busy_s
        return after_examples + (0.0 if self._echo_map is None else self._echo_map.busy_s)

    def halt(self) -> None:
        """End all threads and forget what they were ahead; positions must be set anew afterwards."""
        if self.crew is not None:
            self.crew.stop()
            self.crew.join()
            for ordered in (self._queue.map, self._batch_map, self._echo_map):
                if isinstance(ordered, OrderedMap):
                    ordered.reset()
        self._batches.clear()

    def close(self) -> None:
        """End all threads and let go of the source."""
        self.halt()
        self._reader.close()


def _same(ready: Ready) -> Ready:
    return ready
