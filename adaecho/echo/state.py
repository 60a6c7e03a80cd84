"""The state of a loader, which consists of its settings, a cursor and a log.

The cursor is the position of the training loop. The log records bad examples and changes of the echoing
factor. The state is a flat dict from names to numbers, strings and lists of numbers, and contains no
examples.
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
    """The position of the training loop, after the last batch that it received.

    Each rank numbers its own fresh examples. The number of an example on its rank is called its local number.

    Attributes:
        fresh_examples: number of fresh examples that the batches so far needed.
        reread_examples: number of examples that were read again to restore a cursor.
        next_index: local number of the next fresh example.
        skipped: how many local numbers before ``next_index`` were never read, because an iteration was
            abandoned.
        next_number: number of the next fresh batch that enters the echo of batches.
        first_number: ``next_number`` at the start of the iteration.
        first_index: ``next_index`` at the start of the iteration.
        iteration: number of iterations that have begun.
        in_pass: whether the current iteration has not ended.
        examples, batches: cursors of the streams of examples and of batches, counted from the start of the
            iteration.
        held_examples: number of examples in whole batches that will be repeated again.
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
    held_examples: int = 0

    def begun(self, iteration: int, index: int) -> "LoaderCursor":
        """Return the cursor at the start of an iteration that begins at local number ``index``."""
        return self._replace(
            iteration=iteration, in_pass=True, skipped=self.skipped + index - self.next_index,
            next_index=index, first_index=index, first_number=self.next_number, examples=Cursor(),
            batches=Cursor(), held_examples=0,
        )  # fmt: skip

    def ended(self, index: int, *, whole: bool) -> "LoaderCursor":
        """Return the cursor at the end of an iteration.

        Args:
            index: local number of the next fresh example. It can exceed ``next_index``, because the iteration
                may have read bad examples after its last batch.
            whole: whether the source yields whole batches.
        """
        # The number of examples in a bad whole batch is unknown, so bad batches are not counted.
        fresh_examples = self.fresh_examples if whole else index - self.skipped
        return self._replace(
            in_pass=False, next_index=index, fresh_examples=fresh_examples, examples=Cursor(),
            batches=Cursor(),
        )  # fmt: skip


# Iteration only appends to the log, so another thread can save a state at any time.
class Log:
    """The bad examples and the changes of the echoing factor so far.

    Args:
        settings: settings of the loader.

    Attributes:
        bad: the bad examples (or bad whole batches).
        examples, batches: the echoing factors of examples and of batches. A variant repeats at most one of
            them, so the other factor is 1.
    """

    def __init__(self, settings: Settings) -> None:
        self.bad = BadExamples(settings.max_bad_examples)
        repeats, factor = settings.variant.repeats, settings.first_factor
        self.examples = Factor(settings.seed, factor if repeats == "examples" else 1.0)
        self.batches = Factor(settings.seed + 1, factor if repeats == "batches" else 1.0)

    def go_back(self, position: LoaderCursor) -> None:
        """Remove the entries that reading ahead has added after a cursor."""
        self.bad.go_back(position.next_index)
        self.examples.go_back(self.examples.before(position.next_index))
        self.batches.go_back(self.batches.before(position.next_number))

    def begin(self, index: int) -> None:
        """Prepare the log for an iteration that begins at local number ``index``."""
        # The iteration will find the bad examples from this number on again.
        self.bad.go_back(index)
        self.examples.go_back(self.examples.begun(index).history)

    def flat(self, position: LoaderCursor, oldest: int) -> dict[str, Any]:
        """Return the log up to a cursor in the form of a state.

        Args:
            position: the cursor.
            oldest: local number of the oldest example that is needed to continue. The state omits the
                numbers of earlier bad examples, which would make it larger without use.
        """
        index = position.next_index
        return {
            "example_factors": [x for change in self.examples.before(index) for x in change],
            "batch_factors": [x for change in self.batches.before(position.next_number) for x in change],
            "bad_examples": json.dumps([bad for bad in self.bad.found if bad["index"] < index]),
            "bad_numbers": [number for number in self.bad.numbers if oldest <= number < index],
        }

    @staticmethod
    def restored(settings: Settings, state: dict[str, Any], position: LoaderCursor) -> "Log":
        """Return the log that a state stores, with the echoing factor of the settings from then on."""
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
    """The contents of the loader's buffers at a cursor.

    An item is one use of a fresh example (``order.keyed``).

    Attributes:
        examples: the items in the shuffle buffer of examples.
        batches: the items of each fresh batch that will be repeated again, by the number of the batch.
    """

    examples: Contents = NOTHING
    batches: dict[int, keyed.Items] = field(default_factory=dict)

    @property
    def serials(self) -> keyed.Items:
        """Serial numbers of the examples of all items, with one entry for each use; int64 [n]."""
        return np.concatenate([self.examples.items, *self.batches.values()]) >> keyed.ECHO_BITS


class Streams:
    """Compute the streams of examples and of batches of one loader from its settings and log.

    Args:
        settings: settings of the loader.

    Attributes:
        whole: whether the source yields whole batches. The loader treats each like an example, with batch
            size 1, and leaves it to the source to shard them among ranks.
        rank, world: rank of this loader and number of ranks. The loader reads the serials that are congruent
            to ``rank`` modulo ``world``.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self.log = settings, Log(settings)
        self.whole = settings.batch_size is None
        self.batch_size = settings.batch_size or 1
        self.rank, self.world = (0, 1) if self.whole else (settings.rank, settings.world_size)
        self.echoes_batches = settings.variant.repeats == "batches"

    @property
    def factor(self) -> Factor:
        """The echoing factor of the items that the variant repeats."""
        return self.log.batches if self.echoes_batches else self.log.examples

    def examples(self, position: LoaderCursor) -> Stream:
        """Return the stream of examples for the iteration to which a cursor belongs."""
        settings = self._settings
        return Stream(
            settings.seed, settings.shuffle_buffer, self.log.examples, rank=self.rank, world=self.world,
            begin=position.first_index, bad=self.log.bad.numbers,
        )  # fmt: skip

    def batches(self, position: LoaderCursor) -> Stream:
        """Return the stream of batches for the iteration to which a cursor belongs."""
        settings = self._settings
        return Stream(
            settings.seed + 1, settings.batch_shuffle_buffer, self.log.batches, rank=self.rank,
            world=self.world, begin=position.first_number, bad=[],
        )  # fmt: skip

    def held(self, position: LoaderCursor) -> Held:
        """Compute the contents of the buffers at a cursor."""
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
        """Return the numbers of the fresh batches that will be repeated again, ascending."""
        if not self.echoes_batches:
            return []
        held = self.batches(position).contents(position.batches).items
        numbers: list[int] = (keyed.distinct(held >> keyed.ECHO_BITS) // self.world).tolist()
        return numbers

    def num_held(self, position: LoaderCursor) -> int:
        """Return the number of distinct fresh examples in the buffers at a cursor."""
        if self.whole:
            return position.held_examples
        return len(keyed.distinct(self.held(position).serials))

    def oldest_serial(self, position: LoaderCursor) -> int:
        """Return the serial of the oldest example that is needed to continue from a cursor."""
        if not position.in_pass:
            return position.next_index * self.world
        stream, cursor = self.examples(position), position.examples
        numbers = self._held_numbers(position)
        if numbers:
            first = (numbers[0] - position.first_number) * self.batch_size
            return min(stream.oldest(cursor), stream.oldest(stream.earlier(cursor, first))) >> keyed.ECHO_BITS
        return stream.oldest(cursor) >> keyed.ECHO_BITS

    def state(self, position: LoaderCursor) -> dict[str, Any]:
        """Return a cursor, and the log up to it, as a dict of numbers, strings and lists of numbers."""
        # The order in which a buffer drains depends on all that it held when the input ended.
        drained = position.examples.drained
        known = position.first_index if drained else self.oldest_serial(position) // self.world
        return {
            **position._asdict(),
            "examples": list(position.examples),
            "batches": list(position.batches),
            **self.log.flat(position, known),
        }

    def restored(self, state: dict[str, Any]) -> tuple[LoaderCursor, Log]:
        """Return the cursor and the log of a state that has been checked."""
        position = LoaderCursor(**{name: state[name] for name in LoaderCursor._fields})
        position = position._replace(examples=Cursor(*state["examples"]), batches=Cursor(*state["batches"]))
        log = Log.restored(self._settings, state, position)
        now, before = self._settings.world_size, json.loads(state["settings"])["world_size"]
        if now != before:  # the state is from between two iterations, when each rank had read its whole share
            fresh = position.fresh_examples * before // now
            position = position._replace(fresh_examples=fresh, skipped=position.next_index - fresh)
        return position, log


def of_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """Gather the states of all ranks of torch.distributed into one state.

    All ranks must call this together.
    """
    states: list[Any] = [state]
    if is_distributed():
        states = [None] * torch.distributed.get_world_size()
        # A thread of gloo releases its buffers shortly after all ranks have received the data. If a process
        # ends at that moment, the thread aborts it (pytorch/pytorch#190489). We therefore use a separate
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
    """Return this rank's part of a state that ``of_all_ranks`` made. Other states are returned unchanged.

    Raises:
        ValueError: the state was saved within an iteration by a different number of ranks.
    """
    if not isinstance(state, Mapping) or "ranks" not in state:
        return state
    saved, (rank, world_size) = state["ranks"], share(None, None)
    if saved != world_size and state["0.in_pass"]:
        raise ValueError(
            f"load_state_dict: {saved} ranks saved this state within an iteration, but {world_size} load it; "
            f"start {saved} ranks, because each resumes at its own cursor"
        )
    prefix = f"{rank if saved == world_size else 0}."
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


def check(state: Any, settings: Settings, length: int | None) -> None:
    """Check that a state has the format of this version and was saved with the same settings and source.

    Args:
        state: the object that the caller passed to ``load_state_dict``.
        settings: settings of the loader that loads the state.
        length: number of examples in the loader's source, or None if unknown.

    Raises:
        ValueError: the state does not match; the message names the argument that differs.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    refuse(
        version != VERSION,
        f"load_state_dict: the state has format version {version!r}, but this adaecho reads {VERSION}; pass "
        "a state_dict() of this version, or start without load_state_dict",
    )
    settings.check_same(json.loads(state["settings"]), held=bool(state["in_pass"]))
    had, has = (
        "no known length" if number in (None, -1) else f"{number} examples"
        for number in (state["source_length"], length)
    )
    refuse(
        had != has,
        f"load_state_dict: the source had {had} but now has {has}, so its positions mean other examples; "
        "pass the source that the state was saved with",
    )
