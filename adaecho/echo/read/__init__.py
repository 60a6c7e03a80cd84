"""The door: what a source is. Arrays in memory, rows of anything indexable with a length, or a stream."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from adaecho.echo.memory.pytree import Columns, flatten
from adaecho.echo.read.chunks import warn_caller
from adaecho.echo.read.data_loader import DataLoaderSource, is_keyed
from adaecho.echo.read.iterables import IterableSource, parts_of
from adaecho.echo.read.rows import ArraySource, MapSource

Source = ArraySource | MapSource | IterableSource


def as_source(source: Any, seed: int = 0, *, batch_size: int | None = 1, world_size: int = 1) -> Source:
    """What kind of source an object is, asked once: the rest of the loader asks what this returns.

    Args:
        source: as it was given.
        seed: of what another loader draws.
        batch_size: None where the source gives whole batches.
        world_size: ranks among which these are to have been shared out.

    Raises:
        ValueError: it is neither indexable with a length nor iterable, or is empty.
    """
    _check(source, batch_size)
    if batch_size is None:
        warn_if_unshared(source, world_size)
    if is_keyed(source):
        return DataLoaderSource(source, seed)
    if isinstance(source, IterableDataset):  # it may tell a length, and inherits a __getitem__ that raises
        return IterableSource(source)
    arrays = _as_arrays(source)
    readable: ArraySource | MapSource
    if arrays is not None:
        readable = ArraySource(arrays)
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        readable = MapSource(source)
    elif isinstance(source, Iterable) or callable(source):
        return IterableSource(source)
    else:
        raise ValueError(
            f"source: a {type(source).__name__} is neither indexable with a length nor iterable; give "
            "arrays, a dataset with __getitem__ and __len__, an iterable, or a function that returns one"
        )
    if not readable.length:
        raise ValueError("source: contains no examples (length 0)")
    return readable


def _check(source: Any, batch_size: int | None) -> None:
    """Raises ValueError for what can be iterated, or indexed, and is no source of what is asked for."""
    if isinstance(source, str | bytes):
        raise ValueError(
            f"source={source!r:.80}: text is no source of examples; open what it names (numpy.load, a "
            "Dataset, TarShards(...) for urls and paths of tar archives), or give a list of texts"
        )
    makes = getattr(source, "batch_size", None) or getattr(source, "batch_sampler", None)
    if (
        batch_size is not None
        and makes
        and (isinstance(source, DataLoader) or hasattr(source, "fresh_examples"))
    ):
        raise ValueError(
            f"batch_size={batch_size}: the source ({type(source).__name__}) makes batches, and these would "
            "be batched again; give batch_size=None, echo='batch' to repeat its batches, or its dataset: "
            "EchoLoader(data_loader.dataset, batch_size)"
        )
    of_columns = isinstance(source, dict) and source and 0 not in source and _as_arrays(source) is None
    if of_columns or (hasattr(source, "iloc") and hasattr(source, "columns")):
        raise ValueError(
            f"source: a {type(source).__name__} of columns or splits is not indexed by row; give numeric "
            "arrays, {name: numpy.asarray(source[name]) for name in source}, one split, or a dataset whose "
            "__getitem__(row) returns one example"
        )


def _as_arrays(source: Any) -> Columns | None:
    """Columns of arrays, alone, in a dict or in a tuple; None of anything else."""
    # A subclass, or another dataset with tensors, has its own __getitem__.
    of_dataset = type(source) is TensorDataset
    columns = source.tensors if of_dataset else source
    in_turn = columns if isinstance(columns, tuple) else (columns,)
    fields = columns if isinstance(columns, dict) else dict(enumerate(in_turn))
    arrays = [
        field for field in fields.values() if isinstance(field, np.ndarray | torch.Tensor) and field.ndim
    ]
    if not arrays or len(arrays) < len(fields):
        return None
    if len(set(map(len, arrays))) > 1:
        lengths = ", ".join(str(len(field)) for field in arrays)
        raise ValueError(f"source: arrays of different lengths ({lengths}) are not fields of one dataset")
    flat = flatten(columns)
    if flat is None and isinstance(source, tuple):  # which would be a dataset of as many examples as fields
        raise ValueError(
            "source: one of these arrays is not numeric, or not in memory; convert it, or give a dataset "
            "whose __getitem__(row) returns one example"
        )
    return None if flat is None else Columns(*flat)


def warn_if_unshared(source: Any, world_size: int) -> None:
    """Warn where whole batches are not declared to be one rank's part, as each rank gets all of them.

    A ``DistributedSampler`` declares it, ``set_share``, and a ``rank`` of its own or of its ``settings``.
    """
    declared = hasattr(source, "set_share") or hasattr(getattr(source, "settings", source), "rank")
    if world_size == 1 or declared:
        return
    if not any(isinstance(part, DistributedSampler) and part.num_replicas > 1 for part in parts_of(source)):
        warn_caller(
            f"source: each of {world_size} ranks takes all batches of this {type(source).__name__}. Where "
            "these are one rank's part already, say so with rank=0, world_size=1; else let a DataLoader's "
            "sampler=DistributedSampler(dataset) share out, or give batches[rank::world_size], or the "
            "dataset itself, which EchoLoader(dataset, batch_size) shares out"
        )
