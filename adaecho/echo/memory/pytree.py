"""Stack, copy and collate examples, which may be nested.

The arrays, tensors and numbers in an example are called its leaves.
"""

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch.utils.data import default_collate

Rows = NDArray[np.int64]

_STACKABLE = "biufc"  # kinds of dtype: bool, signed, unsigned, float, complex
_NUMBERS = (bool, int, float)
_UNCHANGEABLE = frozenset({str, bytes, int, float, bool, type(None)})
# torch's default_collate also treats a memory map as an array.
_ARRAYS = (np.ndarray, np.memmap)
_CONTAINERS = ("dict", "tuple", "list")  # kinds of a TreeSpec with parts

UNFIT = (
    "examples are arrays, tensors, numbers, and dicts, lists and tuples of these: convert in decode= or "
    "augment=, e.g. numpy.asarray(image)"
)


def children(value: Any) -> list[tuple[Any, Any]]:
    """Return (key, value) pairs of a mapping, (index, value) pairs of a list or tuple, otherwise []."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def with_children(value: Any, parts: Sequence[Any]) -> Any:
    """Return a container of the same class with new values; raise TypeError if that is impossible."""
    kind = type(value)
    if kind is dict:
        return dict(zip(value, parts, strict=True))
    if not isinstance(value, Mapping):
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    fields = dict(zip(value, parts, strict=True))
    if not isinstance(value, MutableMapping):
        return kind(fields)
    filled = copy.copy(value)  # keeps other attributes
    filled.update(fields)
    return filled


@dataclass(frozen=True)
class TreeSpec:
    """The structure of a nested example, without its values."""

    kind: str  # "array" | "tensor" | "scalar" (NumPy's) | "number" (Python's) | "dict" | "tuple" | "list"
    names: tuple[Any, ...] = ()
    parts: tuple["TreeSpec", ...] = ()
    cls: type | None = None  # the class of a named tuple

    def build(self, leaves: Iterator[Any]) -> Any:
        """Build an example with this structure from its arrays, tensors and numbers."""
        if self.kind in _CONTAINERS:
            return self.filled([part.build(leaves) for part in self.parts])
        return next(leaves)

    def filled(self, parts: Sequence[Any]) -> Any:
        """Build the outermost container of this structure from its values."""
        if self.kind == "dict":
            return dict(zip(self.names, parts, strict=True))
        if self.kind == "list":
            return list(parts)
        return tuple(parts) if self.cls is None else self.cls._make(parts)  # type: ignore[attr-defined]


# There is one object for each kind of leaf, so that leaves can be compared by identity.
_TENSOR, _ARRAY, _NUMBER, _SCALAR = map(TreeSpec, ("tensor", "array", "number", "scalar"))


def flatten(example: Any) -> tuple[TreeSpec, list[NDArray[Any]]] | None:
    """Split an example into its structure and a list of NumPy arrays.

    Return None if the example contains other values, such as strings or tensors on a GPU.
    """
    arrays: list[NDArray[Any]] = []
    form = _flatten(example, arrays)
    return None if form is None else (form, arrays)


def _flatten(value: Any, arrays: list[NDArray[Any]]) -> TreeSpec | None:
    kind = type(value)
    if kind in _ARRAYS or kind in _NUMBERS or (isinstance(value, np.generic) and kind is value.dtype.type):
        arrays.append(np.asarray(value))
        if arrays[-1].dtype.kind not in _STACKABLE:
            return None
        return _ARRAY if kind in _ARRAYS else _NUMBER if kind in _NUMBERS else _SCALAR
    if kind is torch.Tensor:
        if value.device.type != "cpu" or value.dtype == torch.bfloat16 or value.layout != torch.strided:
            return None
        try:
            arrays.append(value.detach().numpy())
        except (TypeError, RuntimeError):  # of a type that NumPy lacks, or a lazy conjugate
            return None
        return _TENSOR
    if not is_plain(kind):
        return None
    parts: list[TreeSpec] = []
    for _, part in children(value):
        form = _flatten(part, arrays)
        if form is None:
            return None
        parts.append(form)
    names, named = (tuple(value), None) if kind is dict else ((), kind if _is_named_tuple(kind) else None)
    return TreeSpec("tuple" if named else kind.__name__, names, tuple(parts), named)


def is_plain(kind: type) -> bool:
    """Return whether a class is exactly ``dict``, ``list``, ``tuple`` or a named tuple."""
    return kind in (dict, list, tuple) or _is_named_tuple(kind)


def _is_named_tuple(kind: type) -> bool:
    """Return whether a class is a named tuple, but not a subclass, which may have more attributes."""
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and hasattr(kind, "_make")


@dataclass
class Columns:
    """A batch of n examples with the same keys and shapes, stored as one array [n, ...] per key."""

    form: TreeSpec
    arrays: list[NDArray[Any]]

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: slice) -> "Columns":
        return Columns(self.form, [array[index] for array in self.arrays])

    def take(self, rows: Rows) -> "Columns":
        """Return copies of the examples with the given indices."""
        return Columns(self.form, [take_rows(array, rows) for array in self.arrays])

    def tree(self) -> Any:
        """Return the stacked arrays [n, ...], nested like an example."""
        return self.form.build(iter(self.arrays))

    def with_tree(self, tree: Any) -> "Columns":
        """Check the nested arrays that ``augment.block`` returned, and convert them to ``Columns``."""
        flat = flatten(tree)
        if flat is None or any(array.ndim == 0 or len(array) != len(self) for array in flat[1]):
            raise ValueError(
                f"augment.block must return numeric arrays with as many rows as its input ({len(self)})"
            )
        form = self.form if _same_nesting(flat[0], self.form) else flat[0]
        return Columns(form, flat[1])

    def examples(self) -> list[Any]:
        """Return the examples as a list of views, in their original types."""
        return _rows(self.form, iter(self.arrays), len(self))

    def batch(self) -> Any:
        """Return the stacked arrays as nested tensors, without a copy."""
        return self.form.build(map(torch.from_numpy, self.arrays))

    @property
    def example_bytes(self) -> int:
        """Size of one example in bytes."""
        return sum(array.dtype.itemsize * int(np.prod(array.shape[1:])) for array in self.arrays)


def _same_nesting(form: TreeSpec, other: TreeSpec) -> bool:
    kinds = {form.kind, other.kind}
    alike = len(kinds) == 1 or kinds.isdisjoint(_CONTAINERS)
    if not alike or form.names != other.names or len(form.parts) != len(other.parts):
        return False
    return all(map(_same_nesting, form.parts, other.parts))


def _rows(form: TreeSpec, arrays: Iterator[NDArray[Any]], number: int) -> list[Any]:
    """Split stacked arrays into a list of examples with the given structure."""
    if form.kind not in _CONTAINERS:
        return [_wrap(form.kind, leaf) for leaf in next(arrays)]
    columns = [_rows(part, arrays, number) for part in form.parts]
    rows = zip(*columns, strict=True) if columns else [()] * number
    return [form.filled(row) for row in rows]


def _wrap(kind: str, leaf: Any) -> Any:
    if kind == "number":
        return leaf.item()
    if kind == "scalar":
        return leaf[()]
    return torch.from_numpy(np.asarray(leaf)) if kind == "tensor" else np.asarray(leaf)


def stack(examples: Sequence[Any]) -> Columns | None:
    """Stack examples; return None unless all have the same structure, shapes and numeric types."""
    first = flatten(examples[0]) if examples else None
    if first is None or not first[1]:
        return None
    columns = Columns(first[0], [])
    return columns if _stack(columns.form, examples, columns.arrays) else None


def _stack(form: TreeSpec, values: Sequence[Any], columns: list[NDArray[Any]]) -> bool:
    """Stack values and append the arrays to ``columns``; return False if the values cannot be stacked."""
    kinds = set(map(type, values))
    if form.kind not in _CONTAINERS:
        # Arrays and NumPy scalars of one class need no conversion, which would take longer than the copy.
        arrays: Any = values
        if not (kinds.issubset(_ARRAYS) if form is _ARRAY else form is _SCALAR and len(kinds) == 1):
            arrays = []
            if any(_flatten(value, arrays) is not form for value in values):
                return False
        if len({(array.shape, array.dtype) for array in arrays}) > 1:
            return False
        # Twice as fast as np.stack, which preserves other memory orders, e.g. channels last.
        column = np.array(arrays) if arrays[0].flags.c_contiguous else np.stack(arrays)
        columns.append(column.astype(column.dtype.newbyteorder("="), copy=False))  # as torch needs it
        return True
    keys = form.names if form.kind == "dict" else range(len(form.parts))
    alike = (
        tuple(value) == keys if form.kind == "dict" else len(value) == len(keys)
        for value in values
    )  # fmt: skip
    if len(kinds) > 1 or not all(alike):
        return False
    fields = ([value[key] for value in values] for key in keys)
    return all(_stack(part, field, columns) for part, field in zip(form.parts, fields, strict=True))


def same_layout(columns: Columns, other: Columns) -> bool:
    """Return whether the examples of two stacks have the same structure, shapes and types."""
    return columns.form == other.form and all(
        a.dtype == b.dtype and a.shape[1:] == b.shape[1:]
        for a, b in zip(columns.arrays, other.arrays, strict=True)
    )


def num_bytes(value: Any) -> int:
    """Return the number of bytes of CPU memory in an example's arrays, tensors and strings."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.device.type == "cpu" and not value.is_sparse else 0
    if isinstance(value, np.ndarray | np.void):
        return int(value.nbytes)
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    return sum(num_bytes(part) for _, part in children(value))


def duplicate(value: Any) -> Any:
    """Return a deep copy of an example or batch. Tensors stay on their device."""
    return _copied(value, copy.deepcopy)


def with_own_arrays(value: Any) -> Any:
    """Copy the containers, arrays and tensors of an example, but not other objects."""
    return _copied(value, lambda other: other)


def _copied(value: Any, copied: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind in _ARRAYS and value.dtype != object:
        return np.array(value)
    if kind is torch.Tensor:
        # A single call, because each call into torch releases and reacquires the GIL.
        return value.detach().clone() if value.requires_grad else value.clone()
    if kind is dict:
        return {key: _copied(part, copied) for key, part in value.items()}
    if is_plain(kind):
        return with_children(value, [_copied(part, copied) for part in value])
    if isinstance(value, np.void):  # a view of a row
        return value.copy()
    if isinstance(value, np.ndarray | torch.Tensor):  # of a subclass
        return copy.deepcopy(value)
    return copied(value)


def collate(examples: list[Any]) -> Any:
    """Collate examples like ``torch.utils.data.default_collate``, except that tuples stay tuples."""
    try:
        return _collated(examples)
    except (ValueError, RuntimeError, TypeError) as error:
        error.add_note(f"{UNFIT}, of equal shape; or pass collate=, for example to pad them")
        raise


def _collated(examples: list[Any]) -> Any:
    stacked = stack(examples)
    if stacked is not None:
        return stacked.batch()
    first = examples[0]
    if isinstance(first, Mapping):
        return _same_kind(first, [_collated([example[key] for example in examples]) for key in first])
    if isinstance(first, list | tuple):
        return _same_kind(first, [_collated(list(column)) for column in zip(*examples, strict=True)])
    return default_collate(examples)


def _same_kind(first: Any, parts: list[Any]) -> Any:
    """Put collated values into the example's container class, or a dict or list if that is impossible."""
    try:
        return with_children(first, parts)
    except TypeError:
        return dict(zip(first, parts, strict=True)) if isinstance(first, Mapping) else parts


_LEAST_BYTES = 1 << 16  # the allocator reuses smaller arrays
_SPARE_BLOCKS = 8  # for each size
_MAX_SIZES = 32

# Memory that is reused for batches, by size in bytes. Otherwise, the operating system would reclaim each
# large array that is freed. Each page of the next array would then cause a page fault, which takes longer
# than filling the page. The calls of a deque need no lock.
_spare: dict[int, deque[NDArray[np.uint8]]] = {}


class _Lease:
    """An owner of memory that is reused after the last array in this memory is deleted."""

    def __init__(self, block: NDArray[np.uint8], spare: deque[NDArray[np.uint8]]) -> None:
        self._block, self._spare = block, spare
        self.__array_interface__ = block.__array_interface__  # np.asarray views it without a copy

    def __del__(self) -> None:
        self._spare.append(self._block)


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialized array like ``np.empty``, if possible in the memory of a deleted array."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_BYTES:
        return np.empty(shape, dtype)
    if num_bytes not in _spare and len(_spare) >= _MAX_SIZES:
        _spare.clear()
    spare = _spare.setdefault(num_bytes, deque(maxlen=_SPARE_BLOCKS))
    try:
        block = spare.pop()
    except IndexError:
        block = np.empty(num_bytes, np.uint8)  # [num_bytes]
    return np.asarray(_Lease(block, spare)).view(dtype).reshape(shape)


def take_rows(array: NDArray[Any], rows: Rows) -> NDArray[Any]:
    """Copy the given rows of an array, in native byte order. Row numbers are not checked."""
    selected = empty((len(rows), *array.shape[1:]), array.dtype.newbyteorder("="))
    # np.take would first make a contiguous copy of the whole array, and cannot convert.
    if not (array.flags.c_contiguous and array.dtype.isnative):
        selected[...] = array[rows]
        return selected
    # Any mode but "raise" writes without a second buffer.
    return np.take(array, rows, axis=0, out=selected, mode="clip")
