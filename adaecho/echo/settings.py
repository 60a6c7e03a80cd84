"""The arguments of an EchoLoader, checked."""

import math
import operator
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np
import torch

from adaecho.echo.read.failures import warn_caller
from adaecho.echo.variants import ORDERS, VARIANTS, Variant, check_factor

# Settings that are whole numbers, with the least that each may be.
_WHOLE = {
    "batch_size": 1, "shuffle_buffer": 0, "batch_shuffle_buffer": 0, "epochs": 1, "seed": None, "rank": 0,
    "world_size": 1, "max_bad_examples": 0,
}  # fmt: skip
_MOST_PASSES = 8  # of the data in a buffer
_MOST_WORKERS = 1024  # far beyond any gain of threads, below what a process may have
_OPTIONAL = ("batch_size", "epochs")


@dataclass(frozen=True)
class Settings:
    """What decides which batches come: two loaders that agree in it give the same ones.

    Raises:
        ValueError: a value can't be; the message names it and the remedy.
    """

    batch_size: int | None
    echo: str
    factor: float | str
    shuffle_buffer: int
    batch_shuffle_buffer: int
    order: str
    epochs: int | None
    seed: int
    rank: int
    world_size: int
    max_factor: float
    max_bad_examples: int
    drop_last: bool = False
    sampler: str | None = None  # its kind and length

    def __post_init__(self) -> None:
        one_of("echo", self.echo, tuple(VARIANTS))
        one_of("order", self.order, ORDERS)
        for name, least in _WHOLE.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                self._set(name, whole(name, getattr(self, name), least))
        if self.batch_size is None:
            self._check_whole_batches()
        check_factor(self.variant, self.factor, self.max_factor, self.batch_shuffle_buffer)
        for name in ("factor", "max_factor"):
            self._set(name, _plain_number(getattr(self, name)))
        self._check_drop_last()
        self._check_even_ranks()
        self._warn_of_idle_echo()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_whole_batches(self) -> None:
        if not self.variant.batches_upstream:
            raise ValueError(
                f"echo={self.echo!r} with batch_size=None: the source's batches are whole; choose "
                "echo='batch', or give a source of examples and a batch_size"
            )
        if self.shuffle_buffer:
            raise ValueError(
                f"shuffle_buffer={self.shuffle_buffer} with batch_size=None: examples of whole batches can't "
                "be shuffled; batch_shuffle_buffer shuffles batches"
            )
        if self.order == "shards":
            raise ValueError("order='shards' with batch_size=None: whole batches come in the source's order")

    def _check_drop_last(self) -> None:
        if not isinstance(self.drop_last, bool | np.bool_):
            raise ValueError(f"drop_last={self.drop_last!r}: must be True or False")
        self._set("drop_last", bool(self.drop_last))
        if self.drop_last and self.batch_size is None:
            raise ValueError("drop_last=True with batch_size=None: give it to the maker of the whole batches")

    def _check_even_ranks(self) -> None:
        """Raises ValueError where passes of unequal length would leave ranks waiting for gradients."""
        if self.epochs is None or self.world_size == 1:
            return
        passes = f"epochs={self.epochs} and world_size={self.world_size}"
        if self.factor == "auto":
            raise ValueError(
                f"factor='auto' with {passes}: each rank follows its own R, and would make another number of "
                "batches; give a number, or leave out epochs= and count steps: islice(loader, num_steps)"
            )
        if self.max_bad_examples:
            raise ValueError(
                f"max_bad_examples={self.max_bad_examples} with {passes}: a rank that skips one would make "
                "fewer batches than the others; let decode give a stand-in for a bad example, or leave out "
                "epochs= and count steps: islice(loader, num_steps)"
            )

    def check_can_iterate(self, name: str, *, reordered: bool) -> None:
        """Raises ValueError where an iterable has no such order, or may be unequal among ranks."""
        if self.order == "shards" and not reordered:
            raise ValueError(
                "order='shards': this source can only be iterated, in an order of its own; leave order out, "
                "and let the source shuffle its shards"
            )
        if self.epochs is None or self.world_size == 1 or self.batch_size is None:
            return
        raise ValueError(
            f"epochs={self.epochs} with world_size={self.world_size}: {name} can only be iterated, how many "
            "examples of it a rank gets is not known, and ranks with unequal numbers of batches wait for "
            "each other for ever; leave out epochs= and count steps (islice(loader, num_steps)), or give a "
            "source with a length, or share it out yourself, with rank=0, world_size=1"
        )

    @property
    def variant(self) -> Variant:
        """What ``echo`` names."""
        return VARIANTS[self.echo]

    @property
    def first_factor(self) -> float:
        """The factor before anything has been measured."""
        return 1.0 if self.factor == "auto" else float(self.factor)

    def plain(self) -> dict[str, Any]:
        """The settings as numbers and strings."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        """The settings that tell loaders apart: what has a default is left out where it has that."""
        told = [
            field for field in fields(self) if getattr(self, field.name) != _USUAL.get(field.name, MISSING)
        ]
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in told)

    def _warn_of_idle_echo(self) -> None:
        """Warn of an echo that repeats nothing, or whose repeats of an example follow one another."""
        echo, repeats = f"echo={self.echo!r}", self.variant.repeats
        if not repeats:
            return
        if self.factor == 1:
            warn_caller(f"{echo} with factor=1 repeats nothing; give factor=2, say, or leave echo out")
        elif repeats == "examples" and self.shuffle_buffer == 0:
            warn_caller(
                f"{echo} with shuffle_buffer=0: all repeats of an example follow one another, mostly in one "
                "batch; give shuffle_buffer=, many times batch_size, to spread them"
            )

    @property
    def to_fill(self) -> dict[str, float]:
        """About how many fresh examples (or whole batches) of this rank fill each buffer."""
        example_factor = self.first_factor if self.variant.repeats == "examples" else 1.0
        return {
            "shuffle_buffer": self.shuffle_buffer / example_factor,
            "batch_shuffle_buffer": self.batch_shuffle_buffer * (self.batch_size or 1) / self.first_factor,
        }

    def check_filling(self, length: int | None) -> None:
        """Warn where more than a pass is read before the first batch, or raise ValueError where many are.

        Args:
            length: examples (or whole batches) of a pass, of all ranks; None where it isn't known.
        """
        if not length:
            return
        own = length if self.batch_size is None else length / self.world_size
        for name, examples in self.to_fill.items():
            passes = min(examples / own, self.epochs or math.inf)
            if passes <= 1:
                continue
            told = (
                f"{name}={getattr(self, name)}: to fill it takes {passes:,.1f} passes of the source's "
                f"{length:,} {'batches' if self.batch_size is None else 'examples'} before the first batch"
            )
            if passes > _MOST_PASSES:
                raise ValueError(
                    f"{told}; a buffer as large as the data shuffles as well: make it smaller (more than "
                    f"{_MOST_PASSES} passes need as many epochs=)"
                )
            warn_caller(f"{told}; a buffer as large as the data shuffles as well")

    def check_same(self, saved: dict[str, Any], *, held: bool) -> None:
        """Raises ValueError, naming the argument, where a state was saved under others that matter.

        Args:
            saved: settings of the state.
            held: its buffers hold something, which was made under them.
        """
        for name, value in self.plain().items():
            if saved.get(name) == value or name in _MAY_CHANGE or (not held and name in _OF_WHAT_IS_HELD):
                continue
            remedy = "give the loader the arguments it was saved with"
            if name in ("rank", "world_size"):
                remedy = (
                    "within an iteration each rank goes on from a state of its own, among as many ranks: "
                    "save one for each, or give state_of_all_ranks=True where one checkpoint is written for "
                    "all"
                )
            raise ValueError(
                f"load_state_dict: {name} was {saved.get(name)!r} and is {value!r} now; {remedy}"
            )


_MAY_CHANGE = ("factor", "max_factor", "max_bad_examples")  # for what has not been read yet
_OF_WHAT_IS_HELD = (
    "batch_size", "echo", "shuffle_buffer", "batch_shuffle_buffer", "rank", "world_size", "drop_last",
)  # fmt: skip
# Of settings that most loaders leave as they are.
_USUAL = {
    "echo": "none", "factor": 1.0, "shuffle_buffer": 0, "batch_shuffle_buffer": 0, "order": "permutation",
    "epochs": None, "seed": 0, "rank": 0, "world_size": 1, "max_factor": 16, "max_bad_examples": 0,
    "drop_last": False, "sampler": None,
}  # fmt: skip


def check_workers(num_workers: Any) -> int:
    """How many threads; raises ValueError where there can't be as many."""
    number = whole("num_workers", num_workers, 0)
    if number > _MOST_WORKERS:
        raise ValueError(
            f"num_workers={number}: each is a thread, at most {_MOST_WORKERS}; one for each core, or some "
            "more for a store that answers slowly, is enough"
        )
    return number


def share(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This process's part of the data: by default torch.distributed's, else all of it.

    Raises:
        ValueError: there is no such rank.
    """
    if world_size is None:
        world_size = torch.distributed.get_world_size() if is_distributed() else 1
    if rank is None:
        rank = torch.distributed.get_rank() if is_distributed() else 0
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: must lie in [0, world_size={world_size})")
    return rank, world_size


def is_distributed() -> bool:
    """Whether torch.distributed has been initialised."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_still_alone() -> None:
    """Raises RuntimeError where there are several ranks by now, each with a loader that reads everything."""
    if is_distributed() and torch.distributed.get_world_size() > 1:
        raise RuntimeError(
            f"torch.distributed was initialised, with {torch.distributed.get_world_size()} ranks, after this "
            "EchoLoader had been made, so that each of them would read every example; make it after "
            "init_process_group, Accelerator() or fabric.launch(), with Lightning's Trainer in "
            "train_dataloader(), or give rank=0, world_size=1 where each rank is to read everything"
        )


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ValueError where a value is not among those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def whole(name: str, value: Any, least: int | None) -> int:
    """A whole number as Python's; raises ValueError where it is none, or less than it may be."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_) or (least is not None and number < least):
        bound = "" if least is None else f", at least {least}"
        raise ValueError(f"{name}={value!r}: must be a whole number{bound}")
    return number


def _plain_number(value: Any) -> Any:
    """A NumPy scalar, which a state can't hold, as Python's number."""
    return value.item() if isinstance(value, np.generic) else value
