"""The state of an EchoLoader: settings, position and log, and of iterables where they stand."""

from collections.abc import Mapping
from typing import Any

import torch

from adaecho.echo.order import keyed
from adaecho.echo.order.stream import Place
from adaecho.echo.pipeline import Pipeline
from adaecho.echo.place import Position
from adaecho.echo.settings import Settings, is_distributed, share
from adaecho.echo.threads.timers import Timers

VERSION = 4  # raised whenever a state of before would continue differently, or can't be read


def save(settings: Settings, pipeline: Pipeline, position: Position, clocks: Timers) -> dict[str, Any]:
    """Plain numbers, strings and lists."""
    log, streams = pipeline.log, pipeline.streams
    oldest = streams.oldest_serial(position)
    progress, witnesses = pipeline.told(position)
    state: dict[str, Any] = {
        "version": VERSION,
        "settings": settings.plain(),
        "source_length": pipeline.source_length,
        **position._asdict(),
        "oldest": oldest << keyed.ECHO_BITS,
        "examples": list(position.examples),
        "batches": list(position.batches),
        "factors": {
            "examples": [list(change) for change in log.examples.before(position.next_index)],
            "batches": [list(change) for change in log.batches.before(position.next_number)],
        },
        "bad_examples": [dict(bad) for bad in log.bad.found if bad["index"] < position.next_index],
        "bad_numbers": [
            number for number in log.bad.numbers if oldest // streams.world <= number < position.next_index
        ],
        "progress": progress,
        "witnesses": witnesses,
        "clocks": clocks.state_dict(),
    }
    if _permutation(pipeline) != "drawn":
        state["permutation"] = _permutation(pipeline)
    return state


def _permutation(pipeline: Pipeline) -> str:
    # Permutation.method; what is only iterated has an order of its own.
    return str(getattr(pipeline.reader, "method", "drawn"))


def position_in(state: dict[str, Any], settings: Settings, pipeline: Pipeline) -> Position:
    """The position of a state, which has been checked, and the log as it was there.

    A factor that differs from the state's is in force for what has not been read yet.
    """
    log = pipeline.log
    position = Position(**{name: state[name] for name in Position._fields})
    position = position._replace(examples=Place(*state["examples"]), batches=Place(*state["batches"]))
    log.bad.found = [dict(bad) for bad in state["bad_examples"]]
    log.bad.numbers = list(state["bad_numbers"])
    given, before = settings.plain(), state["settings"]
    changed = (given["echo"], given["factor"]) != (before["echo"], before["factor"])
    other_ranks = given["world_size"] != before["world_size"]
    for name, factor, number in (
        ("examples", log.examples, position.next_index), ("batches", log.batches, position.next_number),
    ):  # fmt: skip
        first = factor.history[0][1]
        factor.go_back([(int(index), float(value)) for index, value in state["factors"][name]])
        if given["factor"] == "auto" and given["echo"] == before["echo"]:
            first = factor.value  # which is where it goes on from
        if changed and factor.value != first:
            factor.history.append((number, first))
        if other_ranks:  # whose local numbers are others
            factor.go_back([(0, factor.value)])
    if other_ranks:  # between iterations: each has read its part
        fresh = position.fresh_examples * before["world_size"] // given["world_size"]
        position = position._replace(fresh_examples=fresh, skipped=position.next_index - fresh)
    return position


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
    if len(states) != world_size:
        if not states[0]["in_pass"]:
            return dict(states[0])
        raise ValueError(
            f"load_state_dict: the state is that of {len(states)} ranks, and there are {world_size} now; "
            f"start {len(states)}, since each goes on from a position of its own"
        )
    return dict(states[rank])


def check(state: dict[str, Any], settings: Settings, pipeline: Pipeline) -> None:
    """Raises ValueError where a state is of another version of its format, or another loader's."""
    foreign = _foreign(state)
    if foreign:
        raise ValueError(
            f"load_state_dict: this is no state of an EchoLoader ({foreign}); give what state_dict() "
            "returned, and where there is none begin without load_state_dict"
        )
    if state["version"] != VERSION:
        raise ValueError(
            f"load_state_dict: version={state['version']!r} of the state's format, and this adaecho reads "
            f"{VERSION}: other batches would follow than in the run that saved it; go on with the adaecho "
            "that saved it, or begin without load_state_dict"
        )
    settings.check_same(state["settings"], held=bool(state["in_pass"]))
    length = state["source_length"]
    if length != pipeline.source_length:
        raise ValueError(
            f"load_state_dict: source had {_examples(length)} and has {_examples(pipeline.source_length)} "
            "now, so that positions in it mean other examples; give the source it was saved with"
        )
    permutation = state.get("permutation", "drawn")
    if permutation != _permutation(pipeline):
        raise ValueError(
            f"load_state_dict: the permutation of the state's {_examples(length)} is {permutation}, and this "
            f"adaecho's of so many is {_permutation(pipeline)}: other examples would follow; go on with the "
            "adaecho that saved it, or begin without load_state_dict"
        )


def _foreign(state: Any) -> str:
    """What shows that this is no state; empty where it may be one."""
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}"
    lacking = [name for name in ("version", "settings", "next_index", "progress") if name not in state]
    if not lacking:
        return ""
    keys = ", ".join(repr(key) for key in list(state)[:3])
    return f"it lacks {', '.join(map(repr, lacking))} and " + (f"has {keys}" if keys else "is empty")


def _examples(length: int | None) -> str:
    return "no known length" if length is None else f"{length} examples"
