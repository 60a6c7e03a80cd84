"""Kinds of sources: arrays in memory, map-style datasets and iterables."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from adaecho.echo.memory.pytree import Columns, flatten
from adaecho.echo.read.chunks import warn_caller
from adaecho.echo.read.data_loader import DataLoaderSource, is_keyed
from adaecho.echo.read.iterables import IterableSource, parts_of
from adaecho.echo.read.rows import ArraySource, MapSource, RandomReader
from adaecho.echo.read.sequential import SequentialReader

Source = ArraySource | MapSource | IterableSource
Reader = RandomReader | SequentialReader
"""Reads the fresh examples of one rank in serial order."""


def as_source(source: Any, seed: int = 0, *, batch_size: int | None = 1, world_size: int = 1) -> Source:
    """Wrap an object as a source.

    Args:
        source: the object as given.
        seed: seed for the samplers of a DataLoader.
        batch_size: None if the source yields whole batches.
        world_size: number of ranks among which whole batches should be sharded.

    Raises:
        ValueError: the object is empty, or neither indexable with a length nor iterable.
    """
    _check(source, batch_size)
    if batch_size is None:
        warn_if_unshared(source, world_size)
    if is_keyed(source):
        return DataLoaderSource(source, seed)
    if isinstance(source, IterableDataset):  # may have a length, and inherits a __getitem__ that raises
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
            f"source: a {type(source).__name__} is neither indexable with a length nor iterable; pass "
            "arrays, a dataset with __getitem__ and __len__, an iterable, or a function that returns one"
        )
    if not readable.length:
        raise ValueError("source: contains no examples (length 0)")
    return readable


def _check(source: Any, batch_size: int | None) -> None:
    """Raise ValueError for objects that are iterable or indexable but not a source of examples."""
    if isinstance(source, str | bytes):
        raise ValueError(
            f"source={source!r:.80}: a string is not a source of examples; open the file (numpy.load, a "
            "Dataset, TarShards(...) for urls and paths of tar archives), or pass a list of texts"
        )
    makes = getattr(source, "batch_size", None) or getattr(source, "batch_sampler", None)
    if (
        batch_size is not None
        and makes
        and (isinstance(source, DataLoader) or hasattr(source, "fresh_examples"))
    ):
        raise ValueError(
            f"batch_size={batch_size}: the source ({type(source).__name__}) makes batches, which would be "
            "batched again; pass batch_size=None, echo='batch' to repeat its batches, or its dataset: "
            "EchoLoader(data_loader.dataset, batch_size)"
        )
    of_columns = isinstance(source, dict) and source and 0 not in source and _as_arrays(source) is None
    if of_columns or (hasattr(source, "iloc") and hasattr(source, "columns")):
        raise ValueError(
            f"source: a {type(source).__name__} of columns or splits is not indexed by row; pass numeric "
            "arrays, {name: numpy.asarray(source[name]) for name in source}, one split, or a dataset whose "
            "__getitem__(row) returns one example"
        )


def _as_arrays(source: Any) -> Columns | None:
    """Return columns for arrays (alone, in a dict or in a tuple); None for other objects."""
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
            "source: one of these arrays is not numeric, or not in CPU memory; convert it, or pass a dataset "
            "whose __getitem__(row) returns one example"
        )
    return None if flat is None else Columns(*flat)


def warn_if_unshared(source: Any, world_size: int) -> None:
    """Warn if a source of whole batches does not declare that it is sharded: each rank would get all of them.

    A ``DistributedSampler``, ``set_share``, or a ``rank`` of the source or its ``settings`` declares it.
    """
    declared = hasattr(source, "set_share") or hasattr(getattr(source, "settings", source), "rank")
    if world_size == 1 or declared:
        return
    if not any(isinstance(part, DistributedSampler) and part.num_replicas > 1 for part in parts_of(source)):
        warn_caller(
            f"source: each of {world_size} ranks reads all batches of this {type(source).__name__}. If the "
            "source is sharded already, pass rank=0, world_size=1. Otherwise pass a DataLoader with "
            "sampler=DistributedSampler(dataset), or batches[rank::world_size], or the dataset itself: "
            "EchoLoader(dataset, batch_size) shards it"
        )
