"""A slow echo pipeline, one example at a time in plain Python, written from the definitions alone.

It shares no code with the loader: the hash is on Python integers, the buffer is a list, the echo a loop.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

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


def fresh_serials(
    rank: int, world: int, length: int, first_pass: int, passes: int | None
) -> Iterator[tuple[int, int]]:
    """The serials of a rank, each with its pass and position, as length * pass + position.

    Of an iteration of some passes every rank has equally many: its first examples come again at its end.
    """
    if passes is None:
        yield from ((serial, serial) for serial in itertools.count(rank, world))
        return
    examples = range(first_pass * length, (first_pass + passes) * length)
    of_each = math.ceil(len(examples) / world)
    start = first_pass // passes * of_each
    for number in range(of_each):
        serial = (start + number) * world + rank
        yield serial, examples[(number * world + rank) % len(examples)]


def row_of(place: int, length: int, seed: int, order: str) -> int:
    number, position = divmod(place, length)
    return position if order == "stored" else permutation(length, seed, number)[position]


@lru_cache
def permutation(length: int, seed: int, number: int) -> list[int]:
    rng = np.random.Generator(np.random.Philox(key=[seed & MASK, number]))
    rows: list[int] = rng.permutation(np.arange(length, dtype=np.uint32)).tolist()
    return rows


def echoed(
    things: Iterator[tuple[int, Any]], seed: int, factor: float, world: int
) -> Iterator[tuple[int, int, Any]]:
    for serial, thing in things:
        for echo in range(repeats(seed, serial // world, factor)):
            yield serial, echo, thing


def shuffled(items: Iterator[tuple[int, int, Any]], seed: int, size: int) -> Iterator[tuple[int, int, Any]]:
    buffer: list[tuple[int, int, Any]] = []
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
            continue
        if not size:
            yield item
            continue
        slot = int(uniform(key(seed, item[0], item[1]), SLOT) * size)
        leaving, buffer[slot] = buffer[slot], item
        yield leaving
    yield from sorted(buffer, key=lambda item: bits(key(seed, item[0], item[1]), DRAIN))


def batches(
    examples: list[Any],
    *,
    batch_size: int,
    echo: str,
    factor: float = 1.0,
    shuffle_buffer: int = 0,
    batch_shuffle_buffer: int = 0,
    augment: Callable[[Any, int], Any],
    once: Callable[[Any, int], Any] | None = None,
    order: str = "permutation",
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    passes: int | None = None,
    first_pass: int = 0,
    ages: list[list[tuple[int, int]]] | None = None,
) -> Iterator[tuple[list[Any], int]]:
    """Batches as lists of examples, each with the number of fresh examples read when it was complete.

    ``once`` comes before ``augment``: before the echo where that is of examples. To ``ages`` each batch adds,
    for each example, how often it was used before, and how many had been read before it.
    """
    reads, once_first = 0, echo.startswith("example")
    number_of: dict[int, int] = {}  # by serial
    of_batches: list[list[tuple[int, int]]] = []

    def augmented_once(example: Any, serial: int, repeat: int) -> Any:
        return example if once is None else once(example, key(seed ^ ONCE, serial, repeat))

    def read() -> Iterator[tuple[int, Any]]:
        nonlocal reads
        length = len(examples)
        for serial, place in fresh_serials(rank, world, length, first_pass, passes):
            number_of[serial] = reads
            reads += 1
            example = examples[row_of(place, length, seed, order)]
            if once_first:
                example = augmented_once(example, serial, 0)
            if echo == "example_after_augmentation":
                example = augment(example, key(seed, serial, 0))
            yield serial, example

    def batch(items: Iterator[tuple[int, int, Any]]) -> Iterator[list[Any]]:
        made: list[Any] = []
        used: Counter[int] = Counter()
        for serial, repeat, example in items:
            if not made:
                of_batches.append([])
            of_batches[-1].append((used[serial], number_of[serial]))
            used[serial] += 1
            if not once_first:
                example = augmented_once(example, serial, repeat)
            if echo != "example_after_augmentation":
                example = augment(example, key(seed, serial, repeat))
            made.append(example)
            if len(made) == batch_size:
                yield made
                made = []
        if made:
            yield made

    example_factor = factor if echo.startswith("example") else 1.0
    made = batch(shuffled(echoed(read(), seed, example_factor, world), seed, shuffle_buffer))
    if echo == "batch":
        numbered = ((rank + world * number, one) for number, one in enumerate(made))
        repeated = shuffled(echoed(numbered, seed + 1, factor, world), seed + 1, batch_shuffle_buffer)
    else:
        repeated = ((rank + world * number, 0, one) for number, one in enumerate(made))
    batches_used: Counter[int] = Counter()
    for serial, _, one in repeated:
        if ages is not None:
            own = of_batches[serial // world]
            ages.append([(use + batches_used[serial], number) for use, number in own])
            batches_used[serial] += 1
        yield one, reads
