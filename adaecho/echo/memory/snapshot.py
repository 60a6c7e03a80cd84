"""The contents behind a state, for ``restore="snapshot"``.

The stages work ahead of the consumer. What has left a buffer since the consumer's position, and so belongs to
the state there, is remembered until the consumer has passed it.
"""

from collections import deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adaecho.echo.memory.pool import Examples, joined
from adaecho.echo.memory.tree import Columns, duplicate
from adaecho.echo.order import keyed

Serials = NDArray[np.int64]


class Holder(Protocol):
    """A stage whose state may hold contents."""

    @property
    def waiting(self) -> list[tuple[keyed.Items, Examples]]:
        """Outputs not handed over yet."""

    def held(self, serials: Serials) -> Examples:
        """The things behind serials that are still to leave; not counted as a use."""


class Recent:
    """Copies of the outputs of a stage that the consumer has not passed."""

    def __init__(self) -> None:
        self._outputs: deque[tuple[int, Serials, Examples]] = deque()

    def add(self, end: int, items: keyed.Items, things: Examples) -> None:
        """Remember outputs before they can be written into."""
        copied: Examples
        if isinstance(things, Columns):
            copied = Columns(things.form, [array.copy() for array in things.arrays])
        else:
            copied = [duplicate(thing) for thing in things]
        self._outputs.append((end, items >> keyed.ECHO_BITS, copied))

    def forget(self, output: int) -> None:
        """The consumer has passed this output."""
        while self._outputs and self._outputs[0][0] <= output:
            self._outputs.popleft()

    def clear(self) -> None:
        """Forget all."""
        self._outputs.clear()

    def contents(self, stage: Holder, serials: Serials) -> Examples:
        """What belongs to serials of a state of the stage not yet passed; no thread may work meanwhile."""
        left = serials
        found_serials: list[Serials] = []
        parts: list[Examples] = []
        waiting = [(items >> keyed.ECHO_BITS, things) for items, things in stage.waiting]
        for known, things in [*((known, things) for _, known, things in self._outputs), *waiting]:
            # Of a serial that left several times one copy will do: all repeats are of one example.
            here, _, places = np.intersect1d(left, known, return_indices=True)
            found_serials.append(here)
            parts.append(_select(things, places))
            left = np.setdiff1d(left, here)
        found_serials.append(left)
        parts.append(stage.held(left))
        # Found in the order of leaving; a state lists them by serial, rising.
        return _select(joined(parts), np.argsort(np.concatenate(found_serials)))


def _select(things: Examples, places: NDArray[Any]) -> Examples:
    return things.take(places) if isinstance(things, Columns) else [things[place] for place in places]
