"""The order in which each epoch reads the rows: shuffled, sequential, or from a sampler."""

import operator
import threading
import zlib
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adaecho.echo.order import keyed

Rows = NDArray[np.int64]

# A permutation of at least this many rows is computed row by row, without an array of all rows. A shorter one
# is drawn as an array for each pass, which costs little (benchmarks/permutation_length.json) and preserves
# the order of runs recorded before permutations could be computed.
LEAST_COMPUTED = 1 << 22
BLOCK = 4096  # number of rows computed at once
_ROUNDS = 6  # Feistel rounds; 4 already give a pseudorandom permutation (Luby and Rackoff, 1988)
_ROUND_KEYS = keyed.STAGE_PURPOSES + 3  # purpose of the first round's key; the buffers use earlier ones


class Permutation:
    """The order in which the rows of a source with a known length are read, over all epochs.

    Each row is one example. Each epoch reads all rows once.

    Args:
        length: number of rows in the source.
        order: "permutation" shuffles all rows again in every epoch. "shards" shuffles the shards and reads
            each shard in order. "sequential" does not shuffle.
        shard_lengths: number of examples in each shard; needed for "shards".
        passes: number of epochs in each iteration of the loader; None if iteration is endless.
        drop_last: whether to drop a remainder that cannot be divided evenly among the ranks. Otherwise, the
            first examples of the iteration are repeated to fill it up.

    Attributes:
        iteration_length: number of examples that all ranks together read in one iteration; 0 if endless.
        method: "drawn" if each permutation is stored as an array, "computed" if rows are computed one by one.
    """

    def __init__(
        self,
        length: int,
        order: str,
        seed: int,
        shard_lengths: Rows | None = None,
        *,
        passes: int | None = None,
        world: int = 1,
        drop_last: bool = False,
    ) -> None:
        self._stored = length * (passes or 0)  # examples of one iteration
        of_each = self._stored // world if drop_last else -(-self._stored // world)
        self.iteration_length = of_each * world
        self.length = length
        self._lengths = None if shard_lengths is None else np.asarray(shard_lengths, dtype=np.int64)
        self._order, self._seed = order, seed
        self.method = "computed" if order == "permutation" and length >= LEAST_COMPUTED else "drawn"
        self._dtype = np.uint32 if length <= 1 << 32 else np.int64
        self._kept: dict[int, NDArray[Any]] = {}
        self._block: tuple[int, Rows] = -1, keyed.NO_ITEMS  # the number and rows of the cached block

    def rows(self, serials: NDArray[np.int64]) -> Rows:
        """Return the dataset row at each given position of the reading order, which spans all epochs."""
        blocks = serials // BLOCK
        if self.method != "computed" or not len(serials) or (blocks != blocks[0]).any():
            return self._of_serials(serials)
        # Rows are computed in blocks, because a NumPy call costs about as much for a few rows as for many.
        number, rows = self._block
        if number != blocks[0]:
            number = int(blocks[0])
            rows = self._of_serials(number * BLOCK + np.arange(BLOCK, dtype=np.int64))
            # Threads may call this in parallel. One statement changes the pair, so no thread sees it half
            # changed.
            self._block = number, rows
        return rows[serials - number * BLOCK]

    def mark(self, serial: int) -> int:  # noqa: ARG002 (a sampler's pass may differ)
        """Return a checksum of the reading order in the epoch that contains example number ``serial``."""
        # A resume compares it with the saved one to detect changed data or a different sampler.
        if self._order != "shards":
            return 0  # the order depends only on the seed and the number of rows
        return zlib.crc32(self._lengths.tobytes())  # type: ignore[union-attr]

    def _placed(self, serials: NDArray[np.int64]) -> tuple[Rows, Rows]:
        """Return the epoch of each example and the position within that epoch, int64 [n] each."""
        if self.iteration_length != self._stored:
            iterations, positions = np.divmod(serials, self.iteration_length)
            serials = iterations * self._stored + positions % self._stored
        return np.divmod(serials, self.length)

    def _of_serials(self, serials: NDArray[np.int64]) -> Rows:
        passes, positions = self._placed(serials)  # [n] each
        if self._order == "sequential" or not len(passes):
            return positions
        if (passes == passes[0]).all():
            return self._of_pass(int(passes[0]), positions)
        rows = np.empty(len(serials), dtype=np.int64)  # [n]
        for number in np.unique(passes):
            chosen = passes == number  # bool [n]
            rows[chosen] = self._of_pass(int(number), positions[chosen])
        return rows

    def _of_pass(self, number: int, positions: Rows) -> Rows:
        """Return the row at each position of one epoch."""
        if self.method == "computed":
            return permuted(positions, self.length, self._seed, number)
        if self._order != "shards":
            return self._pass(number)[positions].astype(np.int64)
        ends, shifts = self._pass(number)
        rows: Rows = positions + shifts[np.searchsorted(ends, positions, side="right")]
        return rows

    def _pass(self, number: int) -> NDArray[Any]:
        if number not in self._kept:
            if len(self._kept) > 1:
                del self._kept[min(self._kept)]
            self._kept[number] = self._drawn(number)
        return self._kept[number]

    def _drawn(self, number: int) -> NDArray[Any]:
        rng = np.random.Generator(_bits_of(self._seed, number))
        if self._order == "shards":
            assert self._lengths is not None
            shards = rng.permutation(len(self._lengths))  # [shards], in the order of this pass
            lengths, starts = self._lengths[shards], (np.cumsum(self._lengths) - self._lengths)[shards]
            ends = np.cumsum(lengths)  # [shards]
            # [2, shards]: for each shard, the position at which it ends, and the row minus the position.
            return np.stack([ends, starts - (ends - lengths)])
        return rng.permutation(np.arange(self.length, dtype=self._dtype))  # [length]


def _bits_of(seed: int, number: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed & 0xFFFFFFFFFFFFFFFF, number], dtype=np.uint64))


def permuted(positions: Rows, length: int, seed: int, number: int) -> Rows:
    """Return the rows at the given positions of a random permutation of ``range(length)``.

    Each row is computed from its position by a generalized Feistel network with cycle-walking (Black and
    Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).

    Args:
        positions: positions in the permutation, int64 [n], each in [0, length).
        length: number of rows, >= 1.
        number: number of the epoch, which selects the permutation together with the seed.
    """
    key = keyed.item_keys(seed, np.array([number << keyed.ECHO_BITS], dtype=np.int64))
    keys = [keyed.bits(key, _ROUND_KEYS + turn) for turn in range(_ROUNDS)]  # uint64 [1] each
    sizes = isqrt(length - 1) + 1, -(-length // (isqrt(length - 1) + 1))
    rows = _network(positions, keys, sizes)
    beyond = np.flatnonzero(rows >= length)
    while len(beyond):
        rows[beyond] = _network(rows[beyond], keys, sizes)
        beyond = beyond[rows[beyond] >= length]
    return rows


# A value is a pair (left, right) in [0, a) x [0, b), with a b >= length. Each round adds a keyed hash of one
# side to the other. Results of length or more are rare, because a b < length + a, and are mapped again.
def _network(values: Rows, keys: list[keyed.Keys], sizes: tuple[int, int]) -> Rows:
    size, other = sizes
    left, right = np.divmod(values, other)  # [n] each, below size and other
    for key in keys:
        left += keyed.integers(right.astype(np.uint64) + key, 0, 0, size)
        left -= np.where(left >= size, size, 0)
        left, right, size, other = right, left, other, size
    return left * other + right


def seeds_of_pass(seed: int, number: int) -> tuple[int, int]:
    """Return two seeds below 2**63 for an epoch: one for the sampler, one for the dataset."""
    drawn = _bits_of(seed, number).random_raw(2)
    return int(drawn[0]) >> 1, int(drawn[1]) >> 1


class SampledOrder(Permutation):
    """The order from a user's sampler, seeded so that a resumed loader can draw it again."""

    def __init__(
        self, sampler: Any, rows: int, seed: int, *, passes: int | None, world: int, drop_last: bool
    ) -> None:
        if not len(sampler):
            raise ValueError(f"sampler={type(sampler).__name__}: the sampler yields no rows (length 0)")
        super().__init__(len(sampler), "sampler", seed, passes=passes, world=world, drop_last=drop_last)
        self._sampler, self._num_rows = sampler, rows  # ``rows`` is the number of rows in the source
        self._marked: tuple[Any, int] = None, 0  # the rows of a pass and their digest
        self._lock = threading.Lock()  # only one thread at a time may draw from a sampler
        # The order may depend only on the seed and the epoch. A torch sampler with a ``generator`` draws only
        # from this generator, so it is not checked.
        asks_generator = hasattr(sampler, "generator") and type(sampler).__module__.startswith("torch.")
        if not asks_generator and not np.array_equal(self._drawn(0), self._drawn(0)):
            raise ValueError(
                f"sampler={type(sampler).__name__}: the sampler drew two orders for one pass, so no resume "
                "would be exact; set its attribute `generator` to a torch.Generator, or seed it in "
                "set_epoch(epoch)"
            )

    def mark(self, serial: int) -> int:
        rows = self._pass(int(self._placed(np.array([serial]))[0][0]))
        if self._marked[0] is not rows:  # the digest is cached, because a pass may have 10**8 rows
            self._marked = rows, zlib.crc32(np.ascontiguousarray(rows).data)
        return self._marked[1]

    def _pass(self, number: int) -> NDArray[Any]:
        with self._lock:
            return super()._pass(number)

    def _drawn(self, number: int) -> NDArray[Any]:
        sampler = self._sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        if not hasattr(sampler, "generator"):
            return self._rows()
        drawn_with = torch.Generator()
        drawn_with.manual_seed(seeds_of_pass(self._seed, number)[0])
        # While the sampler is being read, a seeded generator replaces its own.
        own, sampler.generator = sampler.generator, drawn_with
        try:
            return self._rows()
        finally:
            sampler.generator = own

    def _rows(self) -> NDArray[Any]:
        error = ValueError(
            f"sampler={type(self._sampler).__name__}: must yield as many rows as its length, {self.length}, "
            f"each an integer in [0, {self._num_rows}); for a BatchSampler pass its sampler, batch_size= and "
            "drop_last="
        )
        try:
            rows = np.fromiter(map(operator.index, self._sampler), dtype=np.int64)
        except TypeError:
            raise error from None
        if len(rows) != self.length or rows.min() < 0 or rows.max() >= self._num_rows:
            raise error
        return rows
