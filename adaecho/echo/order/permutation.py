"""The order in which the rows of a source of known length are read: a permutation, or a sampler's."""

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

# From so many rows on a permutation is computed row by row. Below it is drawn as an array for each pass: that
# keeps the orders of recorded runs, and there it costs little (benchmarks/permutation_length.json).
LEAST_COMPUTED = 1 << 22
BLOCK = 4096  # rows computed at once
_ROUNDS = 6  # a Feistel network of 4 is a pseudorandom permutation already (Luby and Rackoff, 1988)
_ROUND_KEYS = keyed.STAGE_PURPOSES + 3  # the purpose of the first round's key, after those of the buffers


class Permutation:
    """Rows of a source of fixed length by serial: the passes follow one another without a seam.

    Args:
        length: examples in the source.
        order: "permutation" takes a new one for every pass from (seed, pass); "shards" permutes the shards
            and reads some side by side, each through; "stored" keeps the source's.
        seed: of the permutations.
        shard_lengths: examples of each shard, for "shards".
        passes: of each iteration; None where they follow one another without end.
        world: ranks that share out an iteration evenly: where that leaves a remainder, its first examples
            come again at its end until every rank has as many.
        drop_last: leave the remainder out instead.

    Attributes:
        iteration_length: serials of one iteration, of all ranks; 0 where there is no end.
        method: of permuting, which a state names: "drawn" as an array, or "computed" row by row.
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
        self._block: tuple[int, int, Rows] = (0, 1, np.empty(0, dtype=np.int64))  # of serials: see _in_block

    def rows(self, serials: NDArray[np.int64]) -> Rows:
        """The row of each serial, int64 [n]; several threads may ask at once."""
        return self._in_block(serials) if self.method == "computed" else self._of_serials(serials)

    def _in_block(self, serials: NDArray[np.int64]) -> Rows:
        """Rows from a block of those to come: a call of NumPy costs as much for a few of them as for many.

        One rank's serials are first, first + step, first + 2 step, ...; what is asked for otherwise, as by a
        resume, is computed alone.
        """
        if not 1 < len(serials) <= BLOCK:
            return self._of_serials(serials)
        first, step, rows = self._block
        indices, rest = np.divmod(serials - first, step)  # [n] each
        if rest.any() or indices.min() < 0 or indices.max() >= len(rows):
            first, step = int(serials[0]), int(serials[1] - serials[0])
            if step < 1 or (np.diff(serials) != step).any():
                return self._of_serials(serials)
            rows = self._of_serials(first + step * np.arange(BLOCK, dtype=np.int64))
            self._block = first, step, rows  # at once: what an interrupt leaves is whole
            indices = np.arange(len(serials))
        return rows[indices]

    def mark(self, serial: int) -> int:  # noqa: ARG002 (a sampler's pass may differ)
        """Of what the order of a serial's pass hangs on besides seed, pass and length; 0 if on nothing."""
        if self._order != "shards":
            return 0
        return zlib.crc32(self._lengths.tobytes())  # type: ignore[union-attr]

    def _placed(self, serials: NDArray[np.int64]) -> tuple[Rows, Rows]:
        """The pass of each serial, and its position there."""
        if self.iteration_length != self._stored:
            iterations, positions = np.divmod(serials, self.iteration_length)
            serials = iterations * self._stored + positions % self._stored
        return np.divmod(serials, self.length)

    def _of_serials(self, serials: NDArray[np.int64]) -> Rows:
        passes, positions = self._placed(serials)  # [n] each
        if self._order == "stored" or not len(passes):
            return positions
        if (passes == passes[0]).all():
            return self._of_pass(int(passes[0]), positions)
        rows = np.empty(len(serials), dtype=np.int64)  # [n]
        for number in np.unique(passes):
            chosen = passes == number  # bool [n]
            rows[chosen] = self._of_pass(int(number), positions[chosen])
        return rows

    def _of_pass(self, number: int, positions: Rows) -> Rows:
        """The row at each position of one pass."""
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
            shards = rng.permutation(len(self._lengths))  # [shards], as they come in this pass
            lengths, starts = self._lengths[shards], (np.cumsum(self._lengths) - self._lengths)[shards]
            ends = np.cumsum(lengths)  # [shards]
            # [2, shards]: the position where each ends, and its rows less their positions.
            return np.stack([ends, starts - (ends - lengths)])
        return rng.permutation(np.arange(self.length, dtype=self._dtype))  # [length]


def _bits_of(seed: int, number: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed & 0xFFFFFFFFFFFFFFFF, number], dtype=np.uint64))


def permuted(positions: Rows, length: int, seed: int, number: int) -> Rows:
    """The row at each position of one pass: a bijection of [0, ``length``), computed in place of drawn.

    A Feistel network on pairs (left, right) of [0, a) x [0, b), a b >= length, whose rounds add a keyed hash
    of one side to the other modulo its size, walked on from what falls beyond the length until it lies within
    (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002: generalized Feistel and
    cycle-walking). a b is below length + a, so that few walk on. A pass differs from the next by its keys.

    Args:
        positions: int64 [n], each in [0, length).
        length: rows, >= 1.
        seed: any integer.
        number: of the pass.

    Returns:
        Rows, int64 [n].
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


def _network(values: Rows, keys: list[keyed.Keys], sizes: tuple[int, int]) -> Rows:
    size, other = sizes
    left, right = np.divmod(values, other)  # [n] each, below size and other
    for key in keys:
        left += keyed.integers(right.astype(np.uint64) + key, 0, 0, size)
        left -= np.where(left >= size, size, 0)
        left, right, size, other = right, left, other, size
    return left * other + right


def seeds_of_pass(seed: int, number: int) -> tuple[int, int]:
    """The seeds of a sampler's draws in a pass and of those of its rows as they are read, below 2**63."""
    drawn = _bits_of(seed, number).random_raw(2)
    return int(drawn[0]) >> 1, int(drawn[1]) >> 1


class SampledOrder(Permutation):
    """What a sampler gives in each pass, drawn at once and as a function of (seed, pass).

    A sampler with a ``generator``, as torch's random ones have, gets one keyed to (seed, pass) to
    draw from; ``set_epoch(pass)`` is called before where it exists. All ranks draw the same rows and share
    them out.

    Args:
        sampler: an iterable of rows with a length.
        rows: of the source.
        seed, passes, world, drop_last: as of the permutation.

    Raises:
        ValueError: it is empty, gives what is no row, or draws another order when it is asked for the same
            pass again.
    """

    def __init__(
        self, sampler: Any, rows: int, seed: int, *, passes: int | None, world: int, drop_last: bool
    ) -> None:
        if not len(sampler):
            raise ValueError(f"sampler={type(sampler).__name__}: it gives no rows (length 0)")
        super().__init__(len(sampler), "sampler", seed, passes=passes, world=world, drop_last=drop_last)
        self._sampler, self._num_rows = sampler, rows
        self._marked: tuple[Any, int] = None, 0  # rows of a pass, and their mark
        self._lock = threading.Lock()  # a sampler draws for one thread at a time
        asks_generator = hasattr(sampler, "generator") and type(sampler).__module__.startswith("torch.")
        if not asks_generator and not np.array_equal(self._drawn(0), self._drawn(0)):
            raise ValueError(
                f"sampler={type(sampler).__name__}: it drew two orders for one pass, and no resume could be "
                "exact; let it draw from a torch.Generator in its attribute `generator`, or from what "
                "set_epoch(pass) told"
            )

    def mark(self, serial: int) -> int:
        rows = self._pass(int(self._placed(np.array([serial]))[0][0]))
        if self._marked[0] is not rows:  # may be 10**8 rows, and asked for at each checkpoint
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
        own, sampler.generator = sampler.generator, drawn_with
        try:
            return self._rows()
        finally:
            sampler.generator = own

    def _rows(self) -> NDArray[Any]:
        name = type(self._sampler).__name__
        try:
            rows = np.fromiter(map(operator.index, self._sampler), dtype=np.int64)
        except TypeError as error:
            raise ValueError(
                f"sampler={name}: it must give rows, one whole number after another ({error}); of a "
                "BatchSampler give its sampler, batch_size= and drop_last="
            ) from error
        if len(rows) != self.length:
            raise ValueError(f"sampler={name}: it gave {len(rows)} rows, and its length is {self.length}")
        wrong = rows[(rows < 0) | (rows >= self._num_rows)]
        if len(wrong):
            raise ValueError(f"sampler={name}: it gave row {wrong[0]} of a source with {self._num_rows} rows")
        return rows
