"""Wrap the source that the user passed: arrays, a map-style dataset or an iterable."""

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
"""An object that reads the fresh examples of one rank in the order of their serial numbers."""


def as_source(source: Any, seed: int = 0, *, batch_size: int | None = 1, world_size: int = 1) -> Source:
    """Wrap the user's arrays, dataset, DataLoader or iterable in the source class for its type."""
    _check(source, batch_size)
    if batch_size is None:  # the source yields whole batches
        warn_if_unshared(source, world_size)
    if is_keyed(source):
        return DataLoaderSource(source, seed)  # the seed makes its epochs reproducible
    if isinstance(source, IterableDataset):  # it inherits a __getitem__ that only raises
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
    """Raise ValueError for a string, a table of columns, or a loader whose batches would be batched again."""
    if isinstance(source, str | bytes):
        raise ValueError(
            f"source={source!r:.80}: a string is not a source of examples; open the file (numpy.load, a "
            "Dataset, TarShards(...) for URLs and paths of tar archives), or pass a list of texts"
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
    """Return ``Columns`` if the source consists of arrays or tensors, otherwise None.

    Raises:
        ValueError: the arrays differ in length, or a tuple contains a non-numeric array or a GPU tensor.
    """
    # A subclass is not unpacked, because it may have its own __getitem__.
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
    if flat is None and isinstance(source, tuple):  # each field would otherwise become an example
        raise ValueError(
            "source: one of these arrays is not numeric, or not in CPU memory; convert it, or pass a dataset "
            "whose __getitem__(row) returns one example"
        )
    return None if flat is None else Columns(*flat)


def warn_if_unshared(source: Any, world_size: int) -> None:
    """Warn if every rank seems to read all batches of the source, instead of only its share."""
    declared = hasattr(source, "set_share") or hasattr(getattr(source, "settings", source), "rank")
    if world_size == 1 or declared:
        return
    if not any(isinstance(part, DistributedSampler) and part.num_replicas > 1 for part in parts_of(source)):
        warn_caller(
            f"source: each of {world_size} ranks reads all batches of this {type(source).__name__}. If the "
            "source is already sharded, pass rank=0, world_size=1. Otherwise pass a DataLoader with "
            "sampler=DistributedSampler(dataset), or batches[rank::world_size], or the dataset itself: "
            "EchoLoader(dataset, batch_size) shards it"
        )
