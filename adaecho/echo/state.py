"""The state of an EchoLoader at the consumer's position, saved and restored."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from adaecho.echo.batch.batch_echo import EchoedBatches, Held
from adaecho.echo.batch.batches import Ready, stand_ins
from adaecho.echo.memory.packing import pack, unpack
from adaecho.echo.order import keyed
from adaecho.echo.order.plan import pending, serials_in
from adaecho.echo.settings import Settings
from adaecho.echo.threads.timers import Clocks
from adaecho.echo.wiring import Stages

VERSION = 2


@dataclass
class Position:
    """Where the consumer is.

    Attributes:
        fresh_examples: read for the batches taken so far.
        reread_examples: read again to restore a position.
        next_index: upstream position, as a local number; ``skipped`` of the numbers before were passed over.
        next_number: number of the next fresh batch to echo; ``first_number``: when the iteration began.
        first_index: ``next_index`` when the iteration began.
        iteration: how many have begun; ``in_pass`` while it has not ended.
        output, batch_output: of the example and batch stage, all in all.
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
    output: int = 0
    batch_output: int = 0
    restored: bool = False

    def take(self, ready: Ready) -> None:
        """The consumer takes a batch."""
        self.fresh_examples, self.next_index = ready.fresh_examples, ready.next_index
        self.next_number = ready.next_number
        self.output, self.batch_output = ready.output, ready.batch_output

    def end(self, index: int, *, whole: bool) -> None:
        """The iteration ends at a local number, maybe after bad examples that no batch followed."""
        self.in_pass, self.next_index = False, index
        if not whole:  # of bad batches nobody knows how many examples they have
            self.fresh_examples = index - self.skipped


_SAVED = (
    "fresh_examples", "reread_examples", "next_index", "skipped", "next_number", "first_number",
    "first_index", "iteration", "in_pass",
)  # fmt: skip


def save(settings: Settings, stages: Stages, position: Position, clocks: Clocks) -> dict[str, Any]:
    """Plain numbers, strings, lists and tensors."""
    state: dict[str, Any] = {
        "version": VERSION,
        "settings": settings.plain(),
        "source_length": stages.source_length,
        **{name: value for name, value in asdict(position).items() if name in _SAVED},
        "clocks": clocks.state_dict(),
        "bad_examples": [dict(bad) for bad in stages.bad.found if bad["index"] < position.next_index],
    }
    oldest = position.next_index * stages.world
    if stages.examples is not None:
        state["examples"] = _with_tensor(stages.examples.stage.state_at(position.output))
        oldest = min(oldest, _oldest(state["examples"]))
    echoed = stages.pipeline.echoed
    if echoed is not None:
        batches, held = echoed.state_at(position.batch_output)
        state["batches"] = _with_tensor(batches)
        state["held_batches"] = _plain_held(held, whole=stages.examples is None)
        for one in held.values():
            first = one.place if stages.examples is None else int(one.items.min()) >> keyed.ECHO_BITS
            oldest = min(oldest, first)
    if stages.factor is not None:
        changes = stages.factor.at(position.next_number if echoed is not None else position.next_index)[1]
        state["factor_changes"] = [list(change) for change in changes]
    if stages.snapshots:
        state["contents"] = _contents(state, stages)
        oldest = position.next_index * stages.world
    state["progress"] = stages.reader.progress(oldest, position.next_index)
    return state


def _contents(state: dict[str, Any], stages: Stages) -> dict[str, Any]:
    """What lies in the buffers, so that nothing has to be read again for it; nobody may work meanwhile."""
    contents = {}
    if stages.examples is not None and stages.examples.recent is not None:
        stage = stages.examples.stage
        serials = serials_in(_with_array(state["examples"]))
        contents["examples"] = pack(stages.examples.recent.contents(stage, serials))
    echoed = stages.pipeline.echoed
    if echoed is not None and echoed.recent is not None:
        serials = state["held_batches"]["numbers"].numpy() * stages.world + stages.rank
        contents["batches"] = pack(echoed.recent.contents(echoed, serials))
    return contents


def _oldest(examples: dict[str, Any]) -> int:
    items = [int(examples["buffer"].min())] if len(examples["buffer"]) else []
    if examples["pending_repeats"]:
        items.append(examples["pending_item"])
    return min(items) >> keyed.ECHO_BITS if items else 1 << 62


def check(state: dict[str, Any], settings: Settings, stages: Stages) -> None:
    """Raises ValueError where a state is of another version of its format, or another loader's."""
    foreign = _foreign(state)
    if foreign:
        raise ValueError(
            f"load_state_dict: this is no state of an EchoLoader ({foreign}); give what "
            "state_dict() returned, "
            "and where there is none begin without load_state_dict"
        )
    if state["version"] != VERSION:
        raise ValueError(
            f"load_state_dict: state version {state['version']}, this EchoLoader reads {VERSION}"
        )
    settings.check_same(state["settings"])
    if "contents" in state and not stages.snapshots:
        raise ValueError(
            "load_state_dict: restore was 'snapshot' and is 'replay' now, which needs to know where "
            "the buffer's examples lie; give restore='snapshot'"
        )
    length = state.get("source_length", stages.source_length)  # states written before don't tell
    if length != stages.source_length:
        raise ValueError(
            f"load_state_dict: source had {_examples(length)} and has {_examples(stages.source_length)} now, "
            "so that positions in it mean other examples; give the source it was saved with"
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


def restore(state: dict[str, Any], settings: Settings, stages: Stages, clocks: Clocks) -> Position:
    """Bring the stages to a saved position of the same loader."""
    position = Position(**{name: state[name] for name in _SAVED if name in state}, restored=True)
    clocks.load_state_dict(state["clocks"])
    stages.bad.found = [dict(bad) for bad in state["bad_examples"]]
    if stages.factor is not None:
        stages.factor.set_changes([(int(i), float(factor)) for i, factor in state["factor_changes"]])
    held = _held(state.get("held_batches", {}), position.fresh_examples)
    again = _Again(state, settings, stages, position, held)
    stages.queue.begin(position.next_index)
    if stages.examples is not None:
        stages.examples.begin(position.next_index, position.skipped)
        stages.examples.stage.load(_with_array(state["examples"]), again.select)
        position.output = stages.examples.stage.emitted
    elif stages.whole is not None:
        stages.whole.fresh_examples = position.fresh_examples
    if stages.pipeline.echoed is not None:
        _load_batches(state, stages, position, held, again)
        position.batch_output = stages.pipeline.echoed.emitted
    return position


def _load_batches(
    state: dict[str, Any],
    stages: Stages,
    position: Position,
    held: dict[int, Held],
    again: "_Again",
) -> None:
    echoed = stages.pipeline.echoed
    assert isinstance(echoed, EchoedBatches)
    last = Ready(None, keyed.NO_ITEMS, position.output, position.next_index, position.fresh_examples)
    remade = {number: again.batch(number, one) for number, one in held.items()}
    echoed.load(_with_array(state["batches"]), held, remade, last)


class _Again:
    """What lay in the buffers at a position: as the state holds it, or read again, once, in serial order."""

    def __init__(
        self,
        state: dict[str, Any],
        settings: Settings,
        stages: Stages,
        position: Position,
        held: dict[int, Held],
    ) -> None:
        self._stages = stages
        contents = state.get("contents")
        needed = keyed.NO_ITEMS if contents is not None else self._needed(state, held)
        self._serials = needed
        self._things, count = stages.reader.restore(
            position.next_index, position.iteration, settings.epochs, needed, state["progress"]
        )
        position.reread_examples += count
        self._batches: dict[int, Any] = {}
        if contents is not None and "examples" in contents:
            self._serials = serials_in(_with_array(state["examples"]))
            self._things = unpack(contents["examples"])
        if contents is not None and "batches" in contents:
            batches = unpack(contents["batches"])
            assert isinstance(batches, list)
            move = (stages.examples or stages.whole).move  # type: ignore[union-attr]
            self._batches = {number: move(batch) for number, batch in zip(held, batches, strict=True)}

    def _needed(self, state: dict[str, Any], held: dict[int, Held]) -> keyed.Items:
        if self._stages.examples is None:
            return np.array(sorted(one.place for one in held.values()), dtype=np.int64)
        examples = _with_array(state["examples"])
        items = [one.items for one in held.values()]
        return keyed.serials_of(np.concatenate([examples["buffer"], pending(examples), *items]))

    def select(self, serials: Any) -> Any:
        """The examples of some of the serials, as the pool takes them."""
        index = np.searchsorted(self._serials, serials)
        things = self._things
        if isinstance(things, list):
            return [things[place] for place in index]
        return things[index] if isinstance(things, np.ndarray) else things.take(index)

    def batch(self, number: int, held: Held) -> Any:
        """A fresh batch, as the state holds it or made again."""
        if number in self._batches:
            return self._batches[number]
        examples, whole = self._stages.examples, self._stages.whole
        if examples is None:
            assert whole is not None
            return whole.taken(self.select(np.array([held.place]))[0])
        lent = examples.stage.lend(self.select(held.items >> keyed.ECHO_BITS))
        return examples.collated(held.items, examples.augmented(held.items, lent))


def _plain_held(held: dict[int, Held], whole: bool) -> dict[str, torch.Tensor]:
    """A few tensors, however many batches there are; of whole ones only number, place and length."""
    items = [] if whole else [one.items for one in held.values()]
    return {
        "numbers": torch.tensor(list(held), dtype=torch.int64),
        "places": torch.tensor([one.place for one in held.values()], dtype=torch.int64),
        "lengths": torch.tensor([len(one.items) for one in held.values()], dtype=torch.int64),
        "items": torch.from_numpy(np.concatenate([keyed.NO_ITEMS, *items])),
    }


def _held(plain: dict[Any, torch.Tensor], fresh_examples: int) -> dict[int, Held]:
    if "numbers" not in plain:  # a state as it was written before: the items of each batch
        return {int(number): Held(items.numpy(), int(number)) for number, items in plain.items()}
    lengths, items = plain["lengths"].numpy(), plain["items"].numpy()
    if not len(items):
        items = stand_ins(fresh_examples - int(lengths.sum()), fresh_examples)
    of_each = np.split(items, np.cumsum(lengths)[:-1]) if len(lengths) else []
    held = zip(plain["numbers"].tolist(), of_each, plain["places"].tolist(), strict=True)
    return {number: Held(one, place) for number, one, place in held}


def _with_tensor(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "buffer": torch.from_numpy(state["buffer"])}


def _with_array(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "buffer": state["buffer"].numpy()}
