"""From fresh examples, or a pre-batched source, to batches."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from adaecho.echo.batch.ages import Ages
from adaecho.echo.batch.augment import Origin, span
from adaecho.echo.memory.pool import ExamplePool, Examples, ResidentPool
from adaecho.echo.memory.tree import Columns, collate, duplicate
from adaecho.echo.order import keyed
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.items import Fresh, Outputs, StageState
from adaecho.echo.order.stage import EchoStage
from adaecho.echo.order.uses import Uses
from adaecho.echo.read.chunks import FreshQueue
from adaecho.echo.threads.workers import AnyMap

Serials = NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """A batch and where the stages stood when it was complete.

    Attributes:
        content: what the consumer gets.
        items: of its examples, int64 [examples]; stand-ins where whole batches are read; none of a repeat.
        output: outputs of the example stage up to then.
        next_index: upstream position there.
        fresh_examples: examples read up to there, since the loader began.
        next_number: of the first batch not yet echoed, under batch echoing.
        batch_output: outputs of the batch echo stage.
        copies: of the content, made ahead for its repeats.
        ages: of its examples, where they are asked for.
    """

    content: Any
    items: keyed.Items
    output: int
    next_index: int
    fresh_examples: int
    next_number: int = 0
    batch_output: int = 0
    copies: list[Any] = field(default_factory=list)
    ages: Ages | None = None


@dataclass
class Position:
    """Where the consumer is. One is never changed: another takes its place, in one statement.

    Attributes:
        fresh_examples: read for the batches taken so far.
        reread_examples: read again to restore a position.
        next_index: upstream position, as a local number; ``skipped`` of the numbers before were passed over.
        next_number: number of the next fresh batch to echo; ``first_number``: when the iteration began.
        first_index: ``next_index`` when the iteration began.
        iteration: how many have begun; ``in_pass`` while it has not ended.
        output, batch_output: of the example and batch stage, since the iteration began or was restored.
    """

    fresh_examples: int = 0
    reread_examples: int = 0
    next_index: int = 0
    skipped: int = 0
    next_number: int = 0
    first_number: int = 0
    first_index: int = 0
    iteration: int = 0
    in_pass: bool = False
    output: int = 0
    batch_output: int = 0

    def begun(self, iteration: int, index: int) -> "Position":
        """Where the consumer is as an iteration begins, at a local number."""
        return replace(
            self, iteration=iteration, in_pass=True, skipped=self.skipped + index - self.next_index,
            next_index=index, first_index=index, first_number=self.next_number, output=0, batch_output=0,
        )  # fmt: skip

    def after(self, batch: Batch) -> "Position":
        """Where the consumer is once it has taken a batch."""
        # Asked for each batch: dataclasses.replace takes ten times as long.
        return Position(
            batch.fresh_examples, self.reread_examples, batch.next_index, self.skipped, batch.next_number,
            self.first_number, self.first_index, self.iteration, self.in_pass, batch.output,
            batch.batch_output,
        )  # fmt: skip

    def ended(self, index: int, *, whole: bool) -> "Position":
        """Where it is as an iteration ends, at a local number, maybe after bad examples without a batch."""
        # How many examples a bad whole batch has is not known.
        fresh_examples = self.fresh_examples if whole else index - self.skipped
        return replace(self, in_pass=False, next_index=index, fresh_examples=fresh_examples)


class Recipe(NamedTuple):
    """What a fresh batch can be made again from: its items, and where it is read whole its local number."""

    items: keyed.Items
    local_number: int


class Reread:
    """What lay in the buffers at a position, read again, once, in serial order.

    Args:
        serials: rising, int64 [n].
        examples: of these serials, as the pool takes them.
    """

    def __init__(self, serials: Serials, examples: Any) -> None:
        self._serials, self._examples = serials, examples

    def select(self, serials: Serials) -> Any:
        """The examples of some of the serials."""
        indices = np.searchsorted(self._serials, serials)  # int64 [len(serials)]
        examples = self._examples
        if isinstance(examples, list):
            return [examples[index] for index in indices]
        return examples[indices] if isinstance(examples, np.ndarray) else examples.take(indices)


class Stage(Protocol):
    """What stages have in common. A position is the consumer's, however far they have worked ahead."""

    factor: Factor

    def begin(self, position: Position) -> None:
        """Start an iteration with nothing held."""

    def forget(self, position: Position) -> None:
        """No state before a position will be asked for any more. Never waits."""

    def save(self, position: Position) -> dict[str, Any]:
        """Its entries of a state: plain numbers and tensors."""

    def needed(self, state: dict[str, Any]) -> Serials:
        """The serials of fresh examples without which it can't return to a state, in any order."""

    def load(self, state: dict[str, Any], position: Position, reread: Reread) -> None:
        """Return to a state, with what it needs."""


class ExampleBatches:
    """echo > shuffle > [augment >] batch, from fresh examples.

    Args:
        stage: repeats and shuffles examples; a factor of 1 only shuffles.
        pool: where its examples lie.
        batch_size: examples per batch.
        augment: after the shuffle, for (items, examples); None where it came before the echo.
        user_collate: a list of examples to a batch; None for the default.
        group: batches made at once, as slices of one stack; more than 1 spares most of the interpreter's
            work where examples are small arrays.
        move: takes a batch to its device.
        origin: what to call the example of a serial in a message.
        drop_last: leave out a short batch at the end of a pass.
        world: the local number of a serial is ``serial // world``.
        uses: counts the stage's outputs; None where no ages are asked for.
    """

    whole = False

    def __init__(
        self,
        stage: EchoStage,
        pool: ExamplePool | ResidentPool,
        batch_size: int,
        augment: Callable[[keyed.Items, Examples], Examples] | None,
        user_collate: Callable[[list[Any]], Any] | None,
        group: int = 1,
        move: Callable[[Any], Any] = lambda batch: batch,
        origin: Origin = "example {}".format,
        *,
        drop_last: bool = False,
        world: int = 1,
        uses: Uses | None = None,
    ) -> None:
        self.factor = stage.factor
        self.skipped = 0  # local numbers that were passed over unread
        self._stage, self._pool = stage, pool
        self._batch_size, self._augment, self._collate = batch_size, augment, user_collate
        self._group, self.move, self._origin = group, move, origin
        self._drop_last, self.world, self._uses = drop_last, world, uses

    def begin(self, position: Position) -> None:
        self._begin(StageState(position.next_index), position)

    def _begin(
        self, at: StageState, position: Position, reread: Callable[[Serials], Any] | None = None
    ) -> None:
        self.skipped = position.skipped
        if self._uses is not None:
            self._uses.begin(at)
        self._stage.begin(at, reread)

    def claim(self) -> tuple[Outputs, Examples, int, Serials | None] | None:
        """The examples of the next batches, and which use each is; None at the end of the pass."""
        outputs = self._stage.take(self._group * self._batch_size)
        if not len(outputs):
            return None
        uses = None if self._uses is None else self._uses.count(outputs.items)
        return outputs, self._pool.take(outputs.rows), self.skipped, uses

    def work(self, claim: tuple[Outputs, Examples, int, Serials | None]) -> list[Batch]:
        """Make the batches."""
        outputs, examples, skipped, uses = claim
        items = outputs.items  # int64 [n], n up to group * batch_size
        examples = self.augmented(items, examples)
        batches = []
        short = len(items) % self._batch_size if self._drop_last else 0
        for start in range(0, len(items) - short, self._batch_size):  # slices of one stack: nothing is copied
            end = min(start + self._batch_size, len(items))
            content = self.collated(
                items[start:end], examples if end - start == len(items) else examples[start:end]
            )
            next_index = int(outputs.next_indices[end - 1])
            batch = Batch(content, items[start:end], outputs.start + end, next_index, next_index - skipped)
            if uses is not None:
                batch.ages = ages_of(self, Recipe(batch.items, 0), uses[start:end])
            batches.append(batch)
        return batches

    def forget(self, position: Position) -> None:
        self._stage.forget(position.output)

    def save(self, position: Position) -> dict[str, Any]:
        return {"examples": self._stage.state_at(position.output).plain()}

    def needed(self, state: dict[str, Any]) -> Serials:
        return StageState.of(state["examples"]).items >> keyed.ECHO_BITS

    def load(self, state: dict[str, Any], position: Position, reread: Reread) -> None:
        self._begin(StageState.of(state["examples"]), position, reread.select)

    def serials_of(self, recipe: Recipe) -> Serials:
        """The serials of the fresh examples in a batch."""
        return recipe.items >> keyed.ECHO_BITS

    def remade(self, recipe: Recipe, reread: Reread) -> Any:
        """A batch made a second time."""
        examples = self._pool.lend(reread.select(self.serials_of(recipe)))
        return self.collated(recipe.items, self.augmented(recipe.items, examples))

    def num_batches(self, first: int, count: int) -> int:
        """How many batches so many fresh examples make, from a local number on."""
        items = self.factor.total(first, count)
        return items // self._batch_size if self._drop_last else math.ceil(items / self._batch_size)

    def augmented(self, items: keyed.Items, examples: Examples) -> Examples:
        """Augment examples that have left the buffer."""
        return examples if self._augment is None else self._augment(items, examples)

    def collated(self, items: keyed.Items, examples: Examples) -> Any:
        """One batch of its examples."""
        if self._collate is None and isinstance(examples, Columns):
            return self.move(examples.batch())
        singles = examples.examples() if isinstance(examples, Columns) else examples
        try:
            batch = (self._collate or collate)(singles)
        except Exception as error:
            error.add_note(f"while collating {self._named(items, singles)}")
            raise
        return self.move(batch)

    def _named(self, items: keyed.Items, examples: list[Any]) -> str:
        """The one that can't be collated, or two that don't go together, else the first and the last."""
        for index in range(len(examples) if self._collate is None else 0):
            try:
                collate([examples[index]])
            except Exception:
                return self._origin(int(items[index]) >> keyed.ECHO_BITS)
        for index in range(1, len(examples) if self._collate is None else 0):
            try:
                collate([examples[0], examples[index]])
            except Exception:
                pair = [self._origin(int(items[number]) >> keyed.ECHO_BITS) for number in (0, index)]
                return f"{pair[0]} and {pair[1]}, which differ"
        return span(items, self._origin)


class HoldsNothing:
    """The part of a stage that has no buffer: nothing to save, and nothing that a state needs."""

    def begin(self, position: Position) -> None:
        pass

    def forget(self, position: Position) -> None:
        pass

    def save(self, position: Position) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def needed(self, state: dict[str, Any]) -> Serials:  # noqa: ARG002
        return keyed.NO_ITEMS

    def load(self, state: dict[str, Any], position: Position, reread: Reread) -> None:  # noqa: ARG002
        self.begin(position)


class WholeBatches(HoldsNothing):
    """Batches of a pre-batched source, one at a time.

    Args:
        queue: gives them.
        move: takes a batch to its device.
        length: examples in a batch.
        kept: the source keeps its batches and will give them again: they are copied for the consumer.
        ages: they are asked for.
    """

    whole, world = True, 1

    def __init__(
        self,
        queue: FreshQueue,
        move: Callable[[Any], Any],
        length: Callable[[Any], int],
        *,
        kept: bool,
        ages: bool = False,
    ) -> None:
        self.move, self.fresh_examples, self.skipped = move, 0, 0
        self.factor = Factor(0, 1.0, world=1)  # they leave once each
        self._queue, self._length, self._kept, self._ages = queue, length, kept, ages

    def claim(self) -> Fresh | None:
        """The next batch; None at the end of the pass."""
        fresh = self._queue.take(1)
        while fresh is not None and not len(fresh.serials):
            fresh = self._queue.take(1)
        return fresh

    def work(self, fresh: Fresh) -> list[Batch]:
        """Count its examples (called in order, by one thread)."""
        content, before = fresh.examples[0], self.fresh_examples
        length, own = self._length(content), self._own(content)
        self.fresh_examples += length
        items = stand_ins(before, self.fresh_examples)
        batch = Batch(own, items, 0, fresh.next_index, self.fresh_examples)
        if self._ages:
            batch.ages = ages_of(self, Recipe(items, fresh.next_index - 1), 0)
        return [batch]

    def begin(self, position: Position) -> None:
        self.fresh_examples, self.skipped = position.fresh_examples, position.skipped

    def serials_of(self, recipe: Recipe) -> Serials:
        """The serial of a batch, as the reader counts them."""
        return np.array([recipe.local_number], dtype=np.int64)

    def remade(self, recipe: Recipe, reread: Reread) -> Any:
        """A batch read a second time."""
        return self._own(reread.select(self.serials_of(recipe))[0])

    def num_batches(self, first: int, count: int) -> int:  # noqa: ARG002
        """How many batches so many that are read make."""
        return count

    def _own(self, batch: Any) -> Any:
        """A batch of the source as the consumer may have it."""
        return self.move(duplicate(batch) if self._kept else batch)


def ages_of(source: ExampleBatches | WholeBatches, recipe: Recipe, uses: Serials | int) -> Ages:
    """The ages of a batch, on its device."""
    numbers = source.serials_of(recipe) // source.world - source.skipped
    # One for each example, or one for all.
    echo_index, fresh_number = (np.broadcast_to(each, len(recipe.items)).copy() for each in (uses, numbers))
    own = Ages(echo_index=torch.from_numpy(echo_index), fresh_number=torch.from_numpy(fresh_number))
    ages: Ages = source.move(own)
    return ages


def stand_ins(start: int, end: int) -> keyed.Items:
    """An item for each example of whole batches, which have no serials, by how many were read before it."""
    return np.arange(start << keyed.ECHO_BITS, end << keyed.ECHO_BITS, 1 << keyed.ECHO_BITS, dtype=np.int64)


class OneByOne:
    """Batches one by one from a map that makes several at once."""

    def __init__(self, groups: AnyMap) -> None:
        self.map = groups
        self._batches: deque[Batch] = deque()

    def get(self) -> Batch | None:
        """The next batch; None after the last."""
        if not self._batches:
            self._batches.extend(self.map.get() or ())
        return self._batches.popleft() if self._batches else None

    def clear(self) -> None:
        """Forget what has been made."""
        self._batches.clear()
