"""What EchoLoader answers to arguments of ``torch.utils.data.DataLoader``."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import DistributedSampler

from adaecho.echo.read.around.iterable import IterableSource
from adaecho.echo.read.sources import Source
from adaecho.echo.settings import whole

Collate = Callable[[list[Any]], Any]

# Arguments of a DataLoader that have no meaning here, unless they ask for nothing: what to do instead.
_REMEDIES = {
    "batch_sampler": "batches are made after the echo; give batch_size=, drop_last= and sampler=, or keep "
    "the DataLoader that has it: EchoLoader(data_loader, batch_size=None, echo='batch')",
    "generator": "all randomness follows seed=; give seed=generator.initial_seed()",
    "in_order": "batches always come in order, which makes a resume exact; leave it out",
    "multiprocessing_context": "workers are threads; leave it out",
    "pin_memory": "device='cuda' pins batches and copies them beside the step; leave this out",
    "pin_memory_device": "device= says where batches are copied to; leave this out",
    "timeout": "a thread can't be cut off; give the source its time limit (TarShards: retries=)",
    "worker_init_fn": "workers are threads, and randomness is keyed by example: open files in the dataset, "
    "draw with augment(example, rng)",
}
# Those that are taken; threads that end or persist are the same.
_TAKEN = ("shuffle", "collate_fn", "prefetch_factor", "persistent_workers")
NO_SOURCE = object()


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
) -> tuple[str, Collate | None, int]:
    """``order``, ``collate`` and ``prefetch`` where a DataLoader's arguments may ask for others.

    Args:
        given: arguments beyond EchoLoader's own.
        order, collate, prefetch, num_workers, shuffle_buffer: of the EchoLoader.

    Raises:
        ValueError: one has no meaning here, or contradicts another; the message says what replaces it.
        TypeError: neither has such an argument.
    """
    for name, value in given.items():
        if name not in _TAKEN and name not in _REMEDIES:
            raise TypeError(f"EchoLoader has no argument {name!r}, nor has a DataLoader")
        if name in _REMEDIES and bool(value) != (name == "in_order"):
            raise ValueError(f"{name}={_shown(value)}: {_REMEDIES[name]}")
    collate_fn = given.get("collate_fn")
    if collate_fn is not None and collate is not None:
        raise ValueError("collate_fn with collate: they are the same argument; give one")
    prefetch, factor = whole("prefetch", prefetch, 0), given.get("prefetch_factor")
    if factor is not None and not num_workers:
        raise ValueError(f"prefetch_factor={factor}: with num_workers=0 nothing is read ahead")
    if factor is not None:
        prefetch = whole("prefetch", factor * num_workers, 0)
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


def check_iterable(source: Source, *, shuffle: Any, sampler: Any) -> None:
    """Raises ValueError where an order was given for what can only be iterated."""
    if isinstance(source, IterableSource) and (shuffle or sampler is not None):
        given = "shuffle=True" if shuffle else f"sampler={type(sampler).__name__}"
        raise ValueError(
            f"{given}: {source.name} can only be iterated, in an order of its own; shuffle_buffer= shuffles "
            "examples"
        )
