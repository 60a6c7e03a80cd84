"""The echo stage for whole batches."""

from dataclasses import replace
from typing import Any

import numpy as np

from adaecho.echo import keys
from adaecho.echo.batches import OneByOne, Ready
from adaecho.echo.items import Fresh
from adaecho.echo.pool import ListPool
from adaecho.echo.snapshot import Recent
from adaecho.echo.stage import EchoStage


class EchoedBatches:
    """... > batch > echo [> shuffle batches]: repeats whole batches (paper, section 3)."""

    def __init__(
        self,
        batches: OneByOne,
        *,
        seed: int,
        factor: float,
        buffer: int,
        rank: int,
        world: int,
        recent: Recent | None,
    ) -> None:
        self._batches = batches
        self._rank, self._world = rank, world
        self.stage = EchoStage(
            self._take, seed=seed, factor=factor, buffer=buffer, rank=rank, world=world, block=1,
            pool=ListPool(),
        )  # fmt: skip
        self.recent = recent
        self._next_number = 0
        self._made: dict[int, Ready] = {}  # by batch number, from the last position on
        self._held: dict[int, tuple[keys.Items, int]] = {}  # items of a batch, and its repeats to come

    def begin(self, number: int) -> None:
        """Start with nothing held, at the number of the next fresh batch."""
        self._next_number = number
        self._held.clear()
        self._made.clear()
        self.stage.begin_pass(number)
        if self.recent is not None:
            self.recent.clear()

    def claim(self) -> Ready | None:
        """The next repeat; None at the end of the pass."""
        parts = self.stage.take(1)
        if not parts:
            return None
        taken, batches = parts[0]
        if self.recent is not None:
            self.recent.add(taken, batches)
        position = int(taken.next_indices[-1])
        for number in [number for number in self._made if number < position]:
            del self._made[number]
        assert isinstance(batches, list)
        number = int(taken.items[0] >> keys.ECHO_BITS) // self._world
        return replace(
            self._made[position],
            batch=batches[0],
            number=number,
            next_number=position,
            batch_output=taken.end,
        )

    def _take(self, count: int) -> Fresh | None:  # noqa: ARG002 (batches come one at a time)
        ready = self._batches.get(by_crew=True)
        if ready is None:
            return None
        serial = np.array([self._next_number * self._world + self._rank])
        self._held[self._next_number] = ready.items, int(self.stage.factor.repeats(serial)[0])
        self._next_number += 1
        self._made[self._next_number] = ready
        batch, ready.batch = ready.batch, None
        return Fresh(serial, [batch], self._next_number)

    def num_repeats(self, first_number: int, batches: int) -> int:
        """How often consecutive batches are repeated, together."""
        numbers = np.arange(first_number, first_number + batches, dtype=np.int64)
        return int(self.stage.factor.repeats(numbers * self._world + self._rank).sum())

    def consumed(self, ready: Ready) -> None:
        """The consumer has taken a repeat: earlier states won't be asked for any more."""
        self.stage.forget(ready.batch_output)
        if self.recent is not None:
            self.recent.forget(ready.batch_output)
        items, left = self._held[ready.number]
        if left > 1:
            self._held[ready.number] = items, left - 1
        else:
            del self._held[ready.number]

    def state_at(self, batch_output: int) -> tuple[dict[str, Any], dict[int, keys.Items]]:
        """State of the batch stage, and the items of every batch it held."""
        state = self.stage.state_at(batch_output)
        serials = {int(item) >> keys.ECHO_BITS for item in state["buffer"]}
        if state["pending_repeats"]:
            serials.add(state["pending_item"] >> keys.ECHO_BITS)
        numbers = sorted(serial // self._world for serial in serials)
        return state, {number: self._held[number][0] for number in numbers}

    def load(
        self, state: dict[str, Any], held: dict[int, keys.Items], remade: dict[int, Any], last: Ready
    ) -> None:
        """Return to a state, with the batches it held made again."""
        self.begin(state["next_index"])
        self._next_number = state["next_index"]
        self._made = {self._next_number: last}
        self.stage.load(state, lambda serials: [remade[int(serial) // self._world] for serial in serials])
        left: dict[int, int] = {}
        pending = state["pending_item"] + np.arange(state["pending_repeats"], dtype=np.int64)
        for item in [*state["buffer"], *pending]:
            number = (int(item) >> keys.ECHO_BITS) // self._world
            left[number] = left.get(number, 0) + 1
        self._held = {number: (items, left[number]) for number, items in held.items()}
