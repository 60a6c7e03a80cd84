"""The door: what a source is. Arrays in memory, rows of anything indexable with a length, or a stream."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from adaecho.echo.memory.tree import Columns, flatten
from adaecho.echo.read.around import IterableSource, parts_of
from adaecho.echo.read.around.data_loader import DataLoaderSource, is_keyed
from adaecho.echo.read.failures import warn_caller
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
        _check_rows(source)
        readable = MapSource(source)
    elif isinstance(source, Iterable) or callable(source):
        return IterableSource(source)
    else:
        raise ValueError(
            f"source: a {type(source).__name__} is neither indexable with a length nor iterable; give "
            "arrays, a dataset with __getitem__ and __len__, an iterable, or a function that returns one"
        )
    if not readable.length:
        raise ValueError("source: it holds no examples (length 0)")
    return readable


def _check(source: Any, batch_size: int | None) -> None:
    """Raises ValueError for what can be iterated, or indexed, and is no source of what is asked for."""
    if isinstance(source, str | bytes):
        raise ValueError(
            f"source={source!r:.80}: text is no source of examples; open what it names (numpy.load, a "
            "Dataset, TarShards(...) for urls and paths of tar archives), or give a list of texts"
        )
    if isinstance(source, np.ndarray | torch.Tensor) and not source.ndim:
        raise ValueError(f"source: {source!r:.80} is one number, and no array of examples")
    if isinstance(source, list | tuple) and any(isinstance(part, DataLoader) for part in source):
        raise ValueError(
            f"source: a {type(source).__name__} of DataLoaders holds neither examples nor batches; give one, "
            "or a function that goes through them: lambda: itertools.chain(*loaders)"
        )
    if batch_size is None or not (isinstance(source, DataLoader) or hasattr(source, "fresh_examples")):
        return
    makes = getattr(source, "batch_size", None)  # of a DataLoader or an EchoLoader
    if makes is not None or getattr(source, "batch_sampler", None) is not None:
        raise ValueError(
            f"batch_size={batch_size}: the source ({type(source).__name__}) makes batches"
            f"{f' of {makes}' if makes else ''}, and these would be batched again; give batch_size=None, "
            "echo='batch' to repeat its batches, or its dataset: "
            f"EchoLoader(data_loader.dataset, {makes or batch_size})"
        )


def _check_rows(source: Any) -> None:
    """Raises ValueError for what is indexed by the names of its columns, or splits, and for a class."""
    if isinstance(source, type):
        raise ValueError(f"source: {source.__name__} is a class; give a dataset: {source.__name__}(...)")
    if isinstance(source, dict) and source and all(map(_is_dataset, source.values())):
        name = next(iter(source))
        raise ValueError(
            f"source: a {type(source).__name__} holds splits ({', '.join(map(str, source))}), not examples; "
            f"give one: source[{name!r}]"
        )
    of_columns = isinstance(source, dict) and len(source) > 0 and 0 not in source
    if of_columns or (hasattr(source, "iloc") and hasattr(source, "columns")):
        raise ValueError(
            f"source: a {type(source).__name__} is indexed by its columns, not by row; give arrays, "
            "{name: numpy.asarray(source[name]) for name in source}, or a dataset whose __getitem__(row) "
            "returns one example"
        )


def _is_dataset(value: Any) -> bool:
    """Whether a dict's value is a dataset by itself; a column of one has no columns."""
    return isinstance(value, Dataset | IterableDataset) or hasattr(value, "column_names")


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
    if flat is None and not of_dataset and isinstance(columns, dict | tuple):
        raise _no_rows(fields)
    return None if flat is None else Columns(*flat)


def _no_rows(fields: dict[Any, Any]) -> ValueError:
    name, field = next((name, field) for name, field in fields.items() if flatten(field) is None)
    where = f" on {field.device}" if isinstance(field, torch.Tensor) else ""
    return ValueError(
        f"source: field {name!r}, {field.dtype}{where}, is no numeric array in memory; convert it, or give a "
        "dataset whose __getitem__(row) returns one example"
    )


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
