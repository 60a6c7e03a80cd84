"""Whether several ranks share out what another loader gives, as far as can be seen from outside."""

import inspect
import re
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from adaecho.echo.read.access import warn_caller
from adaecho.echo.read.wrapped import parts_of

# By name: torchdata's are no subclasses of torch's.
_SHARE_NOTHING = {"RandomSampler", "SequentialSampler", "WeightedRandomSampler", "BatchSampler"}
_SHARE_NOTHING_IF_WHOLE = {"SubsetRandomSampler", "list", "tuple", "range"}  # else maybe the rows of a rank

# What each library has for it.
_REMEDIES = {
    "datasets": "datasets.distributed.split_dataset_by_node(dataset, rank, world_size) gives each its part",
    "grain": "dataset[rank::world_size] of a MapDataset, or shard_options=ShardOptions(rank, world_size) of "
    "a DataLoader's sampler, gives each its part",
    "torchdata": "a DistributedSampler in its SamplerWrapper, or every world_size-th example from the "
    "rank-th on, gives each its part",
    "webdataset": "nodesplitter=webdataset.split_by_node gives each its part",
    "torch": "an __iter__ that gives every world_size-th example from the rank-th on, beside what it does "
    "with get_worker_info(), gives each its part",
}
_REMEDY_OF_OTHERS = "every world_size-th batch from the rank-th on gives each its part"
_SIGNS = re.compile(
    r"(^|_)(rank|world|world_?size|num_replicas|process_(index|count)|num_processes|shard_(id|index))($|_)",
    re.IGNORECASE,
)
_PLAIN = (str, bytes, int, float, type, type(None), ModuleType)
_MOST_PARTS, _MOST_ITEMS = 2000, 64  # to look at, of a source and of each list in it


def warn_if_unshared(source: Any, world_size: int) -> bool:
    """Warn where each of several ranks reads everything of a loader; whether it did."""
    if world_size == 1:
        return False
    told = _unshared_rows(source) if _is_of_rows(source) else _unshared_stream(source)
    if not told:
        return False
    warn_caller(
        f"source: each of {world_size} ranks reads all examples of this {type(source).__name__}, in the same "
        f"order: {told}; where what it reads is one rank's part already, rank=0, world_size=1 says so"
    )
    return True


def warn_if_shared_twice(source: Any, world_size: int) -> None:
    """Warn where each of several ranks gets its part of the part that a stream gives it already."""
    if world_size > 1 and not hasattr(source, "set_share") and any(map(_splits, _all_parts(source))):
        warn_caller(
            f"source: this {type(source).__name__} gives each rank a part of its own already, of which this "
            f"loader gives each of {world_size} ranks a part again, so that most examples never come; give "
            "rank=0, world_size=1, or leave the splitting to this loader"
        )


def _is_of_rows(part: Any) -> bool:
    """Whether it is a DataLoader of a map-style dataset."""
    return isinstance(part, DataLoader) and not isinstance(part.dataset, IterableDataset)


def _unshared_rows(loader: DataLoader[Any]) -> str:
    """What to say of a DataLoader of a map-style dataset that shares out nothing."""
    rows = len(loader.dataset)  # type: ignore[arg-type]
    if any(_shares_out(sampler, rows) for sampler in parts_of(loader)[2:] if sampler is not None):
        return ""
    given = loader.batch_sampler if loader.batch_size is None else None
    sampler = type(loader.sampler if given is None else given).__name__
    shared = "sampler=DistributedSampler(dataset)"
    if given is not None:
        shared = "batch_sampler=BatchSampler(DistributedSampler(dataset), batch_size, drop_last)"
    return (
        f"its {sampler} shares out nothing. Give it {shared}, which is told each pass; or give its dataset "
        "itself, EchoLoader(dataset, batch_size), which shares out"
    )


def _shares_out(sampler: Any, rows: int) -> bool:
    """Whether a sampler may give each rank a part of its own."""
    kind = type(sampler)
    if not kind.__module__.startswith(("torch.", "torchdata.", "builtins")):
        return True
    if getattr(sampler, "num_replicas", None) == 1:
        return False
    if kind.__name__ in _SHARE_NOTHING_IF_WHOLE:
        return len(sampler) < rows
    return kind.__name__ not in _SHARE_NOTHING


def _unshared_stream(source: Any) -> str:
    """What to say of a list, or anything else that can only be iterated, in which no part knows of ranks."""
    if isinstance(source, list | tuple):
        return "nothing shares it out; source[rank::world_size] gives each its part"
    parts = list(_all_parts(source))
    if any(map(_knows_ranks, parts)):
        return ""
    for part in filter(_is_of_rows, parts):
        return _unshared_rows(part)
    within = source.dataset if isinstance(source, DataLoader) else source
    libraries = [kind.__module__.partition(".")[0] for kind in type(within).__mro__]
    remedy = next((_REMEDIES[name] for name in libraries if name in _REMEDIES), _REMEDY_OF_OTHERS)
    return f"nothing in it is seen to share out; {remedy}"


def _knows_ranks(part: Any) -> bool:
    """Whether a part of a source shares out, or is of the user's own and mentions ranks."""
    function = hasattr(part, "__code__")
    if _library_of(part if function else type(part)) is not None:
        # What webdataset has by default refuses several ranks itself.
        return _splits(part) or (function and str(part.__name__) == "single_node_only")
    functions = [part] if function else _methods(type(part))
    names = [*getattr(part, "__dict__", ()), *(name for each in functions for name in _names(each.__code__))]
    return any(map(_SIGNS.search, names))


def _splits(part: Any) -> bool:
    """Whether a part of a library's gives each rank a part of its own."""
    if hasattr(part, "__code__"):
        return str(part.__name__) == "split_by_node"  # of webdataset
    attributes = getattr(part, "__dict__", {})
    counts = [attributes.get("shard_count"), attributes.get("num_replicas")]
    return (
        type(part).__name__ == "SliceMapDataset"  # Grain's dataset[rank::world_size]
        or attributes.get("_distributed") is not None  # of Hugging Face's split_dataset_by_node
        or any(isinstance(count, int) and count > 1 for count in counts)
    )


def _library_of(value: Any) -> str | None:
    root = (getattr(value, "__module__", None) or "").partition(".")[0]
    return root if root in _REMEDIES or root in ("builtins", "numpy") else None


def _methods(kind: type) -> list[Any]:
    """The functions of a class, without those that it inherits from a library."""
    own = [vars(base).values() for base in kind.__mro__ if _library_of(base) is None]
    return [function for functions in own for function in functions if hasattr(function, "__code__")]


def _names(code: Any) -> Iterator[str]:
    """What code names: variables, attributes, environment variables, also in functions within."""
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif hasattr(constant, "co_names"):
            yield from _names(constant)


def _all_parts(source: Any) -> Iterator[Any]:
    """A source, and what lies within it."""
    waiting, seen = [source], {id(source)}
    while waiting and len(seen) < _MOST_PARTS:
        part = waiting.pop(0)
        yield part
        for inner in _inner(part):
            if id(inner) not in seen and not isinstance(inner, _PLAIN):
                seen.add(id(inner))
                waiting.append(inner)


def _inner(part: Any) -> list[Any]:
    if isinstance(part, dict):
        return list(part.values())[:_MOST_ITEMS]
    if isinstance(part, list | tuple):
        return list(part[:_MOST_ITEMS])
    if isinstance(part, partial):
        return [part.func, *part.args, *part.keywords.values()]
    if isinstance(part, MethodType):
        return [part.__self__, part.__func__]
    if isinstance(part, FunctionType):
        used = inspect.getclosurevars(part)
        return [*used.nonlocals.values(), *used.globals.values()]
    return list(getattr(part, "__dict__", {}).values())
