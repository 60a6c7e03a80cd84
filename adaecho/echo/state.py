"""Where the consumer is, and the log: with the settings all of a loader's state.

Everything else (buffers, pools, read-ahead, threads) is a cache that may be dropped at any moment and made
anew.
"""

import hashlib
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

VERSION = 5  # raised whenever a state of before would continue differently, or can't be read
_SMALL = 1 << 14  # slots of a buffer that are looked back over in some 20 ms


class Position(NamedTuple):
    """Where the consumer is. One is never changed: another takes its place, in one statement.

    Attributes:
        fresh_examples: read for the batches taken so far.
        reread_examples: read again to restore a position.
        next_index: upstream position, as a local number; ``skipped`` of the numbers before were passed over.
        next_number: number of the next fresh batch to echo; ``first_number``: when the iteration began.
        first_index: ``next_index`` when the iteration began.
        iteration: how many have begun; ``in_pass`` while it has not ended.
        examples, batches: the cursors in the two streams, since the iteration began.
        oldest: an item of the examples no later than any that is held.
        held_examples: in whole batches of which a repeat is to leave.
    """

    fresh_examples: int = 0
    reread_examples: int = 0
    next_index: int = 0
    skipped: int = 0
    next_number: int = 0
    first_number: int = 0
    first_index: int = 0
    iteration: int = 0
    in_pass: bool = False
    examples: Cursor = Cursor()
    batches: Cursor = Cursor()
    oldest: int = 0
    held_examples: int = 0

    def begun(self, iteration: int, index: int) -> "Position":
        """Where the consumer is as an iteration begins, at a local number."""
        return self._replace(
            iteration=iteration, in_pass=True, skipped=self.skipped + index - self.next_index,
            next_index=index, first_index=index, first_number=self.next_number, examples=Cursor(),
            batches=Cursor(), oldest=0, held_examples=0,
        )  # fmt: skip

    def ended(self, index: int, *, whole: bool) -> "Position":
        """Where it is as an iteration ends, at a local number, maybe after bad examples without a batch."""
        # How many examples a bad whole batch has is not known.
        fresh_examples = self.fresh_examples if whole else index - self.skipped
        return self._replace(
            in_pass=False, next_index=index, fresh_examples=fresh_examples, examples=Cursor(),
            batches=Cursor(),
        )  # fmt: skip


class Log:
    """What no seed tells: the bad examples, and how the factors changed. Only appended to while batches come.

    Args:
        settings: of the loader.

    Attributes:
        bad: of the examples (or whole batches).
        examples, batches: the factors of the two echoes, one of which is 1.
    """

    def __init__(self, settings: Settings) -> None:
        self.bad = BadExamples(settings.max_bad_examples)
        repeats, factor = settings.variant.repeats, settings.first_factor
        self.examples = Factor(settings.seed, factor if repeats == "examples" else 1.0)
        self.batches = Factor(settings.seed + 1, factor if repeats == "batches" else 1.0)

    def go_back(self, position: Position) -> None:
        """Forget what was met ahead of a position."""
        self.bad.go_back(position.next_index)
        self.examples.go_back(self.examples.before(position.next_index))
        self.batches.go_back(self.batches.before(position.next_number))

    def begin(self, index: int) -> None:
        """An iteration begins at a local number, maybe an earlier one, whose bad examples are met again."""
        self.bad.go_back(index)
        self.examples.go_back(self.examples.begun(index).history)

    def plain(self, position: Position, oldest: int) -> dict[str, Any]:
        """What it has of a position, as a state holds it; the numbers of bad ones from a local number on."""
        return {
            "factors": {
                "examples": [list(change) for change in self.examples.before(position.next_index)],
                "batches": [list(change) for change in self.batches.before(position.next_number)],
            },
            "bad_examples": [dict(bad) for bad in self.bad.found if bad["index"] < position.next_index],
            "bad_numbers": [number for number in self.bad.numbers if oldest <= number < position.next_index],
        }

    @staticmethod
    def restored(settings: Settings, state: dict[str, Any], position: Position) -> "Log":
        """As it was in a state; a factor that differs is in force for what has not been read yet."""
        log = Log(settings)
        log.bad.found = [dict(bad) for bad in state["bad_examples"]]
        log.bad.numbers = list(state["bad_numbers"])
        given, before = settings.plain(), state["settings"]
        changed = (given["echo"], given["factor"]) != (before["echo"], before["factor"])
        goes_on = given["factor"] == "auto" and given["echo"] == before["echo"]  # where it was
        factors = {
            "examples": (log.examples, position.next_index),
            "batches": (log.batches, position.next_number),
        }
        for name, (factor, number) in factors.items():
            first = factor.value
            factor.go_back([(int(index), float(value)) for index, value in state["factors"][name]])
            if changed and not goes_on and factor.value != first:
                factor.history.append((number, first))
            if given["world_size"] != before["world_size"]:  # whose local numbers are others
                factor.go_back([(0, factor.value)])
        return log


@dataclass
class Held:
    """What the buffers hold at a position.

    Attributes:
        examples: items in the shuffle buffer.
        batches: of each fresh batch of which a repeat is to leave, by its number, the items.
    """

    examples: Contents = NOTHING
    batches: dict[int, keyed.Items] = field(default_factory=dict)

    @property
    def serials(self) -> keyed.Items:
        """The serials behind all of these, one for each use of them; int64 [n]."""
        return np.concatenate([self.examples.items, *self.batches.values()]) >> keyed.ECHO_BITS


class Streams:
    """The streams of examples and of batches of one loader: functions of settings and log.

    Args:
        settings: of the loader.

    Attributes:
        whole: whole batches are examples of a batch size of one, shared out among the ranks by their maker.
        rank, world: of this loader's serials.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self.log = settings, Log(settings)
        self.whole = settings.batch_size is None
        self.batch_size = settings.batch_size or 1
        self.rank, self.world = (0, 1) if self.whole else (settings.rank, settings.world_size)
        self.echoes_batches = settings.variant.repeats == "batches"

    @property
    def factor(self) -> Factor:
        """Of whichever echoes."""
        return self.log.batches if self.echoes_batches else self.log.examples

    def examples(self, position: Position) -> Stream:
        """Of the iteration that a position lies in."""
        settings = self._settings
        return Stream(
            settings.seed, settings.shuffle_buffer, self.log.examples, rank=self.rank, world=self.world,
            begin=position.first_index, bad=self.log.bad.numbers,
        )  # fmt: skip

    def batches(self, position: Position) -> Stream:
        """Of the iteration that a position lies in, with draws of its own."""
        settings = self._settings
        return Stream(
            settings.seed + 1, settings.batch_shuffle_buffer, self.log.batches, rank=self.rank,
            world=self.world, begin=position.first_number, bad=[],
        )  # fmt: skip

    def held(self, position: Position) -> Held:
        """What lies in the buffers at a position."""
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

    def _held_numbers(self, position: Position) -> list[int]:
        """The fresh batches of which a repeat is still to leave, rising."""
        if not self.echoes_batches:
            return []
        held = self.batches(position).contents(position.batches).items
        numbers: list[int] = (keyed.distinct(held >> keyed.ECHO_BITS) // self.world).tolist()
        return numbers

    def num_held(self, position: Position) -> int:
        """Distinct fresh examples in the buffers at a position."""
        if self.whole:
            return position.held_examples
        return len(keyed.distinct(self.held(position).serials))

    def oldest_serial(self, position: Position) -> int:
        """The serial from which on examples are needed to go on from a position, or an earlier one."""
        stream = self.examples(position)
        if not position.in_pass:
            return position.next_index * self.world
        if stream.size > _SMALL:
            return position.oldest >> keyed.ECHO_BITS
        oldest = stream.oldest(position.examples)
        numbers = self._held_numbers(position)
        if numbers:
            first = (numbers[0] - position.first_number) * self.batch_size
            oldest = min(oldest, stream.oldest(stream.earlier(position.examples, first)))
        return oldest >> keyed.ECHO_BITS

    def state(self, position: Position) -> dict[str, Any]:
        """A position and the log there: plain numbers, strings and lists."""
        oldest = self.oldest_serial(position)
        # The order in which a buffer drains is that of all it held when the pass ended.
        known = position.first_index if position.examples.drained else oldest // self.world
        return {
            **position._asdict(),
            "oldest": oldest << keyed.ECHO_BITS,
            "examples": list(position.examples),
            "batches": list(position.batches),
            **self.log.plain(position, known),
        }

    def restored(self, state: dict[str, Any]) -> tuple[Position, Log]:
        """The position of a state, which has been checked, and the log as it was there."""
        position = Position(**{name: state[name] for name in Position._fields})
        position = position._replace(examples=Cursor(*state["examples"]), batches=Cursor(*state["batches"]))
        log = Log.restored(self._settings, state, position)
        now, before = self._settings.world_size, state["settings"]["world_size"]
        if now != before:  # between iterations: each has read its part
            fresh = position.fresh_examples * before // now
            position = position._replace(fresh_examples=fresh, skipped=position.next_index - fresh)
        return position, log


def of_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """The states of all ranks of torch.distributed in one; all of them call this together."""
    if not is_distributed():
        return {"ranks": [state]}
    states: list[Any] = [None] * torch.distributed.get_world_size()
    # A thread of gloo's lets go of what it sent a moment after all have it, and aborts a process that ends
    # just then, as one may after its last checkpoint (pytorch/pytorch#190489). Of a group of its own it is
    # waited for; the default group's threads go on until the very end where a DDP model was made.
    own: Any = None
    if "gloo" in torch.distributed.get_backend_config():
        own = torch.distributed.new_group(backend="gloo")
    try:
        torch.distributed.all_gather_object(states, state, group=own)
    finally:
        if own is not None:
            torch.distributed.destroy_process_group(own)
    return {"ranks": states}


def of_this_rank(state: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of what ``of_all_ranks`` made; any other state as it is.

    Raises:
        ValueError: it was saved by another number of ranks, within an iteration.
    """
    if not isinstance(state, Mapping) or "ranks" not in state:
        return state
    states = state["ranks"]
    rank, world_size = share(None, None)
    if len(states) == world_size or not states[0].get("in_pass"):
        return dict(states[rank if len(states) == world_size else 0])
    raise ValueError(
        f"load_state_dict: the state is that of {len(states)} ranks, and there are {world_size} now; "
        f"start {len(states)}, since each goes on from a position of its own"
    )


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """A state with a digest: a checkpoint of which only a part is loaded would go on elsewhere in silence."""
    return {**state, "digest": _digest(state)}


def _digest(state: Mapping[str, Any]) -> str:
    """Of all but what others told of their own position, which may be anything; lists are tuples."""
    marks = [mark[:-1] for mark in state["progress"]]
    told = {**{key: value for key, value in state.items() if key != "digest"}, "progress": marks}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check(state: Any, settings: Settings, length: int | None, permutation: str) -> None:
    """Raises ValueError where a state is none, is of another version of its format, or another loader's.

    Args:
        state: as it was given.
        settings: of the loader.
        length: of its source, if that is known.
        permutation: how it draws passes.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    refuse(
        version != VERSION,
        f"load_state_dict: version={version!r} of the state's format, and this adaecho reads {VERSION}; give "
        "what state_dict() of this version returned, or begin without load_state_dict",
    )
    whole = "progress" in state and _digest(state) == state.get("digest")
    refuse(not whole, "load_state_dict: only a part of the state was loaded, or it was changed by hand")
    settings.check_same(state["settings"], held=bool(state["in_pass"]))
    had, has = (
        "no known length" if number is None else f"{number} examples"
        for number in (state["source_length"], length)
    )
    refuse(
        had != has,
        f"load_state_dict: source had {had} and has {has} now, so that positions in it mean other examples; "
        "give the source it was saved with",
    )
    drawn = state["permutation"]
    refuse(
        drawn != permutation,
        f"load_state_dict: the permutation of the state's {had} is {drawn}, and this adaecho's of so many is "
        f"{permutation}: other examples would follow",
    )
