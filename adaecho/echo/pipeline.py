"""The stages of each variant in the paper's order, as one stream of batches with its state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaecho.echo import keys
from adaecho.echo.augment import Augmentation
from adaecho.echo.examples import Stack, collate, concatenate
from adaecho.echo.pool import Examples, ListPool
from adaecho.echo.stage import EchoStage, Fresh, Taken
from adaecho.echo.upstream import Reader


@dataclass
class Ready:
    """A batch and where the stages stood when it was complete.

    Attributes:
        batch: what the consumer gets.
        output: outputs of the example stage up to its last example (of the last fresh batch, under batch
            echoing).
        next_index: upstream position there.
        batch_output: outputs of the batch echo stage, 0 without one.
    """

    batch: Any
    output: int
    next_index: int
    batch_output: int = 0


class ExampleBatches:
    """read > [decode > augment >] echo > shuffle > [augment >] batch: batches from the example stage."""

    def __init__(
        self,
        stage: EchoStage,
        batch_size: int,
        augment: Augmentation | None,
        user_collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.stage = stage
        self._batch_size, self._augment, self._collate = batch_size, augment, user_collate

    def next(self) -> tuple[Ready, keys.Items] | None:
        """The next batch and its items; None at the end of the pass."""
        parts = self.stage.take(self._batch_size)
        if not parts:
            return None
        items = np.concatenate([taken.items for taken, _ in parts])
        last = parts[-1][0]
        batch = self.finish(items, _joined(parts))
        return Ready(batch, last.end, int(last.next_indices[-1])), items

    def finish(self, items: keys.Items, examples: Examples) -> Any:
        """Augment and collate the examples of one batch."""
        if self._augment is not None:
            examples = self._augment(items, examples)
        if self._collate is not None:
            return self._collate(examples.examples() if isinstance(examples, Stack) else examples)
        return examples.batch() if isinstance(examples, Stack) else collate(examples)


def _joined(parts: list[tuple[Taken, Examples]]) -> Examples:
    blocks = [examples for _, examples in parts]
    if len(blocks) == 1:
        return blocks[0]
    stacks = [block for block in blocks if isinstance(block, Stack)]
    if len(stacks) == len(blocks):
        return concatenate(stacks)
    return [
        example for block in blocks for example in (block.examples() if isinstance(block, Stack) else block)
    ]


class EchoedBatches:
    """... > batch > echo [> shuffle batches]: repeats whole batches (paper, section 3)."""

    def __init__(
        self, batches: ExampleBatches, *, seed: int, factor: float, buffer: int, rank: int, world: int
    ) -> None:
        self._batches = batches
        self._rank, self._world = rank, world
        self.stage = EchoStage(
            self._take, seed=seed, factor=factor, buffer=buffer, rank=rank, world=world, pool=ListPool()
        )
        self._next_number = 0
        # By batch number: items of each batch, and outputs of the example stage when it was complete.
        self._items: dict[int, keys.Items] = {}
        self._ends: dict[int, tuple[int, int]] = {}

    def begin_pass(self) -> None:
        """Start with nothing held."""
        self.stage.begin_pass(self._next_number)

    def next(self) -> Ready | None:
        """The next repeat; None at the end of the pass."""
        parts = self.stage.take(1)
        if not parts:
            return None
        taken, batches = parts[0]
        output, next_index = self._ends[int(taken.next_indices[-1])]
        assert isinstance(batches, list)
        return Ready(batches[0], output, next_index, taken.end)

    def _take(self, count: int) -> Fresh | None:
        made = []
        for _ in range(count):
            batch = self._batches.next()
            if batch is None:
                break
            ready, items = batch
            self._items[self._next_number] = items
            self._next_number += 1
            self._ends[self._next_number] = ready.output, ready.next_index
            made.append(ready.batch)
        if not made:
            return None
        numbers = np.arange(self._next_number - len(made), self._next_number, dtype=np.int64)
        return Fresh(numbers * self._world + self._rank, made, self._next_number)

    def state_at(self, batch_output: int) -> tuple[dict[str, Any], dict[int, keys.Items]]:
        """State of the batch stage, and the items of every batch it held."""
        state = self.stage.state_at(batch_output)
        held = {int(item) >> keys.ECHO_BITS for item in state["buffer"]}
        if state["pending_repeats"]:
            held.add(state["pending_item"] >> keys.ECHO_BITS)
        numbers = sorted(serial // self._world for serial in held)
        return state, {number: self._items[number] for number in numbers}

    def forget(self, ready: Ready) -> None:
        """States before this batch won't be asked for any more."""
        self.stage.forget(ready.batch_output)
        state, held = self.state_at(ready.batch_output)
        for number in [n for n in self._items if n < state["next_index"] and n not in held]:
            del self._items[number]
        for number in [n for n in self._ends if n < state["next_index"]]:
            del self._ends[number]

    def load(
        self, state: dict[str, Any], held: dict[int, keys.Items], remake: Callable[[keys.Items], Any]
    ) -> None:
        """Return to a state, making the batches it held again."""
        self._items = dict(held)
        self._next_number = state["next_index"]
        self._ends = {}

        def reread(serials: Any) -> list[Any]:
            return [remake(held[int(serial) // self._world]) for serial in serials]

        self.stage.load(state, reread)

    def note_end(self, output: int, next_index: int) -> None:
        """Where the example stage stands at the batch stage's position."""
        self._ends[self._next_number] = output, next_index


def reread_examples(reader: Reader, serials: Any) -> Any:
    """Fresh examples again; raises ValueError where one that was good can't be read now."""
    good, things = reader.read(serials)
    if len(good) != len(serials):
        missing = sorted(set(serials.tolist()) - set(good.tolist()))
        raise ValueError(f"restoring: {len(missing)} buffered examples can't be read again: {missing[:5]}")
    return things
