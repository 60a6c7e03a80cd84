"""What enters an echo: fresh examples (or batches) in serial order, and the bad ones among them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
