"""The order in which the rows of a source of known length are read."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Permutation:
    """Rows of a source of fixed length by serial: the passes follow one another without a seam.

    Args:
        length: examples in the source.
        order: "permutation" draws a new one for every pass from (seed, pass); "shards" permutes the shards
            and reads each through; "stored" keeps the source's.
        seed: of the permutations.
        shard_lengths: examples of each shard, for "shards".
        passes: of each iteration; None where they follow one another without end.
        world: ranks that share out an iteration evenly: where that leaves a remainder, its first examples
            come again at its end until every rank has as many.
        drop_last: leave the remainder out instead.

    Attributes:
        iteration_length: serials of one iteration, of all ranks; 0 where there is no end.
    """

    def __init__(
        self,
        length: int,
        order: str,
        seed: int,
        shard_lengths: NDArray[np.int64] | None = None,
        *,
        passes: int | None = None,
        world: int = 1,
        drop_last: bool = False,
    ) -> None:
        self._stored = length * (passes or 0)  # examples of one iteration
        of_each = self._stored // world if drop_last else -(-self._stored // world)
        self.iteration_length = of_each * world
        self.length = length
        self._lengths = shard_lengths
        self._order, self._seed = order, seed
        self._dtype = np.uint32 if length <= 1 << 32 else np.int64
        self._kept: dict[int, NDArray[Any]] = {}

    def rows(self, serials: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each serial."""
        if self.iteration_length != self._stored:
            iterations, positions = np.divmod(serials, self.iteration_length)
            serials = iterations * self._stored + positions % self._stored
        if self._order == "stored":
            return serials % self.length
        passes, positions = np.divmod(serials, self.length)  # [n] each
        if not len(passes):
            return positions
        if (passes == passes[0]).all():
            return self._pass(int(passes[0]))[positions].astype(np.int64)
        rows = np.empty(len(serials), dtype=np.int64)
        for number in np.unique(passes):
            chosen = passes == number  # bool [n]
            rows[chosen] = self._pass(int(number))[positions[chosen]]
        return rows

    def _pass(self, number: int) -> NDArray[Any]:
        if number not in self._kept:
            if len(self._kept) > 1:
                del self._kept[min(self._kept)]
            self._kept[number] = self._drawn(number)
        return self._kept[number]

    def _drawn(self, number: int) -> NDArray[Any]:
        rng = np.random.Generator(self._bits(number))
        rows = np.arange(self.length, dtype=self._dtype)  # [length]
        return self._shards(rows, rng) if self._order == "shards" else rng.permutation(rows)

    def _bits(self, number: int) -> np.random.Philox:
        return np.random.Philox(key=np.array([self._seed & 0xFFFFFFFFFFFFFFFF, number], dtype=np.uint64))

    def _shards(self, rows: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        assert self._lengths is not None
        shards = np.split(rows, np.cumsum(self._lengths)[:-1])
        return np.concatenate([shards[shard] for shard in rng.permutation(len(shards))])
