"""The arguments of EchoLoader and their checks."""

import operator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from adaecho.echo.order.permutation import Permutation, SampledOrder
from adaecho.echo.read import Source
from adaecho.echo.read.chunks import warn_caller
from adaecho.echo.read.iterables import IterableSource
from adaecho.echo.read.rows import ArraySource, MapSource
from adaecho.echo.variants import ORDERS, VARIANTS, Variant, check_factor

# Settings that may differ from those in a loaded state: those in the first list always, and those in the
# second only between iterations, when the buffers are empty.
_MAY_CHANGE = ("factor", "max_factor", "max_bad_examples")
_OF_WHAT_IS_HELD = (
    "batch_size", "echo", "shuffle_buffer", "batch_shuffle_buffer", "rank", "world_size", "drop_last",
)  # fmt: skip
# The integer settings, with the smallest allowed value of each.
_WHOLE = {
    "batch_size": 1, "shuffle_buffer": 0, "batch_shuffle_buffer": 0, "epochs": 1, "seed": None, "rank": 0,
    "world_size": 1, "max_bad_examples": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The settings of a loader that determine its batches.

    The fields are the arguments of ``EchoLoader`` with the same names.

    Raises:
        ValueError: a value is invalid.
    """

    batch_size: int | None
    echo: str = "none"
    factor: float | str = 1.0
    shuffle_buffer: int = 0
    batch_shuffle_buffer: int = 0
    order: str = "permutation"
    epochs: int | None = None
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    max_factor: float = 16
    max_bad_examples: int = 0
    drop_last: bool = False
    sampler: Any = None  # stored as the class name and length, which a state can hold

    def __post_init__(self) -> None:
        one_of("echo", self.echo, tuple(VARIANTS))
        one_of("order", self.order, ORDERS)
        for name, least in _WHOLE.items():
            if getattr(self, name) is not None or name not in ("batch_size", "epochs"):
                self._set(name, whole(name, getattr(self, name), least))
        wrong = {
            "echo": not self.variant.batches_upstream, "shuffle_buffer": self.shuffle_buffer,
            "order": self.order == "shards", "drop_last": self.drop_last, "sampler": self.sampler is not None,
        }  # fmt: skip
        for name in (name for name in wrong if wrong[name] and self.batch_size is None):
            refuse_with_whole_batches(f"{name}={getattr(self, name)!r:.80}")
        if self.sampler is not None:
            self._check_sampler()
        check_factor(self.variant, self.factor, self.max_factor, self.batch_shuffle_buffer)
        for name in ("factor", "max_factor"):  # converted to types that a state can store
            value = getattr(self, name)
            self._set(name, value if isinstance(value, str | int) else float(value))
        if self.epochs is not None and self.world_size > 1:
            self._check_even_ranks()
        if self.variant.repeats and self.factor == 1:
            warn_caller(f"echo={self.echo!r} with factor=1 repeats nothing; pass factor=2, or leave out echo")
        if self.variant.repeats == "examples" and self.factor != 1 and not self.shuffle_buffer:
            warn_caller(
                f"echo={self.echo!r} with shuffle_buffer=0: all repeats of an example follow one another, "
                "mostly in one batch; pass shuffle_buffer=, many times batch_size, to spread them"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_sampler(self) -> None:
        kind, order, world_size = type(self.sampler).__name__, self.order, self.world_size
        sampler = f"sampler={kind}"
        refuse(
            order != "permutation",
            f"{sampler} with order={order!r}: both set the order; leave out one of them",
        )
        refuse(not hasattr(self.sampler, "__len__"), f"{sampler}: the sampler has no length; add __len__")
        refuse(
            isinstance(self.sampler, DistributedSampler) and world_size > 1,
            f"{sampler} with world_size={world_size}: EchoLoader itself shards the examples; leave out the "
            "sampler (or pass rank=0, world_size=1 to shard by the sampler alone)",
        )
        self._set("sampler", f"{kind} of {len(self.sampler)}")

    def _check_even_ranks(self) -> None:
        """Raise ValueError if the ranks could make unequal numbers of batches."""
        # The ranks average gradients at every step, so a rank with more batches would wait forever.
        passes = f"epochs={self.epochs} and world_size={self.world_size}"
        count = "leave out epochs= and count steps: islice(loader, num_steps)"
        refuse(
            self.factor == "auto",
            f"factor='auto' with {passes}: each rank follows its own R and would make a different number of "
            f"batches; pass a number, or {count}",
        )
        refuse(
            self.max_bad_examples,
            f"max_bad_examples={self.max_bad_examples} with {passes}: a rank that skips an example would "
            f"make fewer batches than the others; return a substitute from decode, or {count}",
        )

    def check_source(self, source: Source, shuffle: Any) -> None:
        """Raise ValueError if the loader's arguments cannot be used with its source.

        Args:
            shuffle: value of the DataLoader argument ``shuffle``; None if it was not passed.
        """
        if isinstance(source, IterableSource):
            self._check_can_iterate(source, shuffle)
        refuse(
            self.batch_size is None and isinstance(source, ArraySource),
            "batch_size=None: arrays hold examples, not batches; pass a batch_size",
        )

    def _check_can_iterate(self, source: IterableSource, shuffle: Any) -> None:
        """Raise ValueError if an iterable cannot provide the requested order or equal batch counts."""
        ordered = shuffle or self.sampler is not None or (self.order == "shards" and not source.reordered)
        refuse(
            ordered,
            f"shuffle=, sampler= or order=: {source.name} is an iterable with its own order; leave them out, "
            "and pass shuffle_buffer=, which shuffles examples",
        )
        refuse(
            self.epochs is not None and self.world_size > 1 and self.batch_size is not None,
            f"epochs={self.epochs} with world_size={self.world_size}: {source.name} is an iterable, so ranks "
            "may make unequal numbers of batches and wait for each other forever; leave out epochs= and "
            "count steps (islice(loader, num_steps)), or pass a source with a length, or shard the iterable "
            "yourself with rank=0, world_size=1",
        )

    @property
    def variant(self) -> Variant:
        """The echoing variant selected by ``echo``."""
        return VARIANTS[self.echo]

    @property
    def first_factor(self) -> float:
        """The echoing factor at the start; 1 for ``factor="auto"``, because R has not been measured yet."""
        return 1.0 if self.factor == "auto" else float(self.factor)

    def plain(self) -> dict[str, Any]:
        """Return the settings as a dict of numbers and strings, which a state can store."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        """Return the settings that differ from their defaults, as ``name=value``."""
        changed = [field for field in fields(self) if getattr(self, field.name) != field.default]
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in changed)

    @property
    def to_fill(self) -> dict[str, float]:
        """Approximate number of fresh examples (or whole batches) that fill each buffer, by argument name."""
        # In a buffer after the echo, repeats also occupy slots, so fewer fresh examples fill the buffer.
        of_examples = self.first_factor if self.variant.repeats == "examples" else 1.0
        return {
            "shuffle_buffer": self.shuffle_buffer / of_examples,
            "batch_shuffle_buffer": self.batch_shuffle_buffer * (self.batch_size or 1) / self.first_factor,
        }

    def check_same(self, saved: dict[str, Any], *, in_pass: bool) -> None:
        """Raise ValueError if a state was saved by a loader with incompatible settings."""
        # ``in_pass`` is whether the state was saved within an iteration. Between iterations the buffers are
        # empty, so the settings in _OF_WHAT_IS_HELD may also differ.
        for name, value in self.plain().items():
            if name in _MAY_CHANGE or (not in_pass and name in _OF_WHAT_IS_HELD):
                continue
            remedy = "create the loader with the arguments of the saved one"
            if name in ("rank", "world_size"):
                remedy = (
                    "within an iteration each rank resumes from its own state, with the same number of "
                    "ranks; save one state per rank, or pass state_of_all_ranks=True if one rank saves all"
                )
            was = saved.get(name)
            refuse(was != value, f"load_state_dict: {name} was {was!r} and is now {value!r}; {remedy}")


def refuse_with_whole_batches(argument: str) -> None:
    """Raise ValueError for an argument that cannot be used if the source yields whole batches."""
    raise ValueError(
        f"{argument} with batch_size=None: the source yields whole batches, with which only echo='batch' and "
        "batch_shuffle_buffer= work; do this in the source, or pass a source of examples and a batch_size"
    )


def refuse(wrong: Any, message: str) -> None:
    """Raise ValueError with ``message`` if ``wrong`` is true."""
    if wrong:
        raise ValueError(message)


def order_of(source: ArraySource | MapSource, settings: Settings, sampler: Any) -> Permutation:
    """Return the order in which a source's rows are read, which follows ``sampler`` unless it is None."""
    shard_lengths = getattr(source, "shard_lengths", None)
    if settings.order == "shards" and shard_lengths is None:
        raise ValueError("order='shards': this source has no shard_lengths; use permutation or sequential")
    whole = settings.batch_size is None
    passes: dict[str, Any] = {
        "passes": settings.epochs, "world": 1 if whole else settings.world_size,
        "drop_last": settings.drop_last,
    }  # fmt: skip
    if sampler is not None:
        return SampledOrder(sampler, source.length, settings.seed, **passes)
    order = "sequential" if whole else settings.order
    return Permutation(source.length, order, settings.seed, shard_lengths, **passes)


def share(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this process's rank and the number of ranks, by default those of torch.distributed."""
    if world_size is None:
        world_size = torch.distributed.get_world_size() if is_distributed() else 1
    if rank is None:
        rank = torch.distributed.get_rank() if is_distributed() else 0
    refuse(not 0 <= rank < world_size, f"rank={rank}: must lie in [0, world_size={world_size})")
    return rank, world_size


def is_distributed() -> bool:
    """Return whether torch.distributed has been initialized."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_still_alone() -> None:
    """Raise RuntimeError if torch.distributed has several ranks, but the loader was created for one."""
    if is_distributed() and torch.distributed.get_world_size() > 1:
        raise RuntimeError(
            "this EchoLoader was created before torch.distributed was initialized, so every rank would read "
            "all examples; create it after init_process_group, Accelerator() or fabric.launch(), or in "
            "Lightning's train_dataloader(), or pass rank=0, world_size=1 if every rank should read all"
        )


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError if the value of argument ``name`` is not one of the allowed strings."""
    refuse(value not in allowed, f"{name}={value!r}: must be one of {', '.join(allowed)}")


def whole(name: str, value: Any, least: int | None) -> int:
    """Return ``value`` as an int, or raise ValueError if it is not an integer of at least ``least``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_) or (least is not None and number < least):
        bound = "" if least is None else f", at least {least}"
        raise ValueError(f"{name}={value!r}: must be an integer{bound}")
    return number


# The DataLoader arguments that EchoLoader itself lacks, each with the replacement that the error message
# names. None marks an argument that is accepted.
_REMEDIES = {
    "shuffle": None,
    "collate_fn": None,
    "prefetch_factor": None,
    "persistent_workers": None,  # accepted without effect
    "batch_sampler": "the loader makes batches after the echo; pass batch_size=, drop_last= and sampler=, or "
    "wrap the DataLoader: EchoLoader(data_loader, batch_size=None, echo='batch')",
    "generator": "seed= determines all randomness; pass seed=generator.initial_seed()",
    "in_order": "batches always come in order, which makes a resume exact; leave this out",
    "multiprocessing_context": "worker processes are forked; leave this out",
    "pin_memory": "device='cuda' pins batches and copies them during the step; leave this out",
    "pin_memory_device": "device= sets the device of batches; leave this out",
    "timeout": "set the time limit in the source (TarShards: retries=)",
    "worker_init_fn": "randomness is keyed by example; open files in the dataset at the first read, and draw "
    "random numbers in augment(example, rng)",
}


def order_asked_for(given: dict[str, Any], order: str, sampler: Any) -> str:
    """Reject unsupported DataLoader arguments, and return the reading order, which ``shuffle`` can change."""
    # ``given`` contains the keyword arguments that are not parameters of EchoLoader.
    for name, value in given.items():
        if name not in _REMEDIES:
            raise TypeError(f"EchoLoader and DataLoader have no argument {name!r}")
        asks = _REMEDIES[name] is not None and bool(value) != (name == "in_order")
        given_as = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
        refuse(asks, f"{name}={given_as}: {_REMEDIES[name]}")
    shuffle = given.get("shuffle")
    if shuffle is None:
        return order
    refuse(shuffle and sampler is not None, "shuffle=True with sampler=: both set the order; pass only one")
    # shuffle=False changes only the default order.
    return order if shuffle or order != "permutation" else "sequential"
