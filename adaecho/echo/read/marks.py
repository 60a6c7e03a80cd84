"""Where a source that can only be iterated can begin again."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MOST = 1024
_SPACING = 16  # times as much is read again anyway as on the way from a mark to the oldest needed example


@dataclass(frozen=True)
class OwnState:
    """A position that a source tells in a form of its own."""

    state: Any


Position = tuple[int, ...] | OwnState
"""Of a pass: empty where none is told."""


@dataclass(frozen=True)
class Mark:
    """Somewhere to begin again.

    Attributes:
        number, first: of the pass, and the count at which it began.
        count: examples iterated over before.
        position: for the source; empty where it tells none at the beginning of a pass.
    """

    number: int
    first: int
    count: int
    position: Position = ()

    def plain(self) -> list[Any]:
        """The mark as a state holds it."""
        own = [{"own": self.position.state}] if isinstance(self.position, OwnState) else self.position
        return [self.number, self.first, self.count, *own]

    @staticmethod
    def of(plain: Sequence[Any]) -> "Mark":
        """And back."""
        number, first, count, *position = plain
        if position and isinstance(position[0], dict):
            return Mark(int(number), int(first), int(count), OwnState(position[0]["own"]))
        return Mark(int(number), int(first), int(count), tuple(int(part) for part in position))


class Marks:
    """The marks of one iteration, from the oldest example that can still be asked for.

    One thread adds them while another saves a state. They are thinned out as they age, so that there are few
    in the longest run: what lies between two is a fraction of what came after.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: list[Mark] = []

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._marks = []

    def add(self, mark: Mark) -> None:
        """Remember where the source is."""
        with self._lock:
            self._marks.append(mark)
            if len(self._marks) > _MOST:
                self._marks = _thinned(self._marks)

    @property
    def latest(self) -> Mark:
        """The last one added."""
        return self._marks[-1]

    def since(self, oldest: int, next_count: int, after: int) -> list[Mark]:
        """The last mark before an example, and the passes opened from there to the next one to be read.

        Args:
            oldest: count of the example; ``after`` where that comes first.
            next_count: count of the next example to be read.
            after: the count just after the last example before it; one less where that is to be read again.

        Returns:
            None before the first pass has been opened.
        """
        with self._lock:
            opened = [mark for mark in self._marks if mark.first <= next_count]
            if not opened:  # no pass has begun
                return []
            oldest = min(oldest, max(after, opened[-1].first))
            unneeded = max(sum(mark.count <= oldest for mark in opened) - 1, 0)
            first, *later = opened[unneeded:]
        return [first, *(mark for mark in later if mark.count == mark.first)]


def _thinned(marks: list[Mark]) -> list[Mark]:
    """The first and the last, and as few between them as the spacing allows."""
    kept = [marks[-1]]
    for mark, before in zip(marks[-2:0:-1], marks[-3::-1], strict=True):
        newer = kept[-1].count
        if (newer - before.count) * _SPACING > marks[-1].count - newer:
            kept.append(mark)
    return [marks[0], *reversed(kept)]
