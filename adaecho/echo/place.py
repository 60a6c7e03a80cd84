"""Where the consumer is, and the log: with the settings all of a loader's state.

Everything else (buffers, pools, read-ahead, threads) is a cache that may be dropped at any moment and made
anew.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from adaecho.echo.order import keyed
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.stream import NOTHING, Contents, Place, Stream
from adaecho.echo.read.failures import BadExamples
from adaecho.echo.settings import Settings

_SMALL = 1 << 14  # slots of a buffer that are looked back over in some 20 ms


class Position(NamedTuple):
    """Where the consumer is. One is never changed: another takes its place, in one statement.

    Attributes:
        fresh_examples: read for the batches taken so far.
        reread_examples: read again to restore a position.
        next_index: upstream position, as a local number; ``skipped`` of the numbers before were passed over.
        next_number: number of the next fresh batch to echo; ``first_number``: when the iteration began.
        first_index: ``next_index`` when the iteration began.
        iteration: how many have begun; ``in_pass`` while it has not ended.
        examples, batches: the places in the two streams, since the iteration began.
        oldest: an item of the examples no later than any that is held.
        held_examples: in whole batches of which a repeat is to leave.
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
    examples: Place = Place()
    batches: Place = Place()
    oldest: int = 0
    held_examples: int = 0

    def begun(self, iteration: int, index: int) -> "Position":
        """Where the consumer is as an iteration begins, at a local number."""
        return self._replace(
            iteration=iteration, in_pass=True, skipped=self.skipped + index - self.next_index,
            next_index=index, first_index=index, first_number=self.next_number, examples=Place(),
            batches=Place(), oldest=0, held_examples=0,
        )  # fmt: skip

    def ended(self, index: int, *, whole: bool) -> "Position":
        """Where it is as an iteration ends, at a local number, maybe after bad examples without a batch."""
        # How many examples a bad whole batch has is not known.
        fresh_examples = self.fresh_examples if whole else index - self.skipped
        return self._replace(
            in_pass=False, next_index=index, fresh_examples=fresh_examples, examples=Place(),
            batches=Place(),
        )  # fmt: skip


@dataclass
class Log:
    """What no seed tells: the bad examples, and how the factors changed. Only appended to while batches come.

    Attributes:
        bad: of the examples (or whole batches).
        examples, batches: the factors of the two echoes, one of which is 1.
    """

    bad: BadExamples
    examples: Factor
    batches: Factor

    def go_back(self, position: Position) -> None:
        """Forget what was met ahead of a position."""
        self.bad.go_back(position.next_index)
        self.examples.go_back(self.examples.before(position.next_index))
        self.batches.go_back(self.batches.before(position.next_number))


@dataclass
class Held:
    """What the buffers hold at a position.

    Attributes:
        examples: items in the shuffle buffer.
        batches: of each fresh batch of which a repeat is to leave, by its number, the items.
    """

    examples: Contents = NOTHING
    batches: dict[int, keyed.Items] = field(default_factory=dict)

    @property
    def serials(self) -> keyed.Items:
        """The serials behind all of these, one for each use of them; int64 [n]."""
        return np.concatenate([self.examples.items, *self.batches.values()]) >> keyed.ECHO_BITS


class Streams:
    """The streams of examples and of batches of one loader: functions of settings and log.

    Args:
        settings: of the loader.
        log: of the loader.
    """

    def __init__(self, settings: Settings, log: Log) -> None:
        self._settings, self.log = settings, log
        self.whole = settings.batch_size is None
        # Whole batches are examples of a batch size of one, shared out among the ranks by their maker.
        self.batch_size = settings.batch_size or 1
        self.rank, self.world = (0, 1) if self.whole else (settings.rank, settings.world_size)
        self.echoes_batches = settings.variant.repeats == "batches"

    @property
    def factor(self) -> Factor:
        """Of whichever echoes."""
        return self.log.batches if self.echoes_batches else self.log.examples

    def examples(self, position: Position) -> Stream:
        """Of the iteration that a position lies in."""
        settings = self._settings
        return Stream(
            settings.seed, settings.shuffle_buffer, self.log.examples, rank=self.rank, world=self.world,
            begin=position.first_index, bad=self.log.bad.numbers,
        )  # fmt: skip

    def batches(self, position: Position) -> Stream:
        """Of the iteration that a position lies in, with draws of its own."""
        settings = self._settings
        return Stream(
            settings.seed + 1, settings.batch_shuffle_buffer, self.log.batches, rank=self.rank,
            world=self.world, begin=position.first_number, bad=[],
        )  # fmt: skip

    def held(self, position: Position) -> Held:
        """What lies in the buffers at a position."""
        if not position.in_pass:
            return Held()
        stream, place = self.examples(position), position.examples
        held = Held(stream.contents(place))
        numbers = self._held_numbers(position)
        if numbers:
            size, first = self.batch_size, numbers[0] - position.first_number
            stop = numbers[-1] + 1 - position.first_number
            items = stream.leaving(place, first * size, stop * size)
            for number in numbers:
                start = (number - numbers[0]) * size
                held.batches[number] = items[start : start + size]
        return held

    def _held_numbers(self, position: Position) -> list[int]:
        """The fresh batches of which a repeat is still to leave, rising."""
        if not self.echoes_batches:
            return []
        held = self.batches(position).contents(position.batches).items
        numbers: list[int] = (keyed.serials_of(held) // self.world).tolist()
        return numbers

    def num_held(self, position: Position) -> int:
        """Distinct fresh examples in the buffers at a position."""
        if self.whole:
            return position.held_examples
        return len(keyed.distinct(self.held(position).serials))

    def oldest_serial(self, position: Position) -> int:
        """The serial from which on examples are needed to go on from a position, or an earlier one."""
        stream = self.examples(position)
        if not position.in_pass:
            return position.next_index * self.world
        if stream.size > _SMALL:
            return position.oldest >> keyed.ECHO_BITS
        oldest = stream.oldest(position.examples)
        numbers = self._held_numbers(position)
        if numbers:
            first = (numbers[0] - position.first_number) * self.batch_size
            oldest = min(oldest, stream.oldest(stream.earlier(position.examples, first)))
        return oldest >> keyed.ECHO_BITS
