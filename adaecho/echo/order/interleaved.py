"""Shards read several at once: which example of a pass that reads them one after another comes where."""

import numpy as np

from adaecho.echo.order import keyed
from adaecho.echo.order.permutation import Rows

RUN = 8  # neighbours that come together: one request of indexed shards
_PURPOSE = keyed.STAGE_PURPOSES + 9  # after those of the rounds of a permutation


def interleaved(positions: Rows, length: int, places: int, seed: int, number: int) -> Rows:
    """Where each position of a pass lies in the pass that reads the shards one after another.

    That pass is cut into ``places`` stretches of equal length, which are read side by side, ``RUN`` examples
    of each at a time (of the last round fewer), in an order of the stretches that is turned by a keyed draw
    in each round. So eight shards of equal length all come within the first 64 examples, and to the end.
    What is left over, fewer than ``places`` examples, comes last. A bijection of [0, ``length``), computed
    position by position.

    Args:
        positions: int64 [n], each in [0, length).
        length: examples of a pass.
        places: that are read at once, >= 1; 1 changes nothing.
        seed, number: any integer, and of the pass: they key the draws.

    Returns:
        Positions, int64 [n].
    """
    size = length // places  # of a stretch
    rounds, within = np.divmod(positions, RUN * places)  # [n] each
    run = np.where(rounds < size // RUN, RUN, max(size % RUN, 1))
    key = keyed.bits(keyed.item_keys(seed, np.array([number << keyed.ECHO_BITS], dtype=np.int64)), _PURPOSE)
    first = keyed.integers(rounds.astype(np.uint64) + key, 0, 0, places)  # [n], the stretch that begins
    stretch = (first + within // run) % places
    return np.where(positions < size * places, stretch * size + rounds * RUN + within % run, positions)
