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
    """

    def __init__(
        self, length: int, order: str, seed: int, shard_lengths: NDArray[np.int64] | None = None
    ) -> None:
        self.length = length
        self._lengths = shard_lengths
        self._order, self._seed = order, seed
        self._dtype = np.uint32 if length <= 1 << 32 else np.int64
        self._kept: dict[int, NDArray[Any]] = {}

    def rows(self, serials: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each serial."""
        if self._order == "stored":
            return serials % self.length
        passes, positions = np.divmod(serials, self.length)
        if not len(passes):
            return positions
        if passes[0] == passes[-1]:  # serials rise
            return self._pass(int(passes[0]))[positions].astype(np.int64)
        rows = np.empty(len(serials), dtype=np.int64)
        for number in np.unique(passes):
            chosen = passes == number
            rows[chosen] = self._pass(int(number))[positions[chosen]]
        return rows

    def _pass(self, number: int) -> NDArray[Any]:
        if number not in self._kept:
            if len(self._kept) > 1:
                del self._kept[min(self._kept)]
            key = np.array([self._seed & 0xFFFFFFFFFFFFFFFF, number], dtype=np.uint64)
            rng = np.random.Generator(np.random.Philox(key=key))
            rows = np.arange(self.length, dtype=self._dtype)
            shuffled = self._shards(rows, rng) if self._order == "shards" else rng.permutation(rows)
            self._kept[number] = shuffled
        return self._kept[number]

    def _shards(self, rows: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        assert self._lengths is not None
        shards = np.split(rows, np.cumsum(self._lengths)[:-1])
        return np.concatenate([shards[shard] for shard in rng.permutation(len(shards))])
