"""How often each fresh example or batch has left an echo stage before."""

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.items import StageState


class Uses:
    """Counts, as outputs leave, which use of its fresh example (or batch) each one is.

    The repeat in an item doesn't tell: all repeats enter a shuffle buffer together, which lets any of them
    leave first. What a state holds does: all repeats but those that are left have been used.

    Args:
        factor: of the stage.
    """

    def __init__(self, factor: Factor) -> None:
        self._factor = factor
        self._used: dict[int, int] = {}  # by serial; of those with repeats left

    def begin(self, at: StageState) -> None:
        """Go on from a state."""
        # [examples with repeats left] each
        serials, left = np.unique(at.items >> keyed.ECHO_BITS, return_counts=True)
        self._used = dict(zip(serials.tolist(), (self._factor.totals(serials) - left).tolist(), strict=True))

    def count(self, items: keyed.Items) -> NDArray[np.int64]:
        """The echo index of each item that leaves now, 0 for the first use of its example; int64 [n]."""
        serials = items >> keyed.ECHO_BITS
        totals = self._factor.totals(serials)
        uses = np.zeros(len(items), dtype=np.int64)  # [n]
        several = np.flatnonzero(totals > 1)
        for index, serial, total in zip(
            several.tolist(), serials[several].tolist(), totals[several].tolist(), strict=True
        ):
            use = uses[index] = self._used.pop(serial, 0)
            if use + 1 < total:
                self._used[serial] = int(use) + 1
        return uses
