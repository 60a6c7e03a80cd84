"""What flows through an echo stage: fresh things in, items on their way, items out."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed


@dataclass(frozen=True)
class Bad:
    """What could not be read or decoded.

    Attributes:
        index: its local number.
        origin: what to call it in a message.
        error: why.
        row: which example of the source it is, the same in every pass; None where that can't be told.
    """

    index: int
    origin: str
    error: Exception
    row: int | None


@dataclass
class Fresh:
    """A run of fresh things, good ones only, and how far the upstream position has moved past them.

    Attributes:
        serials: global serial numbers, rising, shape [n].
        things: what the pool takes: a stack or list of n, or row numbers of a resident source.
        next_index: local number of the first fresh thing after these.
        bad: the bad ones among them.
    """

    serials: NDArray[np.int64]
    things: Any
    next_index: int
    bad: list[Bad] = field(default_factory=list)
    world: int = 1

    def split(self, index: int) -> tuple["Fresh", "Fresh"]:
        """What lies before a local number, and the rest."""
        cut = int(np.searchsorted(self.serials // self.world, index))
        return (
            Fresh(self.serials[:cut], self.things[:cut], index, [b for b in self.bad if b.index < index]),
            Fresh(
                self.serials[cut:],
                self.things[cut:],
                self.next_index,
                [b for b in self.bad if b.index >= index],
                self.world,
            ),
        )


@dataclass
class Outputs:
    """Consecutive outputs of a stage: ``start`` were put out before.

    Attributes:
        items: shape [n].
        next_indices: local number of the first fresh thing not needed for each output, shape [n].
    """

    start: int
    items: keyed.Items
    next_indices: NDArray[np.int64]

    @property
    def end(self) -> int:
        return self.start + len(self.items)


@dataclass
class Tail:
    """Items drawn from upstream that have not entered the buffer yet, with their rows and slots; each [n]."""

    items: keyed.Items
    rows: NDArray[np.int64]
    slots: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.items)

    def split(self, count: int) -> tuple["Tail", "Tail"]:
        fields = [getattr(self, name) for name in _FIELDS]
        return Tail(*(field[:count] for field in fields)), Tail(*(field[count:] for field in fields))

    def joined(self, other: "Tail") -> "Tail":
        if not len(self):
            return other
        return Tail(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in _FIELDS))


_FIELDS = ("items", "rows", "slots")


def no_tail() -> Tail:
    """A tail of nothing."""
    return Tail(*(np.empty(0, dtype=np.int64) for _ in _FIELDS))
