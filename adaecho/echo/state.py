"""The state of an EchoLoader at the consumer's position, saved and restored."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from adaecho.echo.batch.batch_echo import EchoedBatches, NotEchoed, recipes_in
from adaecho.echo.batch.batches import ExampleBatches, Position, Reread, Stage, WholeBatches
from adaecho.echo.order import keyed
from adaecho.echo.order.factor import Factor
from adaecho.echo.order.items import StageState
from adaecho.echo.read.chunks import BadExamples, FreshQueue, Reader
from adaecho.echo.settings import Settings, is_distributed, share
from adaecho.echo.threads.timers import Timers

VERSION = 3  # raised whenever a state of before would continue differently, or can't be read

_SAVED = (
    "fresh_examples", "reread_examples", "next_index", "skipped", "next_number", "first_number",
    "first_index", "iteration", "in_pass",
)  # fmt: skip


@dataclass
class Stages:
    """The stages of one loader, from the source to the batch.

    Attributes:
        reader, queue, bad: fresh examples (or whole batches), and the bad ones so far.
        batches: from them to batches.
        echo: from batches to what the consumer gets.
        factor: of whichever echoes.
        world: among how many ranks the reader's serials are shared out.
        iterated: the source can only be iterated; ``source_length`` is known of all others.
    """

    reader: Reader
    queue: FreshQueue
    bad: BadExamples
    batches: ExampleBatches | WholeBatches
    echo: EchoedBatches | NotEchoed
    factor: Factor
    world: int
    iterated: bool
    source_length: int | None

    @property
    def all(self) -> tuple[Stage, ...]:
        """The stages that hold something between the source and the consumer, in its direction."""
        return self.batches, self.echo

    def begin(self, position: Position, iteration: int, passes: int | None) -> Position:
        """Begin an iteration, giving up the one before if it hasn't ended; where that is."""
        self.bad.forget(position.next_index)
        abandoned_at = position.next_index if position.in_pass else None
        position = position.begun(iteration, self.reader.begin(iteration, passes, abandoned_at))
        self.queue.begin(position.next_index)
        for stage in self.all:
            stage.begin(position)
        return position

    def factor_at(self, position: Position) -> tuple[float, list[tuple[int, float]]]:
        """The factor in force at a position, and its changes up to there."""
        return self.factor.at(
            position.next_number if self.factor is self.echo.factor else position.next_index
        )


def save(settings: Settings, stages: Stages, position: Position, clocks: Timers) -> dict[str, Any]:
    """Plain numbers, strings, lists and tensors."""
    state: dict[str, Any] = {
        "version": VERSION,
        "settings": settings.plain(),
        "source_length": stages.source_length,
        **{name: value for name, value in asdict(position).items() if name in _SAVED},
        "clocks": clocks.state_dict(),
        "bad_examples": [dict(bad) for bad in stages.bad.found if bad["index"] < position.next_index],
    }
    if _permutation(stages) != "drawn":
        state["permutation"] = _permutation(stages)
    for stage in stages.all:
        state |= stage.save(position)
    if settings.batch_size is not None or settings.variant.repeats:  # nothing repeats whole batches passed on
        state["factor_changes"] = [list(change) for change in stages.factor_at(position)[1]]
    oldest = position.next_index * stages.world
    if stages.iterated:
        needed = [stage.needed(state) for stage in stages.all]
        oldest = min([oldest, *(int(serials.min()) for serials in needed if len(serials))])
    state["progress"] = stages.reader.progress(oldest, position.next_index)
    state["witnesses"] = stages.reader.witnesses.before(position.next_index * stages.world)
    return state


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
        ValueError: it was saved by another number of ranks.
    """
    if not isinstance(state, Mapping) or "ranks" not in state:
        return state
    states = state["ranks"]
    rank, world_size = share(None, None)
    if len(states) != world_size:
        raise ValueError(
            f"load_state_dict: the state is that of {len(states)} ranks, and there are {world_size} now; "
            f"start {len(states)}, since each goes on from a position of its own"
        )
    return dict(states[rank])


def check(state: dict[str, Any], settings: Settings, stages: Stages) -> None:
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
    settings.check_same(state["settings"])
    length = state["source_length"]
    if length != stages.source_length:
        raise ValueError(
            f"load_state_dict: source had {_examples(length)} and has {_examples(stages.source_length)} now, "
            "so that positions in it mean other examples; give the source it was saved with"
        )
    permutation = state.get("permutation", "drawn")
    if permutation != _permutation(stages):
        raise ValueError(
            f"load_state_dict: the permutation of the state's {_examples(length)} is {permutation}, and this "
            f"adaecho's of so many is {_permutation(stages)}: other examples would follow; go on with the "
            "adaecho that saved it, or begin without load_state_dict"
        )


def _permutation(stages: Stages) -> str:
    # Permutation.method; what is only iterated has an order of its own.
    return str(getattr(stages.reader, "method", "drawn"))


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


def restore(state: dict[str, Any], settings: Settings, stages: Stages, clocks: Timers) -> Position:
    """Bring the stages to a saved position of the same loader."""
    position = Position(**{name: state[name] for name in _SAVED if name in state})
    clocks.load_state_dict(state["clocks"])
    stages.bad.found = [dict(bad) for bad in state["bad_examples"]]
    stages.factor.set_changes([(int(i), float(factor)) for i, factor in state.get("factor_changes", [])])
    needed = [stage.needed(state) for stage in stages.all]
    serials = keyed.distinct(np.concatenate([keyed.NO_ITEMS, *needed]))
    stages.reader.witnesses.expect(state.get("witnesses", []))
    examples, count = stages.reader.restore(
        position.next_index, position.iteration, settings.epochs, serials, state["progress"]
    )
    stages.queue.begin(position.next_index)
    for stage in stages.all:
        stage.load(state, position, Reread(serials, examples))
    return replace(position, reread_examples=position.reread_examples + count)


def items_held(state: dict[str, Any]) -> keyed.Items:
    """The items of which a shuffle buffer or the echo of a batch still holds a repeat."""
    buffered = [StageState.of(state["examples"]).buffer] if "examples" in state else []
    if "batches" in state:
        buffered += [recipe.items for recipe in recipes_in(state).values()]
    return np.concatenate([keyed.NO_ITEMS, *buffered])
