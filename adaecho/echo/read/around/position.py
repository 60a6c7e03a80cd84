"""Where what can only be iterated can begin again: marks on its way, and positions that it tells itself.

A StatefulDataLoader, Grain's iterators and an EchoLoader do.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

APART = 16  # examples or batches between two questions: to tell one may take as long as to read an example
_MOST = 1024  # marks
_SPACING = 16  # times as much is read again anyway as on the way from a mark to the oldest needed example


Position = Sequence[int] | dict[str, Any]
"""Of a pass: whole numbers, or what a source tells in a form of its own as {"own": ...}; empty for none."""


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
        position = self.position if isinstance(self.position, dict) else list(self.position)
        return [self.number, self.first, self.count, position]


def thinned(marks: list[Mark]) -> list[Mark]:
    """Marks of an iteration, of many the first and the last, and as few between them as the spacing allows.

    So there are few in the longest run: what lies between two is a fraction of what came after.
    """
    if len(marks) <= _MOST:
        return marks
    kept = [marks[-1]]
    for mark, before in zip(marks[-2:0:-1], marks[-3::-1], strict=True):
        newer = kept[-1].count
        if (newer - before.count) * _SPACING > marks[-1].count - newer:
            kept.append(mark)
    return [marks[0], *reversed(kept)]


def needed_marks(marks: list[Mark], oldest: int, following: int, after: int) -> list[Mark]:
    """The last mark before an example, and the passes opened from there to the next one to be read.

    Args:
        marks: of an iteration, rising; none before its first pass has been opened.
        oldest: count of the example; ``after`` where that comes first.
        following: count of the next example to be read.
        after: the count just after the last example before it; one less where that is to be read again.
    """
    opened = [mark for mark in marks if mark.first <= following]
    if not opened:
        return []
    oldest = min(oldest, max(after, opened[-1].first))
    first, *later = opened[max(sum(mark.count <= oldest for mark in opened) - 1, 0) :]
    return [first, *(mark for mark in later if mark.count == mark.first)]


class Teller(NamedTuple):
    """What tells a position of its own, and takes it again."""

    ask: Callable[[], Any]
    give: Callable[[Any], Any]

    def tell(self) -> Position:
        """Where it is; a copy, as it may go on in the one it told."""
        return {"own": copy.deepcopy(self.ask())}

    def take(self, position: Any) -> None:
        """Go to what was told."""
        self.give(copy.deepcopy(position["own"]))


def teller_of(owner: Any) -> Teller | None:
    """How an object tells and takes its own position, if it does.

    A stream of Hugging Face's ``datasets`` is not asked, nor a loader of one: with ``shuffle`` its state
    leaves out what its buffer held, and other examples would follow.
    """
    streams = [owner, getattr(owner, "dataset", None), getattr(owner, "_dataset", None)]
    if any(kind.__module__.startswith("datasets.") for part in streams for kind in type(part).__mro__):
        return None
    for ask, give in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(owner, ask) and hasattr(owner, give) and getattr(owner, "use_stateful_dataloader", True):
            return Teller(getattr(owner, ask), getattr(owner, give))
    return None  # also of Accelerate's loaders around what has no state
