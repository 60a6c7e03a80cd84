"""Random numbers computed from keys, so that they do not depend on the order of calls.

In this package, an *item* is one use of an example, stored as one int64: ``serial << ECHO_BITS | echo``. The
serial number counts the examples in reading order, over all ranks and epochs. ``echo`` is the index of the
repeat, 0 for the first use.

A *key* is a hash of the seed and an item. The hash function is the finalizer of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Items = NDArray[np.int64]

NO_ITEMS: Items = np.empty(0, dtype=np.int64)

ECHO_BITS = 16

# The purposes of the echo stages start at this number. Augmentations number their purposes from 0.
STAGE_PURPOSES = 1 << 20

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_PURPOSE = np.uint64(0xD1342543DE82EF95)


def _hash(values: Keys) -> Keys:
    """Hash each uint64 in place, and return the same array."""
    shifted = values >> np.uint64(30)  # [n], as values
    values ^= shifted
    values *= _MIX_1
    np.right_shift(values, np.uint64(27), out=shifted)
    values ^= shifted
    values *= _MIX_2
    np.right_shift(values, np.uint64(31), out=shifted)
    values ^= shifted
    return values


def uses(serials: NDArray[np.int64], counts: NDArray[np.int64]) -> Items:
    """Return one int64 for each repeat: ``counts[i]`` consecutive items for the example ``serials[i]``."""
    firsts = np.cumsum(counts) - counts  # [n], the index of each example's first use in the result
    items: Items = np.repeat((serials << ECHO_BITS) - firsts, counts)
    items += np.arange(len(items))  # the index minus that of the first use is the echo index
    return items


def distinct(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sorted distinct values of an array, as ``np.unique`` does."""
    # np.unique in NumPy 2.4 hashes, which is far slower. Its first call also imports numpy.ma, and an
    # interrupt during this import could leave the caller's data inconsistent.
    rising: NDArray[np.int64] = np.sort(numbers)
    new = np.ones(len(rising), dtype=bool)  # [n], whether a number differs from the one before it
    np.not_equal(rising[1:], rising[:-1], out=new[1:])
    return rising[new]


def item_keys(seed: int, items: Items) -> Keys:
    """Return one uint64 key for each repeat of an example, to seed the repeat's random numbers."""
    # Only the lowest 64 bits of the seed count.
    base = _hash(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN)  # [1]
    keys: Keys = items.astype(np.uint64)  # [n], a copy
    keys *= _GOLDEN
    keys += base
    keys = _hash(keys)
    keys ^= base
    return _hash(keys)


def bits(keys: Keys, purpose: int) -> Keys:
    """Return 64 random bits for each key. Different integers ``purpose`` give independent bits."""
    offset = np.array([purpose + 1], dtype=np.uint64) * _PURPOSE  # [1]; 0 <= purpose < 2**32
    return _hash(keys + offset)


def uniform(keys: Keys, purpose: int) -> NDArray[np.float64]:
    """Return a uniform random float64 in [0, 1) for each key, with 53 random bits."""
    return _scaled(keys, purpose, 1)


def integers(keys: Keys, purpose: int, low: int, high: int) -> NDArray[np.int64]:
    """Return a uniform random integer in [low, high) for each key."""
    if high <= low:
        raise ValueError(f"integers: no integer lies in [{low}, {high})")
    drawn: NDArray[np.int64] = _scaled(keys, purpose, high - low).astype(np.int64)
    return drawn + low if low else drawn


def _scaled(keys: Keys, purpose: int, size: int) -> NDArray[np.float64]:
    """Return a uniform random float64 in [0, size) for each key."""
    drawn = bits(keys, purpose)  # [n]
    drawn >>= np.uint64(11)
    scaled: NDArray[np.float64] = drawn.astype(np.float64)  # [n]
    # The scaling factor is exact, so each result is rounded only once.
    scaled *= size * 2.0**-53
    return scaled


# Philox(key=...) would be slower, because it first gathers entropy from the operating system.
class _Seed(ISeedSequence):
    """A seed sequence that gives NumPy's Philox generator a fixed 64-bit key."""

    def __init__(self, key: int) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Keys:  # noqa: ARG002 (Philox asks for 2)
        return np.array([self._key, 0], dtype=np.uint64)


def generator(key: Any) -> np.random.Generator:
    """Return a NumPy random generator seeded with a key."""
    seed: Any = _Seed(int(key))
    return np.random.Generator(np.random.Philox(seed))


def seed_globally(key: int, of_torch: int) -> None:
    """Seed the global random generators of Python and NumPy with ``key``, and torch's with ``of_torch``."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(of_torch)


def are_seeded(key: int, of_torch: int) -> bool:
    """Return whether the global random generators are unchanged since ``seed_globally`` seeded them."""
    # The next numbers are compared with those after reseeding. This changes the states, so the caller must
    # restore them.
    following = random.random(), np.random.random(), float(torch.rand(()))
    seed_globally(key, of_torch)
    return following == (random.random(), np.random.random(), float(torch.rand(())))


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Restore the global random generators of Python, NumPy and torch at the end of the block."""
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
