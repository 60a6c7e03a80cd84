"""An independent loader after the paper: batch n is a function of (seed, n), and its state is one number.

"We implement data echoing by inserting a stage in the training pipeline that repeats (echoes) the outputs of
the previous stage. [...] In some cases, we also shuffle the outputs of the echoing stage." (Choi, Passos,
Shallue, Dahl 2019, section 2.) The slot of an item in the buffer is a hash of the item:

1. When item t enters, the last item before t with the same slot leaves.
2. The item that enters at t follows from the seed, for examples and for batches.
3. At the end of an iteration the remaining items leave in the order of a hash. So n determines the batch.

The code is plain Python for single examples. It shares nothing with the loader, not even the hash. Its only
stored values are caches.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch.utils.data import default_collate

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
REPEATS, SLOT, DRAIN = (1 << 20), (1 << 20) + 1, (1 << 20) + 2
ONCE = 0x6F6E63655F666F72


def splitmix_hash(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def key(seed: int, serial: int, echo: int) -> int:
    base = splitmix_hash(((seed & MASK) + GOLDEN) & MASK)
    item = (serial << 16) | echo
    return splitmix_hash(splitmix_hash((item * GOLDEN + base) & MASK) ^ base)


def bits(drawn: int, purpose: int) -> int:
    return splitmix_hash((drawn + (purpose + 1) * 0xD1342543DE82EF95) & MASK)


def uniform(drawn: int, purpose: int) -> float:
    return (bits(drawn, purpose) >> 11) / 2**53


def repeats(seed: int, serial: int, factor: float) -> int:
    whole = math.floor(factor)
    return whole + (uniform(key(seed, serial, 0), REPEATS) < factor - whole)


@lru_cache
def permutation(length: int, seed: int, number: int) -> list[int]:
    rng = np.random.Generator(np.random.Philox(key=np.array([seed & MASK, number], np.uint64)))
    rows: list[int] = rng.permutation(np.arange(length, dtype=np.uint32)).tolist()
    return rows


Item = tuple[int, int]  # local number (serial = number * world + rank) and echo index
Made = tuple[list[Item], int]  # items of a batch, and the number of examples read


@dataclass
class Echo:
    """Repeats and shuffles the good numbers from ``first`` to ``end`` (None: without end)."""

    seed: int
    factor: float
    size: int
    first: int
    end: int | None
    rank: int
    world: int
    good: Callable[[int], bool]

    def __post_init__(self) -> None:
        self.next = self.first
        self.slot = lru_cache(None)(self.slot)
        self.entered: list[Item] = []  # item t at t

    def enters(self, t: int) -> bool:
        while len(self.entered) <= t and self.next != self.end:
            count = repeats(self.seed, self.next, self.factor) if self.good(self.next) else 0
            self.entered += [(self.next, echo) for echo in range(count)]
            self.next += 1
        return t < len(self.entered)

    def key(self, t: int) -> int:
        number, echo = self.entered[t]
        return key(self.seed, number * self.world + self.rank, echo)

    def slot(self, t: int) -> int:
        return t if t < self.size else int(uniform(self.key(t), SLOT) * self.size)

    def leaves(self, n: int) -> tuple[Item, int] | None:
        """Output n and the numbers that have entered, or None after the last output."""
        t = n + self.size
        if self.enters(t):
            before = (s for s in reversed(range(t)) if self.slot(s) == self.slot(t))
            return self.entered[next(before) if self.size else t], self.entered[t][0] + 1
        last = {self.slot(t): t for t in range(len(self.entered))} if self.size else {}  # by slot
        drained = sorted(last.values(), key=lambda t: bits(self.key(t), DRAIN))
        left = n - len(self.entered) + len(drained)
        return (self.entered[drained[left]], self.next) if left < len(drained) else None


@dataclass
class MiniLoader:
    """Like an EchoLoader of a list of examples. Augmentations take (example, key)."""

    examples: list[Any]
    batch_size: int
    echo: str = "none"
    factor: float = 1.0
    shuffle_buffer: int = 0
    batch_shuffle_buffer: int = 0
    once: Callable[[Any, int], Any] | None = None  # (once, each_time), or augment alone
    augment: Callable[[Any, int], Any] | None = None
    order: str = "permutation"
    epochs: int | None = None
    drop_last: bool = False
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    bad: frozenset[int] = frozenset()  # rows that fail
    n: int = 0  # batches taken

    def __post_init__(self) -> None:
        self.stored = len(self.examples) * (self.epochs or 0)  # examples of an iteration on all ranks
        self.of_each = self.parts(self.stored, self.world_size)
        self.stages, self.length = lru_cache(self.stages), lru_cache(self.length)
        self.batches_of = lru_cache(self.batches_of)

    def parts(self, number: int, size: int) -> int:
        return number // size if self.drop_last else math.ceil(number / size)

    def stages(self, iteration: int) -> tuple[Echo, Echo]:
        """The stages of examples and of batches. One of them echoes."""

        def stage(echoes: bool, seed: int, size: int, first: int, count: int, good: Any) -> Echo:
            factor, end = self.factor if echoes else 1, first + count if self.epochs else None
            return Echo(seed, factor, size, first, end, self.rank, self.world_size, good)

        *before, batches = map(self.batches_of, range(iteration + 1))
        of_batches, first = self.echo == "batch", iteration * self.of_each
        return (
            stage(not of_batches, self.seed, self.shuffle_buffer, first, self.of_each, self.good),
            stage(of_batches, self.seed + 1, self.batch_shuffle_buffer, sum(before), batches, lambda _: True),
        )

    def good(self, number: int) -> bool:
        return self.row(number * self.world_size + self.rank) not in self.bad

    def batches_of(self, iteration: int) -> int:
        numbers = range(iteration * self.of_each, (iteration + 1) * self.of_each)
        return self.parts(sum(map(self.good, numbers)), self.batch_size)

    def fresh_batch(self, iteration: int, m: int) -> Made | None:
        left = map(self.stages(iteration)[0].leaves, range(m * self.batch_size, (m + 1) * self.batch_size))
        made = list(itertools.takewhile(bool, left))
        if not made or (self.drop_last and len(made) < self.batch_size):
            return None
        return [item for item, _ in made], made[-1][1]

    def batch(self, iteration: int, m: int) -> Made | None:
        """Items of a batch and the number of examples read, or None after the last batch."""
        if self.echo != "batch":
            return self.fresh_batch(iteration, m)
        stage = self.stages(iteration)[1]
        if (left := stage.leaves(m)) is None:
            return None
        (number, _), come = left
        made, last = (self.fresh_batch(iteration, one - stage.first) for one in (number, come - 1))
        return made[0], last[1]

    def length(self, iteration: int) -> int:
        return next(m for m in itertools.count() if self.batch(iteration, m) is None)

    def row(self, serial: int) -> int:
        if self.epochs:  # the first examples repeat at the end until all ranks have the same number
            iteration, position = divmod(serial, self.of_each * self.world_size)
            serial = iteration * self.stored + position % self.stored
        number, position = divmod(serial, len(self.examples))
        if self.order == "sequential":
            return position
        return permutation(len(self.examples), self.seed, number)[position]

    def example(self, number: int, echo: int) -> Any:
        serial = number * self.world_size + self.rank
        one = self.examples[self.row(serial)]
        if self.once is not None:
            one = self.once(one, key(self.seed ^ ONCE, serial, 0))
        if self.augment is not None:
            echo = 0 if self.echo == "example_after_augmentation" else echo
            one = self.augment(one, key(self.seed, serial, echo))
        return one

    def cursor(self) -> tuple[int, int]:
        """The iteration of batch n, and the number of the next batch in it."""
        iteration, m = 0, self.n
        while self.epochs and m >= (length := self.length(iteration)):
            iteration, m = iteration + 1, m - length
        return iteration, m

    def __len__(self) -> int:
        return self.length(self.cursor()[0])

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Yield the batches of the iteration with ``fresh_examples``."""
        iteration, m = self.cursor()
        while (made := self.batch(iteration, m)) is not None:
            self.n, m = self.n + 1, m + 1
            yield default_collate([self.example(*item) for item in made[0]]), made[1]
