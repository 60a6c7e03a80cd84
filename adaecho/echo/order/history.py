"""What an echo stage has put out lately, and its state after any output not yet forgotten."""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.order import keyed
from adaecho.echo.order.items import Taken
from adaecho.echo.order.shuffle_buffer import ShuffleBuffer


class History:
    """The record of a stage's outputs.

    Attributes:
        emitted: outputs so far.
        forgotten: states before this output won't be asked for any more; any thread may raise it.
    """

    def __init__(self) -> None:
        self.emitted = 0
        self.forgotten = 0
        self._records: deque[Taken] = deque()
        # A state that no record tells: a pass about to begin, or one that was loaded.
        self._anchor: tuple[int, dict[str, Any]] | None = None

    def begin(self, state: dict[str, Any]) -> None:
        """Go on from a state that is not a consequence of what was put out."""
        self._records.clear()
        self._anchor = (self.emitted, state)

    def add(self, taken: Taken) -> None:
        """Record outputs that follow the last ones."""
        self.emitted = taken.end
        if len(taken.items):
            self._records.append(taken)

    def drop_forgotten(self) -> None:
        """Let go of what won't be asked for."""
        while self._records and self._records[0].end < self.forgotten:
            self._records.popleft()
        if self._anchor is not None and self._anchor[0] < self.forgotten:
            self._anchor = None

    def state_at(self, output: int, buffer: ShuffleBuffer) -> dict[str, Any]:
        """The state after so many outputs in all: from the buffer as it is now, back through the records.

        Raises:
            ValueError: it has been forgotten.
        """
        if self._anchor is not None and output == self._anchor[0]:
            return self._anchor[1]
        items = buffer.items()
        for record in reversed(self._records):
            if record.end < output:
                break
            offset = output - record.start
            if record.slots is not None and buffer.size and offset < len(record.items):
                # Of several outputs of one slot the earliest is what the slot held.
                skipped = max(offset, 0)
                slots, first = np.unique(record.slots[skipped:], return_index=True)
                items[slots] = record.items[skipped:][first]
            if offset > 0:
                return self._state_in(record, offset, items, buffer)
        raise ValueError(f"the state after output {output} has been forgotten")

    def _state_in(
        self, record: Taken, offset: int, items: keyed.Items, buffer: ShuffleBuffer
    ) -> dict[str, Any]:
        next_index = int(record.next_indices[offset - 1])
        if record.entered is None or record.remaining is None:
            # Drained records follow one another without a gap up to now.
            drained_since = self.emitted - (record.start + offset)
            return state(next_index, buffer.last_drained(drained_since), draining=True)
        remaining = int(record.remaining[offset - 1])
        pending_item = int(record.entered[offset - 1]) + 1 if remaining else 0
        return state(next_index, items, pending_item, remaining)


def state(
    next_index: int,
    buffer: keyed.Items,
    pending_item: int = 0,
    pending_repeats: int = 0,
    draining: bool = False,
) -> dict[str, Any]:
    """A state of a stage, identities only.

    Args:
        next_index: upstream position.
        buffer: items by slot, or in the order in which they will leave.
        pending_item, pending_repeats: of an echo in progress, the next item and how many with it.
        draining: whether the pass has ended.
    """
    return {
        "next_index": next_index,
        "pending_item": pending_item,
        "pending_repeats": pending_repeats,
        "buffer": buffer,
        "draining": draining,
    }


def pending(of: dict[str, Any]) -> keyed.Items:
    """The items of the echo in progress in a state."""
    items: keyed.Items = of["pending_item"] + np.arange(of["pending_repeats"], dtype=np.int64)
    return items


def serials_in(of: dict[str, Any]) -> NDArray[np.int64]:
    """The fresh things that a state holds, rising."""
    return np.unique(np.concatenate([of["buffer"], pending(of)]) >> keyed.ECHO_BITS)
