"""The state of a loader: its settings, the position of the training loop, and a log.

The log contains the bad examples and the changes of the echoing factor. The state is a dict of numbers,
strings and lists of numbers, without any examples.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from adaecho.echo.order import keyed
from adaecho.echo.order.stream import NOTHING, Contents, Cursor, Factor, Stream
from adaecho.echo.read.chunks import BadExamples
from adaecho.echo.settings import Settings, is_distributed, refuse, share

VERSION = 7  # must increase if this version could not read older states or would continue them differently


# Immutable, and replaced in a single statement, so an interrupt cannot leave it half changed.
class LoaderCursor(NamedTuple):
    """The training loop's position in the loader's output, after the batches received so far."""

    # A fresh example or batch comes from the source and is not a repeat. This rank numbers its fresh
    # examples, and its fresh batches, in the order in which it reads them, over all epochs.
    fresh_examples: int = 0  # fresh examples needed for the batches so far
    reread_examples: int = 0  # examples that were read again to fill the buffers after a resume
    next_index: int = 0  # number of the next fresh example
    skipped: int = 0  # examples before ``next_index`` that no batch needed; can be negative after set_epoch
    next_number: int = 0  # number of the next fresh batch to repeat; 0 unless the loader repeats batches
    first_number: int = 0  # ``next_number`` at the start of the iteration
    first_index: int = 0  # ``next_index`` at the start of the iteration
    iteration: int = 0  # number of the current or last iteration, counted from 1; 0 before the first one
    in_pass: bool = False  # whether an iteration has begun and not ended
    examples: Cursor = Cursor()  # position in the shuffled repeats of examples
    batches: Cursor = Cursor()  # position in the shuffled repeats of batches
    # Examples in the source's whole batches that will be repeated again; 0 if the source yields examples.
    held_examples: int = 0

    def begun(self, iteration: int, index: int) -> "LoaderCursor":
        """Return the position at the start of an iteration that begins with example number ``index``."""
        return self._replace(
            iteration=iteration, in_pass=True, skipped=self.skipped + index - self.next_index,
            next_index=index, first_index=index, first_number=self.next_number, examples=Cursor(),
            batches=Cursor(), held_examples=0,
        )  # fmt: skip

    def ended(self, index: int, *, whole: bool) -> "LoaderCursor":
        """Return the training loop's position at the end of the current iteration."""
        # ``index`` is the number of the next fresh example. It exceeds ``self.next_index`` if the iteration
        # ended with bad examples.
        # The number of examples in a bad whole batch is unknown, so bad batches are not counted.
        fresh_examples = self.fresh_examples if whole else index - self.skipped
        return self._replace(
            in_pass=False, next_index=index, fresh_examples=fresh_examples, examples=Cursor(),
            batches=Cursor(),
        )  # fmt: skip


# Iteration only appends to the log, so another thread can save a state at any time.
class Log:
    """Records the bad examples and every change of the echoing factor, for the loader's state."""

    def __init__(self, settings: Settings) -> None:
        self.bad = BadExamples(settings.max_bad_examples)  # those that could not be read or decoded
        repeats, factor = settings.variant.repeats, settings.first_factor
        # The factors of examples and of batches over time. A loader repeats at most one of the two, so the
        # other factor is always 1.
        self.examples = Factor(settings.seed, factor if repeats == "examples" else 1.0)
        self.batches = Factor(settings.seed + 1, factor if repeats == "batches" else 1.0)

    def go_back(self, position: LoaderCursor) -> None:
        """Remove the entries that reading ahead added after a position."""
        self.bad.go_back(position.next_index)
        self.examples.go_back(self.examples.before(position.next_index))
        self.batches.go_back(self.batches.before(position.next_number))

    def begin(self, index: int) -> None:
        """Prepare the log for an iteration that begins with example number ``index``."""
        # The iteration will rediscover the bad examples from this number on.
        self.bad.go_back(index)
        self.examples.go_back(self.examples.begun(index).history)

    def state(self, position: LoaderCursor, oldest: int) -> dict[str, Any]:
        """Return the bad examples and echoing factors up to a position, as entries of the loader's state."""
        # A resume needs only example ``oldest`` and later ones, so ``bad_numbers`` omits earlier ones.
        index = position.next_index
        return {
            "example_factors": [x for change in self.examples.before(index) for x in change],
            "batch_factors": [x for change in self.batches.before(position.next_number) for x in change],
            "bad_examples": json.dumps([bad for bad in self.bad.found if bad["index"] < index]),
            "bad_numbers": [number for number in self.bad.numbers if oldest <= number < index],
        }

    @staticmethod
    def restored(settings: Settings, state: dict[str, Any], position: LoaderCursor) -> "Log":
        """Rebuild the log from a state. A new echoing factor in the settings applies from ``position`` on."""
        log = Log(settings)
        log.bad.found = json.loads(state["bad_examples"])
        log.bad.numbers = list(state["bad_numbers"])
        given, before = settings.plain(), json.loads(state["settings"])
        changed = (given["echo"], given["factor"]) != (before["echo"], before["factor"])
        continues = given["factor"] == "auto" and given["echo"] == before["echo"]
        for factor, number, name in (
            (log.examples, position.next_index, "example_factors"),
            (log.batches, position.next_number, "batch_factors"),
        ):
            first, flat = factor.value, state[name]
            factor.go_back([(int(i), float(value)) for i, value in zip(flat[::2], flat[1::2], strict=True)])
            if changed and not continues and factor.value != first:
                factor.history.append((number, first))
            if given["world_size"] != before["world_size"]:  # local numbers now refer to other examples
                factor.go_back([(0, factor.value)])
        return log


@dataclass
class Held:
    """The contents of the loader's buffers at one position of the training loop."""

    examples: Contents = NOTHING  # the repeats of examples that have not left the shuffle buffer
    # The examples of each batch that will be repeated again, by batch number.
    batches: dict[int, keyed.Items] = field(default_factory=dict)

    @property
    def serials(self) -> keyed.Items:
        """The example number of each repeat in the buffers, counted over all ranks and epochs; int64 [n]."""
        return np.concatenate([self.examples.items, *self.batches.values()]) >> keyed.ECHO_BITS


class Streams:
    """Computes the order in which a loader outputs its examples and batches."""

    def __init__(self, settings: Settings) -> None:
        # The order also depends on the bad examples and the echoing factors so far, which the log records.
        self._settings, self.log = settings, Log(settings)
        # If the source yields whole batches, each of them counts as one example.
        self.whole = settings.batch_size is None
        self.batch_size = settings.batch_size or 1
        # This rank reads every ``world``-th example, starting with number ``rank``. A source of whole batches
        # divides its data among the ranks itself.
        self.rank, self.world = (0, 1) if self.whole else (settings.rank, settings.world_size)
        self.echoes_batches = settings.variant.repeats == "batches"

    @property
    def factor(self) -> Factor:
        """The echoing factor of batches if the loader repeats batches, otherwise of examples."""
        return self.log.batches if self.echoes_batches else self.log.examples

    def examples(self, position: LoaderCursor) -> Stream:
        """Return the order in which examples leave the shuffle buffer, in the iteration of a position."""
        settings = self._settings
        return Stream(
            settings.seed, settings.shuffle_buffer, self.log.examples, rank=self.rank, world=self.world,
            begin=position.first_index, bad=self.log.bad.numbers,
        )  # fmt: skip

    def batches(self, position: LoaderCursor) -> Stream:
        """Return the order of the repeated batches in the iteration of a position."""
        settings = self._settings
        return Stream(
            settings.seed + 1, settings.batch_shuffle_buffer, self.log.batches, rank=self.rank,
            world=self.world, begin=position.first_number, bad=[],
        )  # fmt: skip

    def held(self, position: LoaderCursor) -> Held:
        """Compute the contents of the loader's buffers at a position of the training loop."""
        if not position.in_pass:
            return Held()
        stream, cursor = self.examples(position), position.examples
        held = Held(stream.contents(cursor))
        numbers = self._held_numbers(position)
        if numbers:
            size, first = self.batch_size, numbers[0] - position.first_number
            stop = numbers[-1] + 1 - position.first_number
            items = stream.leaving(cursor, first * size, stop * size)  # [batches, batch size], flat
            for number in numbers:
                start = (number - numbers[0]) * size
                held.batches[number] = items[start : start + size]
        return held

    def _held_numbers(self, position: LoaderCursor) -> list[int]:
        """Return the ascending numbers of the fresh batches that will be repeated again."""
        if not self.echoes_batches:
            return []
        held = self.batches(position).contents(position.batches).items
        numbers: list[int] = (keyed.distinct(held >> keyed.ECHO_BITS) // self.world).tolist()
        return numbers

    def num_held(self, position: LoaderCursor) -> int:
        """Return the number of distinct fresh examples in the buffers at a position."""
        if self.whole:
            return position.held_examples
        return len(keyed.distinct(self.held(position).serials))

    def oldest_serial(self, position: LoaderCursor) -> int:
        """Return the number, over all ranks, of the oldest example needed to continue from a position."""
        if not position.in_pass:
            return position.next_index * self.world
        stream, cursor = self.examples(position), position.examples
        numbers = self._held_numbers(position)
        if numbers:
            start = stream.position_after((numbers[0] - position.first_number) * self.batch_size, cursor)
            return min(stream.oldest(cursor), stream.oldest(start)) >> keyed.ECHO_BITS
        return stream.oldest(cursor) >> keyed.ECHO_BITS

    def state(self, position: LoaderCursor) -> dict[str, Any]:
        """Return a position, and the log up to it, as entries of the loader's state."""
        # The order in which a buffer drains depends on its full contents when the input ended.
        drained = position.examples.drained
        known = position.first_index if drained else self.oldest_serial(position) // self.world
        return {
            **position._asdict(),
            "examples": list(position.examples),
            "batches": list(position.batches),
            **self.log.state(position, known),
        }

    def restored(self, state: dict[str, Any]) -> tuple[LoaderCursor, Log]:
        """Return the position and the log that a checked state contains."""
        position = LoaderCursor(**{name: state[name] for name in LoaderCursor._fields})
        position = position._replace(examples=Cursor(*state["examples"]), batches=Cursor(*state["batches"]))
        log = Log.restored(self._settings, state, position)
        now, before = self._settings.world_size, json.loads(state["settings"])["world_size"]
        if now != before:  # saved between two iterations, when each rank had read its whole share
            fresh = position.fresh_examples * before // now
            position = position._replace(fresh_examples=fresh, skipped=position.next_index - fresh)
        return position, log


def of_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """Gather the states of all ranks into one state. All ranks must call this together."""
    states: list[Any] = [state]
    if is_distributed():
        states = [None] * torch.distributed.get_world_size()
        # A gloo thread releases its buffers shortly after all ranks have received the data. If a process ends
        # at that moment, the thread aborts it (pytorch/pytorch#190489). To prevent this, use a separate
        # group, because destroying a group waits for its threads.
        group: Any = None
        if "gloo" in torch.distributed.get_backend_config():
            group = torch.distributed.new_group(backend="gloo")
        try:
            torch.distributed.all_gather_object(states, state, group=group)
        finally:
            if group is not None:
                torch.distributed.destroy_process_group(group)
    flat = {f"{rank}.{name}": value for rank, own in enumerate(states) for name, value in own.items()}
    return {"ranks": len(states), **flat}


def of_this_rank(state: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part if the state combines all ranks, or otherwise the state itself."""
    if not isinstance(state, Mapping) or "ranks" not in state:
        return state
    saved, (rank, world_size) = state["ranks"], share(None, None)
    if saved != world_size and state["0.in_pass"]:
        raise ValueError(
            f"load_state_dict: {saved} ranks saved this state within an iteration, but {world_size} load it; "
            f"start {saved} ranks, because each resumes at its own cursor"
        )
    # If the number of ranks has changed between two iterations, every rank takes rank 0's part.
    prefix = f"{rank if saved == world_size else 0}."
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


def check(state: Any, settings: Settings, length: int | None) -> None:
    """Raise ValueError if a loader with these settings cannot continue from a saved state."""
    version = state.get("version") if isinstance(state, Mapping) else None
    refuse(
        version != VERSION,
        f"load_state_dict: the state has format version {version!r}, but this adaecho reads {VERSION}; pass "
        "a state_dict() of this version, or start without load_state_dict",
    )
    settings.check_same(json.loads(state["settings"]), in_pass=bool(state["in_pass"]))
    # An unknown length is -1 in a state, and None in the argument ``length``.
    had, has = (
        "no known length" if number in (None, -1) else f"{number} examples"
        for number in (state["source_length"], length)
    )
    refuse(
        had != has,
        f"load_state_dict: the source had {had} but now has {has}, so positions refer to other examples; "
        "pass the source that the state was saved with",
    )
