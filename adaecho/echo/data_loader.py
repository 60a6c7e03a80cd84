"""What EchoLoader answers to arguments and attributes of ``torch.utils.data.DataLoader``."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from adaecho.echo.gauges import Gauges

Collate = Callable[[list[Any]], Any]

# Of each argument that has no meaning here: the values that ask for nothing, and what to do for the others.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "batch_sampler": (
        (None,),
        "batches are made after the echo; give batch_size=, drop_last= and sampler=, or keep the DataLoader "
        "that has it: EchoLoader(data_loader, batch_size=None, echo='batch')",
    ),
    "generator": ((None,), "all randomness follows seed=; give seed=generator.initial_seed()"),
    "in_order": ((True,), "batches always come in order, which makes a resume exact; leave it out"),
    "multiprocessing_context": ((None, ""), "workers are threads; leave it out"),
    "pin_memory": ((False,), "device='cuda' pins batches and copies them beside the step; leave this out"),
    "pin_memory_device": (("",), "device= says where batches are copied to; leave this out"),
    "timeout": ((0,), "a thread can't be cut off; give the source its time limit (TarShards: retries=)"),
    "worker_init_fn": (
        (None,),
        "workers are threads, and randomness is keyed by example: open files in the dataset, draw with "
        "augment(example, rng)",
    ),
}
# Those of DataLoader's arguments that are taken; threads that end or persist are the same.
_TAKEN = ("shuffle", "collate_fn", "prefetch_factor", "persistent_workers")
NO_SOURCE = object()
# Attributes of a DataLoader that have no counterpart.
_ABSENT = {
    "sampler": "order= and the ranks decide what comes next; loader.set_epoch(n) goes to an iteration",
    "batch_sampler": "batches are made after the echo; see batch_size and drop_last",
    "collate_fn": "its argument is collate=",
    "generator": "all randomness follows seed=",
    "worker_init_fn": "workers are threads",
    "prefetch_factor": "its argument is prefetch=, in batches",
    "persistent_workers": "workers are threads, which cost nothing to start again",
    "pin_memory": "device= says where batches are copied to",
    "timeout": "the source has a time limit of its own",
    "multiprocessing_context": "workers are threads",
}


def source_of(source: Any, given: dict[str, Any]) -> Any:
    """The source, which may have been given under a DataLoader's name for it; takes that out of ``given``.

    Raises:
        TypeError: there is none, or there are two.
    """
    dataset = given.pop("dataset", NO_SOURCE)
    if source is not NO_SOURCE and dataset is not NO_SOURCE:
        raise TypeError("dataset= with source: they are the same argument; give one")
    if source is NO_SOURCE and dataset is NO_SOURCE:
        raise TypeError("EchoLoader needs a source of examples: EchoLoader(dataset, batch_size)")
    return dataset if source is NO_SOURCE else source


def translated(
    given: dict[str, Any],
    *,
    order: str,
    collate: Collate | None,
    prefetch: int,
    num_workers: int,
    shuffle_buffer: int,
    names: Iterable[str],
) -> tuple[str, Collate | None, int]:
    """``order``, ``collate`` and ``prefetch`` where a DataLoader's arguments may ask for others.

    Args:
        given: arguments beyond EchoLoader's own.
        order, collate, prefetch, num_workers, shuffle_buffer: of the EchoLoader.
        names: of its own arguments.

    Raises:
        ValueError: one has no meaning here, or contradicts another; the message says what replaces it.
        TypeError: neither has such an argument.
    """
    for name, value in given.items():
        if name not in _TAKEN and name not in _REFUSED:
            raise TypeError(
                f"EchoLoader has no argument {name!r}{_similar(name, [*names, *_TAKEN, *_REFUSED])}"
            )
        if name in _REFUSED and not any(
            value is nothing or value == nothing for nothing in _REFUSED[name][0]
        ):
            raise ValueError(f"{name}={_shown(value)}: {_REFUSED[name][1]}")
    collate_fn = given.get("collate_fn")
    if collate_fn is not None and collate is not None:
        raise ValueError("collate_fn with collate: they are the same argument; give one")
    factor = given.get("prefetch_factor")
    if factor is not None and not num_workers:
        raise ValueError(f"prefetch_factor={factor}: with num_workers=0 nothing is read ahead")
    prefetch = prefetch if factor is None else factor * num_workers
    return _order(given.get("shuffle"), order, shuffle_buffer), collate or collate_fn, prefetch


def _order(shuffle: bool | None, order: str, shuffle_buffer: int) -> str:
    if shuffle is None:
        return order
    if bool(shuffle) != (order != "stored") and order != "permutation":
        raise ValueError(f"shuffle={shuffle} with order={order!r}: they contradict each other; give one")
    if not shuffle and shuffle_buffer:
        raise ValueError(
            f"shuffle=False with shuffle_buffer={shuffle_buffer}: a shuffle buffer shuffles; leave one out "
            "(order='stored' says that the source's own order goes into the buffer)"
        )
    return order if shuffle else "stored"


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__


def _similar(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def absent(name: str) -> str:
    """The message for an attribute that an EchoLoader lacks."""
    why = f": {_ABSENT[name]}" if name in _ABSENT else ""
    return f"an EchoLoader has no attribute {name!r}{why}"


def check_source(source: Any, batch_size: int | None) -> None:
    """Raises ValueError for what can be iterated and is no source of examples."""
    if isinstance(source, str | bytes):
        raise ValueError(
            f"source={source!r:.80}: text is no source of examples; open what it names (numpy.load, a "
            "Dataset, TarShards(...) for urls and paths of tar archives), or give a list of texts"
        )
    if batch_size is None or not isinstance(source, DataLoader | Gauges):  # Gauges: an EchoLoader
        return
    makes = getattr(source, "batch_size", None)
    if makes is not None or getattr(source, "batch_sampler", None) is not None:
        raise ValueError(
            f"batch_size={batch_size}: the source ({type(source).__name__}) makes batches"
            f"{f' of {makes}' if makes else ''}, and these would be batched again; give batch_size=None, "
            "echo='batch' to repeat its batches, or its dataset: "
            f"EchoLoader(data_loader.dataset, {makes or batch_size})"
        )


def check_sampler(sampler: Any, *, order: str, shuffle: Any, batch_size: int | None, world_size: int) -> None:
    """Raises ValueError where a sampler can't decide the order."""
    if sampler is None:
        return
    kind = f"sampler={type(sampler).__name__}"
    if batch_size is None:
        raise ValueError(f"{kind} with batch_size=None: give it to the maker of the whole batches")
    if shuffle or order != "permutation":
        other = f"shuffle={shuffle}" if shuffle else f"order={order!r}"
        raise ValueError(f"{kind} with {other}: both decide the order; leave one out")
    if not hasattr(sampler, "__len__"):
        raise ValueError(f"{kind}: it has no length, and passes need one; give it a __len__")
    if isinstance(sampler, DistributedSampler) and world_size > 1:
        raise ValueError(
            f"{kind} with world_size={world_size}: EchoLoader shares out the examples among the ranks "
            "itself; leave the sampler out (or give rank=0, world_size=1 to share by it alone)"
        )


def check_iterable(name: str, *, shuffle: Any, sampler: Any) -> None:
    """Raises ValueError where an order was given for what can only be iterated."""
    if shuffle or sampler is not None:
        given = "shuffle=True" if shuffle else f"sampler={type(sampler).__name__}"
        raise ValueError(
            f"{given}: {name} can only be iterated, in an order of its own; shuffle_buffer= shuffles examples"
        )
