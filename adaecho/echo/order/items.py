"""What goes into an echo stage and what comes out of it, as identities, and the state between the two."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from adaecho.echo.order import keyed

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Bad:
    """What could not be read or decoded.

    Attributes:
        index: its local number.
        origin: what to call it in a message.
        error: why.
        row: which example of the source it is, the same in every pass; None where that can't be told.
        where: the text of its traceback, where the error itself has none any more.
    """

    index: int
    origin: str
    error: Exception
    row: int | None
    where: str = ""

    def told(self, note: str) -> Exception:
        """The error to be raised, with a note, and where it was."""
        self.error.add_note(note)
        if self.where:
            self.error.add_note(f"in a thread of the loader:\n{self.where}")
        return self.error


@dataclass
class Fresh:
    """A run of fresh examples (or batches), good ones only, and how far the upstream position has moved.

    Attributes:
        serials: global serial numbers, rising, int64 [n].
        examples: what the pool takes: a stack or list of n, or row numbers of a resident source.
        next_index: local number of the first fresh example after these.
        bad: the bad ones among them.
    """

    serials: NDArray[np.int64]
    examples: Any
    next_index: int
    bad: list[Bad] = field(default_factory=list)
    world: int = 1

    def split(self, index: int) -> tuple["Fresh", "Fresh"]:
        """What lies before a local number, and the rest."""
        cut = int(np.searchsorted(self.serials // self.world, index))
        before = [bad for bad in self.bad if bad.index < index]
        after = [bad for bad in self.bad if bad.index >= index]
        return (
            Fresh(self.serials[:cut], self.examples[:cut], index, before, self.world),
            Fresh(self.serials[cut:], self.examples[cut:], self.next_index, after, self.world),
        )


class Output(NamedTuple):
    """One output of a stage.

    Attributes:
        item: which.
        row: of the pool.
        next_index: local number of the first fresh example not needed for it.
        number: outputs up to it.
    """

    item: int
    row: int
    next_index: int
    number: int


@dataclass
class Outputs:
    """Consecutive outputs of a stage: ``start`` were put out before.

    Attributes:
        items: int64 [n].
        rows: of the pool, int64 [n].
        next_indices: local number of the first fresh example not needed for each output, int64 [n].
    """

    start: int
    items: keyed.Items
    rows: Rows
    next_indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.items)

    def one_by_one(self) -> list[Output]:
        """Each by itself."""
        numbers = range(self.start + 1, self.start + 1 + len(self))
        rows, next_indices = self.rows.tolist(), self.next_indices.tolist()
        return list(map(Output, self.items.tolist(), rows, next_indices, numbers))

    def joined(self, other: "Outputs") -> "Outputs":
        """These and those after them."""
        return Outputs(
            self.start,
            np.concatenate([self.items, other.items]),
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.next_indices, other.next_indices]),
        )


@dataclass
class Tail:
    """Items that are to enter the buffer next, rising, with their rows in the pool and slots; int64 [n]."""

    items: keyed.Items
    rows: Rows
    slots: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.items)

    def split(self, count: int) -> tuple["Tail", "Tail"]:
        """The first ``count``, and the rest."""
        if count >= len(self):
            return self, Tail(*3 * [keyed.NO_ITEMS])
        return (
            Tail(self.items[:count], self.rows[:count], self.slots[:count]),
            Tail(self.items[count:], self.rows[count:], self.slots[count:]),
        )

    def joined(self, other: "Tail") -> "Tail":
        """These and then the others."""
        if not len(self):
            return other
        return Tail(
            np.concatenate([self.items, other.items]),
            np.concatenate([self.rows, other.rows]),
            np.concatenate([self.slots, other.slots]),
        )


@dataclass(frozen=True)
class StageState:
    """A state of an echo stage, in identities alone. Its arrays are never written into.

    Attributes:
        next_index: upstream position.
        buffer: items by slot, or in the order in which they will leave; int64 [n], n up to the buffer's size.
        pending_item, pending_repeats: of an echo in progress, the next item and how many with it.
        draining: whether the pass has ended.
    """

    next_index: int = 0
    buffer: keyed.Items = field(default_factory=keyed.NO_ITEMS.copy)
    pending_item: int = 0
    pending_repeats: int = 0
    draining: bool = False

    @property
    def items(self) -> keyed.Items:
        """The items in the buffer, by slot, and then those of the echo in progress."""
        pending = self.pending_item + np.arange(self.pending_repeats, dtype=np.int64)
        return np.concatenate([self.buffer, pending])

    @property
    def serials(self) -> NDArray[np.int64]:
        """The serials of the fresh examples (or batches) that it holds, rising."""
        return keyed.serials_of(self.items)

    def plain(self) -> dict[str, Any]:
        """The state in types that ``torch.save`` takes."""
        return {**vars(self), "buffer": torch.from_numpy(self.buffer.copy())}

    @staticmethod
    def of(plain: dict[str, Any]) -> "StageState":
        """And back."""
        return StageState(**{**plain, "buffer": plain["buffer"].numpy()})
