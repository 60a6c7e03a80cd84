"""Where examples come from: arrays in memory, anything indexable with a length, or anything that iterates."""

import copy
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from adaecho.echo.memory.tree import Columns, Rows, flatten
from adaecho.echo.read.access import warn_caller
from adaecho.echo.read.map_source import MapSource
from adaecho.echo.read.marks import OwnState
from adaecho.echo.read.wrapped import hears_of_passes, tell_pass

_OWN_STATES_APART = 16  # to tell one may take as long as to read an example

Position = tuple[int, ...] | OwnState


class ArraySource:
    """Arrays (or CPU tensors) with one leading length, alone or in a dict or tuple."""

    def __init__(self, arrays: Columns) -> None:
        self.arrays = arrays
        self.length = len(arrays)
        # Rows of a memory map are read from storage when they are used, all others lie in memory.
        self.resident = not any(_is_memory_map(array) for array in arrays.arrays)

    def read(self, rows: Rows) -> Columns:
        """A copy of some rows."""
        return self.arrays.take(rows)

    def origin(self, row: int) -> str:
        """What to call an example in a message."""
        return f"row {row} of the source"


class IterableSource:
    """Examples one after another; a pass is one iteration.

    Args:
        source: an iterable that can be iterated again for the next pass, or a factory of iterators. It may
            have ``set_epoch(number)``, called before each pass, or a sampler or dataset that has it;
            ``set_share(rank, world_size)``, after which
            it gives that rank's examples alone; and ``iterate_from(position)``, which begins at what the
            ``position`` of an earlier iterator was, a sequence of whole numbers: for a state, and after an
            iterator was closed before its end. Where its iterators have ``get_state`` and ``set_state``, as
            Grain's, or it has ``state_dict`` and ``load_state_dict`` itself, as a StatefulDataLoader, these
            tell and take positions.
    """

    def __init__(self, source: Iterable[Any] | Callable[[], Iterator[Any]]) -> None:
        self._source = source
        self.name = getattr(source, "__name__", type(source).__name__)
        self._begun: Any = None  # an iterator that was begun, and can't begin again
        self.seekable = hasattr(source, "iterate_from")
        self._teller: _Teller | None = None  # of the iterator opened last
        self.kept_open = bool(getattr(source, "kept_open", False))  # also while nobody reads
        self.rows_are_known = bool(getattr(source, "rows_are_known", False))  # but not what they hold
        self.reordered = hears_of_passes(source)  # passes may differ in their order

    @property
    def length(self) -> int | None:
        """Examples (or whole batches) of a pass, where the source tells."""
        try:
            return len(self._source)  # type: ignore[arg-type]
        except TypeError:
            return None

    def set_share(self, rank: int, world: int) -> bool:
        """Whether the source gives one rank's examples alone."""
        set_share = getattr(self._source, "set_share", None)
        if set_share is not None:
            set_share(rank, world)
        return set_share is not None

    def open(self, number: int, position: Position = ()) -> Iterator[Any]:
        """The iterator of one pass, from somewhere within it."""
        tell_pass(self._source, number)
        if position and not isinstance(position, OwnState):
            if not self.seekable:
                raise self._takes_no_position()
            return self._source.iterate_from(position)  # type: ignore[union-attr,no-any-return]
        of_source = _teller_of(self._source)
        if isinstance(position, OwnState) and of_source is not None:
            of_source.take(copy.deepcopy(position.state))
        given = self._source if isinstance(self._source, Iterable) else self._source()
        if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
            raise ValueError(
                f"source: {self.name} returned a {type(given).__name__}, which can't be iterated; a function "
                "given as a source returns an iterator for each pass"
            )
        if given is self._begun and not is_unread(given) and not position:
            raise self._begins_once()
        if _begins_once(given):
            self._begun = given
        iterator = iter(given)
        self._teller = of_source or _teller_of(iterator)
        if isinstance(position, OwnState) and of_source is None:
            if self._teller is None:
                raise self._takes_no_position()
            self._teller.take(copy.deepcopy(position.state))
        return iterator

    @property
    def marks_apart(self) -> int:
        """Examples (or whole batches) between two positions asked for, at least; 0 where none is told."""
        if self.seekable:
            return 1
        return 0 if self._teller is None else _OWN_STATES_APART

    def position(self, iterator: Iterator[Any]) -> Position:
        """Where the iterator that was opened last is; () where that can't be told."""
        if self.seekable:
            return tuple(operator.index(part) for part in iterator.position)  # type: ignore[attr-defined]
        return () if self._teller is None else OwnState(copy.deepcopy(self._teller.tell()))

    def position_after_pass(self) -> Position:
        """Where the next pass begins, of a source that tells it by itself; () of others."""
        teller = _teller_of(self._source)
        return () if teller is None or self._teller is None else OwnState(copy.deepcopy(teller.tell()))

    def close(self) -> None:
        """Let go of what stays from one pass to the next."""
        if self.kept_open:
            self._source.close()  # type: ignore[union-attr]

    def check_restart(self) -> None:
        """Raises ValueError where what was read can't be read again, and would be passed over silently."""
        if _begins_once(self._source) and not is_unread(self._source):
            raise self._begins_once()

    def check_other(self, serial: int, *, same_rows: bool) -> None:
        """Answer that an example which was read again is another one than before.

        Args:
            serial: of the example.
            same_rows: the source has begun within a pass; one that knows its rows has a digest of them there.

        Raises:
            ValueError: which examples come is not known either.
        """
        if self.rows_are_known:
            or_others = "" if same_rows else ", or of others, if its sampler draws from what no seed governs"
            warn_caller(
                f"load_state_dict: {self.origin(serial)} has other contents than before, of the same rows"
                f"{or_others}: its dataset draws, from a generator of its own, or in a thread of this "
                "loader's, which must not seed the global ones; let it draw from the global generators, and "
                "give the DataLoader num_workers=1, which draws in a process, or the EchoLoader num_workers=0"
            )
            return
        raise ValueError(
            f"load_state_dict: {self.origin(serial)} is another one than when the state was saved: "
            f"{self.name} gives other examples, or in another order, when it is iterated again, so that some "
            f"would be used too often and others never. {self._remedy}"
        )

    @property
    def _remedy(self) -> str:
        """What to do where it gives other examples, or in another order, the second time."""
        if type(self._source).__module__.startswith("torchdata.stateful_dataloader"):
            return (
                "Give a DataLoader of torch with the same arguments in its place: what that draws follows "
                "seed= and the pass, and it needs no state of its own"
            )
        if type(self._source).__module__.startswith("torchdata.nodes"):
            return (
                "Give its SamplerWrapper a sampler that set_epoch(pass) tells its order, such as "
                "DistributedSampler(dataset, num_replicas=1, rank=0): the nodes' own state holds none"
            )
        return (
            "Let all that it draws follow a seed and the pass, which a method set_epoch(pass) of it is told "
            "(webdataset: detshuffle in place of shuffle), or let it give examples in their stored order, "
            "and shuffle here: shuffle_buffer=. In place of what wraps a DataLoader, as Accelerate and "
            "Fabric do, give the DataLoader"
        )

    def _takes_no_position(self) -> ValueError:
        return ValueError(
            f"load_state_dict: {self.name} told its own position when the state was saved, and takes none "
            "now; give the source it was saved with"
        )

    def _begins_once(self) -> ValueError:
        return ValueError(
            f"source: {self.name} is an iterator, which can be iterated once and tells no position, so that "
            "it can't begin again, as a further pass, load_state_dict and going on after an interruption "
            "need; give a function that returns a new one, such as lambda: open(path), or an object whose "
            "__iter__ does, or iterate once with epochs=1"
        )

    def origin(self, serial: int) -> str:
        """What to call an example in a message."""
        return f"example {serial} (counted from 0 over all passes) of {self.name}"


class _Teller(NamedTuple):
    """What tells a position, and takes it again."""

    tell: Callable[[], Any]
    take: Callable[[Any], Any]


def _teller_of(owner: Any) -> _Teller | None:
    """How an object tells and takes its own position, if it does.

    A stream of Hugging Face's ``datasets`` is not asked, nor a loader of one: with ``shuffle`` its state
    leaves out what its buffer held, and other examples would follow.
    """
    streams = [owner, getattr(owner, "dataset", None), getattr(owner, "_dataset", None)]
    if any(kind.__module__.startswith("datasets.") for part in streams for kind in type(part).__mro__):
        return None
    for tell, take in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(owner, tell) and hasattr(owner, take) and getattr(owner, "use_stateful_dataloader", True):
            return _Teller(getattr(owner, tell), getattr(owner, take))
    return None  # also of Accelerate's loaders around what has no state


def as_source(source: Any) -> ArraySource | MapSource | IterableSource:
    """What kind of source an object is.

    Raises:
        ValueError: it is neither indexable with a length nor iterable, or is empty.
    """
    if isinstance(source, IterableDataset):  # it may tell a length, and inherits a __getitem__ that raises
        return IterableSource(source)
    if isinstance(source, np.ndarray | torch.Tensor) and not source.ndim:
        raise ValueError(f"source: {source!r:.80} is one number, and no array of examples")
    arrays = _as_arrays(source)
    readable: ArraySource | MapSource | IterableSource
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
    if type(source) is TensorDataset:  # a subclass, or another dataset with tensors, has its own __getitem__
        flat = flatten(source.tensors)
        return None if flat is None else Columns(*flat)
    if isinstance(source, dict):
        fields = source
    elif isinstance(source, tuple):
        fields = dict(enumerate(source))
    elif isinstance(source, np.ndarray | torch.Tensor):
        fields = {"": source}
    else:
        return None
    if not fields or not all(
        isinstance(field, np.ndarray | torch.Tensor) and field.ndim for field in fields.values()
    ):
        return None
    if len({len(field) for field in fields.values()}) > 1:
        lengths = ", ".join(str(len(field)) for field in fields.values())
        raise ValueError(f"source: arrays of different lengths ({lengths}) are not fields of one dataset")
    flat = flatten(source)
    if flat is None and isinstance(source, dict | tuple):
        raise _no_rows(fields)
    return None if flat is None else Columns(*flat)


def _no_rows(fields: dict[Any, Any]) -> ValueError:
    name, field = next((name, field) for name, field in fields.items() if flatten(field) is None)
    where = f" on {field.device}" if isinstance(field, torch.Tensor) else ""
    return ValueError(
        f"source: field {name!r}, {field.dtype}{where}, is no numeric array in memory; convert it, or give a "
        "dataset whose __getitem__(row) returns one example"
    )


def is_unread(iterator: Any) -> bool:
    """Whether it is a generator of which nothing has been asked yet."""
    return inspect.isgenerator(iterator) and inspect.getgeneratorstate(iterator) == inspect.GEN_CREATED


def _begins_once(given: Any) -> bool:
    """Whether something is its own iterator; one whose ``__iter__`` does more may begin again there."""
    if not isinstance(given, Iterator):
        return False
    code = getattr(type(given).__iter__, "__code__", None)
    return code is None or code.co_code == _returns_itself.__code__.co_code


def _returns_itself(itself: Any) -> Any:
    return itself


def _is_memory_map(array: Any) -> bool:
    while array is not None:
        if isinstance(array, np.memmap):
            return True
        array = getattr(array, "base", None)
    return False
