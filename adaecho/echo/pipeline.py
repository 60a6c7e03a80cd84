"""The stages of each variant in the paper's order, in one thread or several, as a stream of batches.

With worker threads the queue that reads ahead lies before the echo: a bottleneck upstream must never wait
for a burst of repeats downstream.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adaecho.echo import keys
from adaecho.echo.examples import Stack, collate, concatenate
from adaecho.echo.pool import Examples, ListPool
from adaecho.echo.stage import EchoStage, Fresh, Taken
from adaecho.echo.upstream import FreshQueue, Reader
from adaecho.echo.workers import Crew, InlineMap, OrderedMap

AnyMap = InlineMap[Any, Any] | OrderedMap[Any, Any]


@dataclass
class Ready:
    """A batch and where the stages stood when it was complete.

    Attributes:
        batch: what the consumer gets.
        items: of its examples; empty where whole batches are read.
        output: outputs of the example stage up to then.
        next_index: upstream position there.
        fresh_examples: examples read up to there, since the loader began.
        number, next_number: of the fresh batch and of the first one not yet echoed, under batch echoing.
        batch_output: outputs of the batch echo stage.
    """

    batch: Any
    items: keys.Items
    output: int
    next_index: int
    fresh_examples: int
    number: int = 0
    next_number: int = 0
    batch_output: int = 0


class ExampleBatches:
    """echo > shuffle > [augment >] batch, from fresh examples.

    Args:
        stage: repeats and shuffles examples; a factor of 1 only shuffles.
        batch_size: examples per batch.
        augment: after the shuffle, for (items, examples); None where it came before the echo.
        user_collate: a list of examples to a batch; None for the default.
        group: batches made at once, as slices of one stack; more than 1 spares most of the interpreter's
            work where examples are small arrays.
    """

    def __init__(
        self,
        stage: EchoStage,
        batch_size: int,
        augment: Callable[[keys.Items, Examples], Examples] | None,
        user_collate: Callable[[list[Any]], Any] | None,
        group: int = 1,
    ) -> None:
        self.stage = stage
        self.skipped = 0  # local numbers that were passed over unread
        self._batch_size, self._augment, self._collate = batch_size, augment, user_collate
        self._group = group

    def claim(self) -> tuple[list[tuple[Taken, Examples]], int] | None:
        """The examples of the next batches; None at the end of the pass."""
        parts = self.stage.take(self._group * self._batch_size)
        return (parts, self.skipped) if parts else None

    def work(self, claim: tuple[list[tuple[Taken, Examples]], int]) -> list[Ready]:
        """Make the batches."""
        parts, skipped = claim
        items = np.concatenate([taken.items for taken, _ in parts])
        next_indices = np.concatenate([taken.next_indices for taken, _ in parts])
        examples = self.augmented(items, _joined([examples for _, examples in parts]))
        first = parts[0][0].start
        made = []
        for start in range(0, len(items), self._batch_size):
            end = min(start + self._batch_size, len(items))
            batch = self.collated(examples if end - start == len(items) else examples[start:end])
            next_index = int(next_indices[end - 1])
            made.append(Ready(batch, items[start:end], first + end, next_index, next_index - skipped))
        return made

    def augmented(self, items: keys.Items, examples: Examples) -> Examples:
        """Augment examples that have left the buffer."""
        return examples if self._augment is None else self._augment(items, examples)

    def collated(self, examples: Examples) -> Any:
        """One batch of its examples."""
        if self._collate is not None:
            return self._collate(examples.examples() if isinstance(examples, Stack) else examples)
        return examples.batch() if isinstance(examples, Stack) else collate(examples)


def _joined(blocks: list[Examples]) -> Examples:
    if len(blocks) == 1:
        return blocks[0]
    stacks = [block for block in blocks if isinstance(block, Stack)]
    if len(stacks) == len(blocks):
        return concatenate(stacks)
    return [
        example for block in blocks for example in (block.examples() if isinstance(block, Stack) else block)
    ]


class WholeBatches:
    """Batches that somebody else's loader makes, one a time."""

    def __init__(self, queue: FreshQueue) -> None:
        self._queue = queue
        self.fresh_examples = 0

    def claim(self) -> Fresh | None:
        """The next batch; None at the end of the pass."""
        fresh = self._queue.take(1)
        while fresh is not None and not len(fresh.serials):
            fresh = self._queue.take(1)
        return fresh

    def work(self, fresh: Fresh) -> list[Ready]:
        """Count its examples (called in order, by one thread)."""
        batch = fresh.things[0]
        self.fresh_examples += batch_length(batch)
        return [Ready(batch, np.empty(0, dtype=np.int64), 0, fresh.next_index, self.fresh_examples)]


class OneByOne:
    """Batches one by one from a map that makes several at once."""

    def __init__(self, groups: AnyMap) -> None:
        self.map = groups
        self._made: deque[Ready] = deque()

    def get(self, *, by_crew: bool) -> Ready | None:
        """The next batch; None after the last."""
        if not self._made:
            self._made.extend(self.map.get(by_crew=by_crew) or ())
        return self._made.popleft() if self._made else None

    def clear(self) -> None:
        """Forget what has been made."""
        self._made.clear()


def batch_length(batch: Any) -> int:
    """Examples in a batch: the leading length of its first tensor, array or sequence.

    Raises:
        ValueError: the batch has none.
    """
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, tuple | list) and batch and not isinstance(batch[0], str | bytes | int | float):
        return batch_length(batch[0])
    shape = getattr(batch, "shape", None)
    if shape is not None and len(shape):
        return int(shape[0])
    if hasattr(batch, "__len__"):
        return len(batch)
    raise ValueError(f"source: can't tell how many examples are in a batch that is a {type(batch).__name__}")


class EchoedBatches:
    """... > batch > echo [> shuffle batches]: repeats whole batches (paper, section 3)."""

    def __init__(
        self, batches: OneByOne, *, seed: int, factor: float, buffer: int, rank: int, world: int
    ) -> None:
        self._batches = batches
        self._rank, self._world = rank, world
        self.stage = EchoStage(
            self._take, seed=seed, factor=factor, buffer=buffer, rank=rank, world=world, block=1,
            pool=ListPool(),
        )  # fmt: skip
        self._next_number = 0
        self._made: dict[int, Ready] = {}  # by batch number, from the last position on
        self._held: dict[int, tuple[keys.Items, int]] = {}  # items of a batch, and its repeats to come

    def begin(self, number: int) -> None:
        """Start with nothing held, at the number of the next fresh batch."""
        self._next_number = number
        self._held.clear()
        self._made.clear()
        self.stage.begin_pass(number)

    def claim(self) -> Ready | None:
        """The next repeat; None at the end of the pass."""
        parts = self.stage.take(1)
        if not parts:
            return None
        taken, batches = parts[0]
        position = int(taken.next_indices[-1])
        for number in [number for number in self._made if number < position]:
            del self._made[number]
        assert isinstance(batches, list)
        number = int(taken.items[0] >> keys.ECHO_BITS) // self._world
        return replace(
            self._made[position],
            batch=batches[0],
            number=number,
            next_number=position,
            batch_output=taken.end,
        )

    def _take(self, count: int) -> Fresh | None:  # noqa: ARG002 (batches come one at a time)
        ready = self._batches.get(by_crew=True)
        if ready is None:
            return None
        serial = np.array([self._next_number * self._world + self._rank])
        self._held[self._next_number] = ready.items, self.stage.repeats_of(serial)
        self._next_number += 1
        self._made[self._next_number] = ready
        batch, ready.batch = ready.batch, None
        return Fresh(serial, [batch], self._next_number)

    def num_repeats(self, first_number: int, batches: int) -> int:
        """How often consecutive batches are repeated, together."""
        numbers = np.arange(first_number, first_number + batches, dtype=np.int64)
        return self.stage.repeats_of(numbers * self._world + self._rank)

    def consumed(self, ready: Ready) -> None:
        """The consumer has taken a repeat: earlier states won't be asked for any more."""
        self.stage.forget(ready.batch_output)
        items, left = self._held[ready.number]
        if left > 1:
            self._held[ready.number] = items, left - 1
        else:
            del self._held[ready.number]

    def state_at(self, batch_output: int) -> tuple[dict[str, Any], dict[int, keys.Items]]:
        """State of the batch stage, and the items of every batch it held."""
        state = self.stage.state_at(batch_output)
        serials = {int(item) >> keys.ECHO_BITS for item in state["buffer"]}
        if state["pending_repeats"]:
            serials.add(state["pending_item"] >> keys.ECHO_BITS)
        numbers = sorted(serial // self._world for serial in serials)
        return state, {number: self._held[number][0] for number in numbers}

    def load(
        self, state: dict[str, Any], held: dict[int, keys.Items], remade: dict[int, Any], last: Ready
    ) -> None:
        """Return to a state, with the batches it held made again."""
        self._next_number = state["next_index"]
        self._made = {self._next_number: last}
        self.stage.load(state, lambda serials: [remade[int(serial) // self._world] for serial in serials])
        left: dict[int, int] = {}
        pending = state["pending_item"] + np.arange(state["pending_repeats"], dtype=np.int64)
        for item in [*state["buffer"], *pending]:
            number = (int(item) >> keys.ECHO_BITS) // self._world
            left[number] = left.get(number, 0) + 1
        self._held = {number: (items, left[number]) for number, items in held.items()}


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

    def echo_batches(self, *, seed: int, factor: float, buffer: int, rank: int, world: int) -> None:
        """Add the batch echo at the end."""
        echoed = EchoedBatches(self._batches, seed=seed, factor=factor, buffer=buffer, rank=rank, world=world)
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
