"""The shuffle buffer, planned on identities: which item leaves for which."""

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed

SLOT = keyed.STAGE_PURPOSES + 1
DRAIN = keyed.STAGE_PURPOSES + 2

Rows = NDArray[np.int64]


class ShuffleBuffer:
    """A true one: for each item that enters, the one in a uniformly random slot leaves and it takes its slot.

    It fills before anything leaves; at the end of a pass it drains in random order.

    Args:
        seed: of its draws.
        size: slots; 0 passes everything on in order.
        rows: that there may be, 0 for no more than memory holds examples.
    """

    def __init__(self, seed: int, size: int, rows: int = 0) -> None:
        self.size = size
        self._seed = seed
        self._items = np.zeros(size, dtype=np.int64)  # [size], by slot
        # [size], the row in the pool of each.
        self._rows = np.zeros(size, dtype=np.int32 if rows <= 1 << 31 else np.int64)
        self._filled = 0
        self._drain: NDArray[np.int64] | None = None  # slots in the order in which they leave
        self._drained = 0

    @staticmethod
    def slots(seed: int, size: int, items: keyed.Items) -> NDArray[np.int64]:
        """The slot that each item will take, uniform, int64 [n]."""
        if size <= 1:
            return np.zeros(len(items), dtype=np.int64)
        return keyed.integers(keyed.item_keys(seed, items), SLOT, 0, size)

    @staticmethod
    def drain_order(seed: int, items: keyed.Items) -> NDArray[np.int64]:
        """The slots of what is held at the end of a pass, in the order in which they leave."""
        return np.argsort(keyed.bits(keyed.item_keys(seed, items), DRAIN), kind="stable")

    @property
    def space(self) -> int:
        """Slots that have not been filled yet."""
        return self.size - self._filled

    @property
    def draining(self) -> bool:
        """Whether the pass has ended and nothing enters any more."""
        return self._drain is not None

    @property
    def oldest(self) -> int:
        """The oldest item held, or the largest number there is."""
        held = (
            self._items[: self._filled] if self._drain is None else self._items[self._drain[self._drained :]]
        )
        return int(held.min()) if len(held) else int(np.iinfo(np.int64).max)

    def fill(self, items: keyed.Items, rows: Rows) -> None:
        """Store items, with their rows in the pool, in slots that are still empty."""
        end = self._filled + len(items)
        self._items[self._filled : end] = items
        self._rows[self._filled : end] = rows
        self._filled = end

    def swap(
        self, entering: keyed.Items, entering_rows: Rows, slots: NDArray[np.int64]
    ) -> tuple[keyed.Items, Rows]:
        """Exchange each entering item, in turn, for the one in its slot; items and rows that leave, [n] each.

        Several may draw one slot in a block: then each but the first pushes out its predecessor, and the
        last stays. A stable sort by slot finds them (NumPy doesn't promise which of two writes wins).
        """
        if not self.size or not len(entering):
            return entering, entering_rows
        items = self._items[slots]  # [n], what leaves
        rows = self._rows[slots].astype(np.int64)
        # 16-bit keys are sorted by radix.
        order = np.argsort(slots.astype(np.uint16) if self.size <= 1 << 16 else slots, kind="stable")
        in_order = slots[order]  # [n], rising
        again = in_order[1:] == in_order[:-1]  # [n - 1]: the same slot as the one before
        if again.any():
            later, earlier = order[1:][again], order[:-1][again]
            items[later], rows[later] = entering[earlier], entering_rows[earlier]
            last = order[np.append(~again, True)]  # [distinct slots]
            slots = slots[last]
            self._items[slots], self._rows[slots] = entering[last], entering_rows[last]
        else:
            self._items[slots], self._rows[slots] = entering, entering_rows
        return items, rows

    def begin_drain(self) -> None:
        """Nothing enters any more: what is left leaves in random order."""
        if self._drain is None:
            self._drain = self.drain_order(self._seed, self._items[: self._filled])
            self._drained = 0

    def drain(self, count: int) -> tuple[keyed.Items, Rows]:
        """Up to ``count`` items, and their rows, of what is left."""
        assert self._drain is not None
        slots = self._drain[self._drained : self._drained + count]
        self._drained += len(slots)
        return self._items[slots], self._rows[slots].astype(np.int64)

    def load(self, items: keyed.Items, rows: Rows, *, draining: bool) -> None:
        """Hold what it held at a place, by slot or in the order in which it drains, and nothing else."""
        self._filled, self._drained = len(items), 0
        self._items[: len(items)] = items
        self._rows[: len(items)] = rows
        self._drain = np.arange(len(items)) if draining else None
