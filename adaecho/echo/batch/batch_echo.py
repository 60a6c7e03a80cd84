"""The echo of whole batches: the stage of ``order.stage`` with batches in its pool."""

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adaecho.echo.batch.batches import (
    Batch,
    ExampleBatches,
    HoldsNothing,
    OneByOne,
    Position,
    Recipe,
    Reread,
    Serials,
    WholeBatches,
    ages_of,
    stand_ins,
)
from adaecho.echo.memory.budget import check_memory
from adaecho.echo.memory.pool import BatchPool
from adaecho.echo.memory.tree import duplicate_many, num_bytes
from adaecho.echo.order import keyed
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.items import Fresh, Output, StageState
from adaecho.echo.order.stage import EchoStage
from adaecho.echo.order.uses import Uses
from adaecho.echo.threads.workers import InlineMap, OrderedMap, ThreadPool

DOWNSTREAM_QUEUE = 2  # more only takes memory, and the interpreter's lock from the training step
# To copy more than this takes longer than to hand a batch over from another thread.
_SLOW_BYTES = 1 << 21
_APART = 256  # outputs between two marks, at least: the recipes of so many batches are kept


class EchoedBatches:
    """... > batch > echo [> shuffle batches]: repeats whole batches (paper, section 3).

    Args:
        source: the stage before, which can make batches again.
        batches: of it, one by one.
        thread_pool: threads, or None to work inline.
        seed: of the draws of this stage.
        factor: repeats of each fresh batch on average, at least 1.
        buffer: slots of the shuffle buffer behind the echo; 0 passes everything on in order.
        rank, world: the serial of fresh batch i is ``i * world + rank``.
        ages: they are asked for.

    Attributes:
        factor: how often batches are repeated.
        slow: whether batches are so large that a thread should copy them.
    """

    def __init__(
        self,
        source: ExampleBatches | WholeBatches,
        batches: OneByOne,
        thread_pool: ThreadPool | None,
        *,
        seed: int,
        factor: float,
        buffer: int,
        rank: int,
        world: int,
        ages: bool = False,
    ) -> None:
        self.factor = Factor(seed, factor, world=world)
        self._uses = Uses(self.factor) if ages else None
        self.slow = False
        self._source, self._batches, self._thread_pool = source, batches, thread_pool
        self._size, self._rank, self._world = buffer, rank, world
        self._pool = BatchPool()
        self._recipes: dict[int, Recipe] = {}  # by number, as far back as states may be asked for
        self._latest = Batch(None, keyed.NO_ITEMS, 0, 0, 0)  # where the stages before this one stand
        self._outputs: deque[tuple[int, Batch]] = deque()  # that have left the buffer; their row in the pool
        self._inline: InlineMap[Batch, Batch] = InlineMap(self.claim, _same)
        self._inline.upstream = batches.map
        self._behind: OrderedMap[Batch, Batch] | None = None
        if thread_pool is not None:
            self._behind = OrderedMap(
                thread_pool, self.claim, _same, threads=0, window=DOWNSTREAM_QUEUE, name="echo"
            )
            self._behind.upstream = batches.map
        self._stage = EchoStage(
            self._next_fresh, self._pool, self.factor, seed=seed, size=buffer, rank=rank, world=world,
            block=1, apart=max(_APART, buffer),
        )  # fmt: skip

    def copy_ahead(self, batches: list[Batch]) -> None:
        """Copies of small batches for their repeats, made where they are made, beside the step."""
        size = max(num_bytes(batch.content) for batch in batches)
        if size:
            for _ in range(min(math.ceil(self.factor.value) - 1, _SLOW_BYTES // size)):
                # Each call of torch gives the interpreter's lock away: one for many batches.
                copies = duplicate_many([batch.content for batch in batches])
                for batch, copied in zip(batches, copies, strict=True):
                    batch.copies.append(copied)

    # Outputs

    def claim(self) -> Batch | None:
        """The next repeat; None at the end of the pass."""
        if not self._outputs:
            # All repeats of a batch together. Their content is copied one by one, as they leave.
            self._outputs.extend(self._placed(self._stage.take_repeats()))
            if not self._outputs:
                # Where a state was loaded while the buffer drained, nobody has met the end of the pass again,
                # nor read the remainder before it that drop_last leaves out.
                self._batches.get()
                return None
        row, repeat = self._outputs.popleft()
        repeat.content = self._pool.use(row)
        return repeat

    def _placed(self, outputs: list[Output]) -> list[tuple[int, Batch]]:
        latest = self._latest
        upstream = latest.output, latest.next_index, latest.fresh_examples
        placed = [
            (row, Batch(None, keyed.NO_ITEMS, *upstream, next_number, number))
            for _, row, next_number, number in outputs
        ]
        if self._uses is not None:
            items = np.array([output.item for output in outputs], dtype=np.int64)  # [outputs]
            numbers = (items >> keyed.ECHO_BITS) // self._world
            for (_, batch), number, use in zip(placed, numbers, self._uses.count(items), strict=True):
                batch.ages = ages_of(self._source, self._recipes[int(number)], int(use))
        return placed

    def _next_fresh(self, count: int) -> Fresh | None:  # noqa: ARG002 (one at a time)
        batch = self._batches.get()
        if batch is None:
            return None
        size = num_bytes(batch.content)
        if not self._recipes:  # the first one
            check_memory(self._size * size, "batch_shuffle_buffer")
        self.slow = size >= _SLOW_BYTES
        number = self._stage.next_index
        self._recipes[number] = Recipe(batch.items, batch.next_index - 1)
        self._latest = batch
        serials = np.array([number * self._world + self._rank], dtype=np.int64)  # [1]
        fresh = Fresh(serials, [(batch.content, batch.copies)], number + 1)
        batch.content, batch.copies = None, []
        return fresh

    def num_batches(self, first_number: int, batches: int) -> int:
        """How often consecutive fresh batches leave, together."""
        return self.factor.total(first_number, batches)

    # Delivery

    def next(self) -> Batch | None:
        """The next repeat.

        The consumer repeats small batches itself, with copies made upstream: to wake a thread, which takes
        the interpreter's lock from the step, costs more. Large ones are copied by a thread beside the step.
        """
        if self._behind is not None and self._behind.wanted:
            return self._behind.get()
        repeat = self._inline.get()
        if self._thread_pool is not None and self._behind is not None and self.slow:
            self._thread_pool.staff(self._behind, 1)
        return repeat

    @property
    def busy_s(self) -> float:
        """Seconds spent on repeats."""
        inline_s = self._inline.claim_s + self._inline.work_s
        return inline_s if self._behind is None else inline_s + self._behind.claim_s + self._behind.work_s

    def reset(self) -> None:
        """Forget what was claimed, after the threads have ended."""
        if self._thread_pool is not None and self._behind is not None:
            self._thread_pool.staff(self._behind, 0)
            self._behind.reset()

    # State

    def begin(self, position: Position) -> None:
        self._begin(StageState(position.next_number), position, {}, {})

    def _begin(
        self, at: StageState, position: Position, recipes: dict[int, Recipe], contents: dict[int, Any]
    ) -> None:
        def reread(serials: Serials) -> Any:
            return [(contents[number], []) for number in (serials // self._world).tolist()]

        self.slow = False
        self._outputs.clear()
        self._recipes = recipes
        self._latest = Batch(
            None, keyed.NO_ITEMS, position.output, position.next_index, position.fresh_examples
        )
        if self._uses is not None:
            self._uses.begin(at)
        self._stage.begin(at, reread)

    def forget(self, position: Position) -> None:
        if self._stage.forget(position.batch_output):
            mark = self._stage.mark
            buffered = set(self._numbers(mark))
            for number in list(self._recipes):
                if number < mark.next_index and number not in buffered:
                    self._recipes.pop(number, None)

    def _numbers(self, at: StageState) -> list[int]:
        """The batches that a state holds."""
        numbers: list[int] = (at.serials // self._world).tolist()
        return numbers

    def save(self, position: Position) -> dict[str, Any]:
        at = self._stage.state_at(position.batch_output)
        numbers = self._numbers(at)
        recipes = [self._recipes[number] for number in numbers]
        # A few tensors, however many batches there are; of whole ones only number, place and length.
        items = [] if self._source.whole else [recipe.items for recipe in recipes]
        return {
            "batches": at.plain(),
            "held_batches": {
                "numbers": torch.tensor(numbers, dtype=torch.int64),
                "places": torch.tensor([recipe.local_number for recipe in recipes], dtype=torch.int64),
                "lengths": torch.tensor([len(recipe.items) for recipe in recipes], dtype=torch.int64),
                "items": torch.from_numpy(np.concatenate([keyed.NO_ITEMS, *items])),
            },
        }

    def needed(self, state: dict[str, Any]) -> Serials:
        recipes = recipes_in(state).values()
        return np.concatenate([keyed.NO_ITEMS, *map(self._source.serials_of, recipes)])

    def load(self, state: dict[str, Any], position: Position, reread: Reread) -> None:
        recipes = recipes_in(state)
        contents = {number: self._source.remade(recipe, reread) for number, recipe in recipes.items()}
        self._begin(StageState.of(state["batches"]), position, recipes, contents)


def recipes_in(state: dict[str, Any]) -> dict[int, Recipe]:
    """The batches that a loader's state holds, by number."""
    buffered = state["held_batches"]
    lengths: NDArray[np.int64] = buffered["lengths"].numpy()  # [batches]
    items: NDArray[np.int64] = buffered["items"].numpy()  # [sum of lengths]
    if not len(items):
        items = stand_ins(state["fresh_examples"] - int(lengths.sum()), state["fresh_examples"])
    of_each = np.split(items, np.cumsum(lengths)[:-1]) if len(lengths) else []
    batches = zip(buffered["numbers"].tolist(), of_each, buffered["places"].tolist(), strict=True)
    return {number: Recipe(own, local_number) for number, own, local_number in batches}


class NotEchoed(HoldsNothing):
    """... > batch: each batch once.

    Args:
        batches: upstream.
    """

    busy_s = 0.0

    def __init__(self, batches: OneByOne) -> None:
        self.factor = Factor(0, 1.0, world=1)
        self._batches = batches

    def copy_ahead(self, batches: list[Batch]) -> None:
        """No copies are needed."""

    def next(self) -> Batch | None:
        """The next batch; None at the end of the iteration."""
        return self._batches.get()

    def reset(self) -> None:
        """Nothing is claimed here."""

    def num_batches(self, first_number: int, batches: int) -> int:  # noqa: ARG002
        """How many batches so many make: as many as there are."""
        return batches


def _same(batch: Batch) -> Batch:
    return batch
