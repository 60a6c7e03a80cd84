"""A slow echo pipeline, one example at a time in plain Python, written from the definitions alone.

It shares no code with the loader: the hash is on Python integers, the buffer is a list, the echo a loop.
"""

import math
from functools import lru_cache

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


@lru_cache
def permutation(length: int, seed: int, number: int) -> list[int]:
    rng = np.random.Generator(np.random.Philox(key=np.array([seed & MASK, number], np.uint64)))
    rows: list[int] = rng.permutation(np.arange(length, dtype=np.uint32)).tolist()
    return rows
