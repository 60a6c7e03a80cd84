"""Counter-based random numbers: functions of (seed, fresh serial, echo index, purpose), never of call order.

Each number is a hash of its key, so results are the same for any number of workers and after any resume. The
hash is the finaliser of SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), which is vectorised
over NumPy arrays of keys.

An *item* is one use of one fresh example: its serial number and its echo index (0 for the first use),
packed into one int64 as ``serial << ECHO_BITS | echo``.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISpawnableSeedSequence
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Items = NDArray[np.int64]

NO_ITEMS: Items = np.empty(0, dtype=np.int64)

ECHO_BITS = 16

# Purposes of the echo stages start here. Augmentations number theirs from 0.
STAGE_PURPOSES = 1 << 20

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_PURPOSE = np.uint64(0xD1342543DE82EF95)


def _hash(values: Keys) -> Keys:
    """Hash keys in place."""
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
    """Every use of some fresh examples (or batches), one example after another.

    Args:
        serials: shape [n].
        counts: how often each is used, shape [n].

    Returns:
        Items, shape [sum of counts].
    """
    firsts = np.cumsum(counts) - counts  # [n], the place of each one's first use
    items: Items = np.repeat((serials << ECHO_BITS) - firsts, counts)
    items += np.arange(len(items))  # the place less that of the first use is the echo index
    return items


def distinct(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the distinct numbers, ascending.

    ``np.unique`` of NumPy 2.4 hashes integers, which takes far longer for a million. It also imports
    ``numpy.ma`` at its first call, where an interrupt could fall into the middle of a block.
    """
    rising: NDArray[np.int64] = np.sort(numbers)
    new = np.ones(len(rising), dtype=bool)  # [numbers]: it differs from the one before
    np.not_equal(rising[1:], rising[:-1], out=new[1:])
    return rising[new]


def item_keys(seed: int, items: Items) -> Keys:
    """Return the key of each item under a seed.

    Args:
        seed: any integer; its lowest 64 bits count.
        items: packed (serial, echo index) pairs, shape [n].
    """
    base = _hash(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN)  # [1]
    keys: Keys = items.astype(np.uint64)  # [n], a copy
    keys *= _GOLDEN
    keys += base
    keys = _hash(keys)
    keys ^= base
    return _hash(keys)


def bits(keys: Keys, purpose: int) -> Keys:
    """Return 64 random bits per key; different purposes give independent bits.

    Args:
        keys: shape [n].
        purpose: number of the draw within one augmentation, 0 <= purpose < 2**32.
    """
    offset = np.array([purpose + 1], dtype=np.uint64) * _PURPOSE  # [1]
    return _hash(keys + offset)


def uniform(keys: Keys, purpose: int) -> NDArray[np.float64]:
    """Return one number in [0, 1) per key, with 53 random bits."""
    return _scaled(keys, purpose, 1)


def integers(keys: Keys, purpose: int, low: int, high: int) -> NDArray[np.int64]:
    """Return one integer in [low, high) per key; the bias is below (high - low) * 2**-53."""
    if high <= low:
        raise ValueError(f"integers: no integer lies in [{low}, {high})")
    drawn: NDArray[np.int64] = _scaled(keys, purpose, high - low).astype(np.int64)
    return drawn + low if low else drawn


def _scaled(keys: Keys, purpose: int, size: int) -> NDArray[np.float64]:
    """Return one number in [0, size) per key, with one rounding: a product with a power of two is exact."""
    drawn = bits(keys, purpose)  # [n]
    drawn >>= np.uint64(11)
    scaled: NDArray[np.float64] = drawn.astype(np.float64)  # [n]
    scaled *= size * 2.0**-53
    return scaled


class _Seed(ISpawnableSeedSequence):
    """The key of a Philox generator, in the form of a seed sequence.

    With ``key=`` NumPy would first gather entropy: this takes most of the time, and ``spawn`` would use it.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._parent: np.random.SeedSequence | None = None

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Keys:  # noqa: ARG002 (Philox asks for 2)
        return np.array([self._key, 0], dtype=np.uint64)

    def spawn(self, n_children: int) -> list[Any]:
        """Return seeds of independent generators, new ones at each call."""
        self._parent = self._parent or np.random.SeedSequence(self._key)
        return self._parent.spawn(n_children)


def generator(key: Any) -> np.random.Generator:
    """Return a NumPy generator for one key."""
    seed: Any = _Seed(int(key))
    return np.random.Generator(np.random.Philox(seed))


def seed_globally(key: int, of_torch: int) -> None:
    """Seed the global generators of ``random``, NumPy and torch; torch's seeds have 63 bits."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(of_torch)


def are_seeded(key: int, of_torch: int) -> bool:
    """Whether nothing was drawn from the global generators since ``seed_globally``; moves them."""
    following = random.random(), np.random.random(), float(torch.rand(()))
    seed_globally(key, of_torch)
    return following == (random.random(), np.random.random(), float(torch.rand(())))


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Restore the global generators of ``random``, NumPy and torch on exit."""
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
