"""Examples one by one and stacked: fixed-shape examples move as arrays of many, ragged ones as lists.

Only what an array gives back exactly is stacked: plain tensors, arrays, numbers, and dicts, lists, tuples and
named tuples of them. An example that holds anything else, e.g. a ``tv_tensors.Mask``, an ``OrderedDict`` or a
masked array, travels whole, as it came.
"""

import copy
import io
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from adaecho.echo.memory import recycle

Rows = NDArray[np.int64]
Spans = NDArray[np.int64]  # [arrays, 2]

_STACKABLE = "biufc"  # kinds of dtype: bool, signed, unsigned, float, complex
_NUMBERS = (bool, int, float)
_UNCHANGEABLE = frozenset({str, bytes, int, float, bool, type(None)})
# A memory map is an array that says where it lies; torch's default_collate takes the two for the same, too.
_ARRAYS = (np.ndarray, np.memmap)
# Of the standard library's, what is changed as it is read or used, and says nothing of how it is copied.
_CHANGED_IN_USE = (bytearray, set, deque, io.BytesIO, io.StringIO)
_CONTAINERS = ("dict", "tuple", "list")  # kinds of a TreeSpec that have parts, if maybe none
# The commonest kinds without parts; to ask an abstract class about an instance takes ten times as long.
_LEAVES = _UNCHANGEABLE | {*_ARRAYS, torch.Tensor}


def children(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a mapping, list or tuple, of subclasses too, with their keys or places; none of a leaf."""
    if type(value) is dict:
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if type(value) in _LEAVES or isinstance(value, np.generic):
        return []
    return list(value.items()) if isinstance(value, Mapping) else []


def with_children(value: Any, parts: Sequence[Any]) -> Any:
    """A container of the class of another, which stays as it is, with other parts in the place of its own.

    Raises:
        TypeError: its class takes no such parts.
    """
    kind = type(value)
    if kind is dict:
        return dict(zip(value, parts, strict=True))
    if kind in (list, tuple):
        return kind(parts)
    if isinstance(value, tuple):
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    keys = list(value) if isinstance(value, Mapping) else range(len(value))
    if isinstance(value, MutableMapping | MutableSequence):
        filled: Any = copy.copy(value)  # with what it holds besides its parts
        for key, part in zip(keys, parts, strict=True):
            filled[key] = part
        return filled
    return kind(dict(zip(keys, parts, strict=True)) if isinstance(value, Mapping) else parts)


@dataclass(frozen=True)
class TreeSpec:
    """How an example nests its fields: one leaf, or named or numbered parts."""

    kind: str  # "array" | "tensor" | "scalar" (NumPy's) | "number" (Python's) | "dict" | "tuple" | "list"
    names: tuple[Any, ...] = ()
    parts: tuple["TreeSpec", ...] = ()
    cls: type | None = None  # of a named tuple

    def build(self, leaves: Iterator[Any]) -> Any:
        """An example in this form from its leaves."""
        if self.kind in _CONTAINERS:
            return self.filled([part.build(leaves) for part in self.parts])
        return next(leaves)

    def filled(self, parts: Sequence[Any]) -> Any:
        """A container of this kind."""
        if self.kind == "dict":
            return dict(zip(self.names, parts, strict=True))
        if self.kind == "list":
            return list(parts)
        return tuple(parts) if self.cls is None else self.cls._make(parts)  # type: ignore[attr-defined]


# One object each: of equal examples their leaves compare by identity.
_TENSOR, _ARRAY, _NUMBER, _SCALAR = map(TreeSpec, ("tensor", "array", "number", "scalar"))


def flatten(example: Any) -> tuple[TreeSpec, list[NDArray[Any]]] | None:
    """TreeSpec and numeric leaves of an example; None where a leaf has no fixed-shape array form."""
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
    """Whether a class is a container that holds its parts and nothing else."""
    return kind in (dict, list, tuple) or _is_named_tuple(kind)


def _is_named_tuple(kind: type) -> bool:
    """Whether a class adds names to a tuple and nothing else: a subclass of such a class may hold more."""
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def obstacle(example: Any, name: str = "") -> str | None:
    """What keeps an example from being stacked, e.g. "field ['x'], a PIL.Image.Image"; None if nothing."""
    kind = type(example)
    if flatten(example) is not None:
        return None
    for key, part in children(example) if is_plain(kind) else ():
        inner = obstacle(part, f"{name}[{key!r}]")
        if inner is not None:
            return inner
    what = f"a {kind.__module__}.{kind.__qualname__}".replace("a builtins.", "a ")
    if kind in _ARRAYS or kind is torch.Tensor:
        what += f" of {example.dtype}"
    return f"field {name}, {what}" if name else what


@dataclass
class Columns:
    """Examples of one form and one shape: for each leaf of the form an array [n, ...]."""

    form: TreeSpec
    arrays: list[NDArray[Any]]

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: slice) -> "Columns":
        return Columns(self.form, [array[index] for array in self.arrays])

    def take(self, rows: Rows) -> "Columns":
        """A copy of some rows."""
        return Columns(self.form, [recycle.take(array, rows) for array in self.arrays])

    def tree(self) -> Any:
        """The arrays in the form of one example, e.g. a dict of arrays [n, ...]."""
        return self.form.build(iter(self.arrays))

    def with_tree(self, tree: Any) -> "Columns":
        """These examples after a vectorised stage; raises ValueError where their number changed."""
        flat = flatten(tree)
        if flat is None or any(array.ndim == 0 or len(array) != len(self) for array in flat[1]):
            raise ValueError(
                f"augment.block must return numeric arrays with {len(self)} rows, as many as it was given"
            )
        form = self.form if _same_nesting(flat[0], self.form) else flat[0]
        return Columns(form, flat[1])

    def examples(self) -> list[Any]:
        """The examples one by one, as views in the kinds they came in (tensor, array, scalar, number)."""
        return _rows(self.form, iter(self.arrays), len(self))

    def batch(self) -> Any:
        """The default collated batch: the form of one example with a tensor per leaf; shares memory."""
        return self.form.build(map(torch.from_numpy, self.arrays))

    @property
    def example_bytes(self) -> int:
        """Bytes of one example."""
        return sum(array.dtype.itemsize * int(np.prod(array.shape[1:])) for array in self.arrays)


def _same_nesting(form: TreeSpec, other: TreeSpec) -> bool:
    kinds = {form.kind, other.kind}
    alike = len(kinds) == 1 or kinds.isdisjoint(_CONTAINERS)
    if not alike or form.names != other.names or len(form.parts) != len(other.parts):
        return False
    return all(map(_same_nesting, form.parts, other.parts))


def _rows(form: TreeSpec, arrays: Iterator[NDArray[Any]], number: int) -> list[Any]:
    """So many examples, field by field: a call for each leaf, not for each leaf of each example."""
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
    """Examples as one stack; None where they have no common fixed shape and numeric type."""
    first = flatten(examples[0]) if examples else None
    if first is None or not first[1]:
        return None
    columns = Columns(first[0], [])
    return columns if _stack(columns.form, examples, columns.arrays) else None


def _stack(form: TreeSpec, values: Sequence[Any], columns: list[NDArray[Any]]) -> bool:
    """Append a column [n, ...] for each leaf of the first value's form; False where another is unlike."""
    kinds = set(map(type, values))
    if form.kind not in _CONTAINERS:
        # Arrays, and NumPy's scalars of one class, are leaves as they are; to convert each takes longer than
        # to copy it.
        arrays: Any = values
        if not (kinds.issubset(_ARRAYS) if form is _ARRAY else form is _SCALAR and len(kinds) == 1):
            arrays = []
            if any(_flatten(value, arrays) is not form for value in values):
                return False
        if len({(array.shape, array.dtype) for array in arrays}) > 1:
            return False
        # Half of np.stack's time; that keeps another order in memory, e.g. of channels, as torch does.
        columns.append(np.array(arrays) if arrays[0].flags.c_contiguous else np.stack(arrays))
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
    """Whether two stacks can lie in one."""
    return columns.form == other.form and all(
        a.dtype == b.dtype and a.shape[1:] == b.shape[1:]
        for a, b in zip(columns.arrays, other.arrays, strict=True)
    )


def leaves(value: Any) -> Iterator[Any]:
    """What an example or a batch is made of: whatever has no parts."""
    parts = children(value)
    if not parts:
        yield value
    for _, part in parts:
        yield from leaves(part)


def num_bytes(value: Any) -> int:
    """Host memory of the arrays, tensors and byte strings in an example; the rest hardly counts."""
    return sum(map(_leaf_bytes, leaves(value)))


def _leaf_bytes(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        parts = [leaf._indices(), leaf._values()] if leaf.is_sparse else [leaf]
        return sum(int(part.nbytes) for part in parts) if leaf.device.type == "cpu" else 0
    if isinstance(leaf, np.ndarray | np.void):
        return int(leaf.nbytes)
    if isinstance(leaf, io.BytesIO):
        return leaf.getbuffer().nbytes
    return len(leaf) if isinstance(leaf, bytes | bytearray | str) else 0


def spans(value: Any) -> Spans | None:
    """The first byte and that behind the last of each array and tensor in a batch, int64 [found, 2].

    Of what can be given other parts, lists, dicts and dataclasses, the byte that each begins at. Fields of
    objects are looked into; None where something else may hold memory that can be written to.
    """
    found: list[tuple[int, int]] = []
    return np.array(found, dtype=np.int64).reshape(-1, 2) if _find_spans(value, found, set()) else None


def _find_spans(value: Any, found: list[tuple[int, int]], inside: set[int]) -> bool:
    kind = type(value)
    if isinstance(value, np.void):  # a view of its array, as below
        value = np.asarray(value)
    if kind in _UNCHANGEABLE or isinstance(value, np.generic) or id(value) in inside:
        return True
    if isinstance(value, memoryview | bytearray):
        value = np.frombuffer(value, np.uint8) if len(value) else np.empty(0)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        steps = zip(value.shape, value.stride(), strict=True)
        length = (1 + sum((size - 1) * step for size, step in steps)) * value.element_size()
        found += [(value.data_ptr(), value.data_ptr() + length)] if value.numel() else []
        return True
    if isinstance(value, np.ndarray) and value.dtype != object:
        reach = [(size - 1) * step for size, step in zip(value.shape, value.strides, strict=True)]
        begin = value.ctypes.data + sum(min(one, 0) for one in reach)
        end = value.ctypes.data + sum(max(one, 0) for one in reach) + value.itemsize
        found += [(begin, end)] if value.size else []
        return True
    if isinstance(value, Mapping | list | tuple):
        parts = [part for _, part in children(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, type | np.ndarray | torch.Tensor):
        parts = list(vars(value).values())
    else:
        return False
    if isinstance(value, Mapping | list) or _fields(value) is not None:
        found.append((id(value), id(value) + 1))
    return all(_find_spans(part, found, inside | {id(value)}) for part in parts)


def duplicate(value: Any) -> Any:
    """A deep copy of an example or a batch that shares no memory that can be written to; devices stay."""
    return _copied(value, True, True)


def isolated(value: Any, *, pictures: bool = True) -> Any:
    """An example that can be written into without changing the one given.

    Objects that say how they are copied (``__deepcopy__``) or what their fields are (dataclasses, attrs,
    SimpleNamespace) are copied; others stay, as one that holds a decoder of a library's can't be.

    Args:
        value: an example as its source gave it.
        pictures: whether those of PIL's images that were opened from a file are copied, too, which decodes
            them and loses further frames; not before ``decode``.
    """
    return _copied(value, False, pictures)


def _copied(value: Any, deep: bool, pictures: bool) -> Any:
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind in _ARRAYS and value.dtype != object:
        return np.array(value)
    if kind is memoryview:
        return memoryview(bytearray(value)).cast(value.format, value.shape) if value.nbytes else value
    if kind is torch.Tensor:
        # Each call of torch gives the interpreter's lock away and has to get it back.
        return value.detach().clone() if value.requires_grad else value.clone()
    if kind is dict:
        return {key: _copied(part, deep, pictures) for key, part in value.items()}
    if isinstance(value, np.generic):  # a row of a structured array is a view of it, which can be written to
        return value.copy() if isinstance(value, np.void) else value
    if kind in (list, tuple) or (not deep and (is_plain(kind) or isinstance(value, dict | list))):
        parts = [_copied(part, deep, pictures) for _, part in children(value)]
        return with_children(value, parts)
    if not deep and isinstance(value, tuple) and hasattr(kind, "_make"):  # of a subclass of a named tuple
        copied = kind._make([_copied(part, deep, pictures) for part in value])
        getattr(copied, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return copied
    if _is_picture(kind):
        return _copied_picture(value) if pictures or not hasattr(value, "tile") else value
    if deep or isinstance(value, _CHANGED_IN_USE) or hasattr(kind, "__deepcopy__"):
        return _deep(value)
    names = _fields(value)
    if names is not None:
        copied = copy.copy(value)
        for name in names:
            if hasattr(value, name):
                object.__setattr__(copied, name, _copied(getattr(value, name), False, pictures))
        return copied
    return value


def _fields(value: Any) -> set[str] | None:
    """The fields of what is known to be made of them, and what else it has; None for any other object."""
    if isinstance(value, type):
        return None
    if is_dataclass(value):
        known = {field.name for field in fields(value)}
    elif hasattr(value, "__attrs_attrs__"):
        known = {field.name for field in value.__attrs_attrs__}
    elif isinstance(value, SimpleNamespace | UserDict | UserList):
        known = set[str]()
    else:
        return None
    return known | {*getattr(value, "__dict__", ())}


def _copied_picture(picture: Any) -> Any:
    copied = picture.copy()  # a tenth of the time that a deep copy takes
    copied.format = picture.format
    return copied


def _deep(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except RuntimeError:
        if not isinstance(value, torch.Tensor):
            raise
        # torch makes no deep copy of a subclass that defines nothing, nor of what has a gradient.
        copied = value.detach().as_subclass(torch.Tensor).clone().as_subclass(type(value))
        copied.__dict__.update(copy.deepcopy(value.__dict__))
        return copied


def collate(examples: list[Any]) -> Any:
    """Examples as one batch, as ``torch.utils.data.default_collate`` makes it, but tuples stay tuples.

    So mappings, sequences and named tuples keep their class, and tensors of a subclass become what
    ``torch.stack`` makes of them: of ``tv_tensors`` a plain tensor.

    Raises:
        ValueError: the examples have different shapes or kinds.
        TypeError: of a kind that no batch can be made of.
    """
    stacked = stack(examples)
    if stacked is not None:
        return stacked.batch()
    first = examples[0]
    if isinstance(first, Mapping):
        return _same_kind(first, [collate([example[key] for example in examples]) for key in first])
    if isinstance(first, Sequence) and not isinstance(first, str | bytes):
        if any(len(example) != len(first) for example in examples):
            raise ValueError("examples of one batch have different lengths; give collate= to pad them")
        return _same_kind(first, [collate(list(column)) for column in zip(*examples, strict=True)])
    if isinstance(first, np.ndarray | torch.Tensor):
        for other in examples:
            if not hasattr(other, "shape"):
                raise ValueError(
                    f"examples of one batch are a {type(first).__name__} and a {type(other).__name__}; give "
                    "numpy.asarray of each column of a tuple that is meant as columns, or collate="
                )
        shapes = sorted({tuple(example.shape) for example in examples})
        if len(shapes) > 1:
            raise ValueError(
                f"examples of one batch have different shapes, {shapes[0]} and {shapes[1]}; make augment "
                "give them one shape, or give collate="
            )
    try:
        return default_collate(examples)
    except TypeError as error:
        error.add_note(f"no batch can be made of {obstacle(first)}: {remedy(first)}, or give collate=")
        raise


def _same_kind(first: Mapping[Any, Any] | Sequence[Any], parts: list[Any]) -> Any:
    """Collated parts in a container of the class of an example; a plain one where that can't be made."""
    if isinstance(first, tuple) and not hasattr(first, "_fields"):
        return tuple(parts)
    try:
        return with_children(first, parts)
    except TypeError:
        return dict(zip(first, parts, strict=True)) if isinstance(first, Mapping) else parts


def remedy(value: Any) -> str:
    """How to make something that can't be stacked into what can, e.g. in a message after ``obstacle``."""
    if any(_is_picture(type(leaf)) for leaf in leaves(value)):
        return (
            "convert it in decode=, e.g. numpy.asarray(image), or in augment=; a Hugging Face dataset gives "
            "arrays with dataset.with_format('numpy'), or encoded bytes for decode= with "
            "dataset.cast_column(NAME, datasets.Image(decode=False))"
        )
    return "make decode= or augment= give arrays, tensors or numbers"


def _is_picture(kind: type) -> bool:
    return any(base.__module__ == "PIL.Image" for base in kind.__mro__)
