"""Examples one by one and stacked: fixed-shape examples move as arrays of many, ragged ones as lists.

Only what an array gives back exactly is stacked: plain tensors, arrays, numbers, and dicts, lists, tuples and
named tuples of them. An example that holds anything else, e.g. a ``tv_tensors.Mask``, an ``OrderedDict`` or a
masked array, travels whole, as it came.
"""

import copy
import math
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from adaecho.echo.memory import recycle

Rows = NDArray[np.int64]

_STACKABLE = "biufc"  # kinds of dtype: bool, signed, unsigned, float, complex
_NUMBERS = (bool, int, float)
_UNCHANGEABLE = frozenset({str, bytes, int, float, bool, type(None)})
# A memory map is an array that says where it lies; torch's default_collate takes the two for the same, too.
_ARRAYS = (np.ndarray, np.memmap)
_CONTAINERS = ("dict", "tuple", "list")  # kinds of a TreeSpec that have parts, if maybe none
# The commonest kinds without parts; to ask an abstract class about an instance takes ten times as long.
_LEAVES = _UNCHANGEABLE | {*_ARRAYS, torch.Tensor}


def _is_leaf(value: Any) -> bool:
    """Whether a value is of a kind without parts; where not, it may have some."""
    return type(value) in _LEAVES or isinstance(value, np.generic)


def children(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a mapping, list or tuple, of subclasses too, with their keys or places; none of a leaf."""
    if type(value) is dict:
        return list(value.items())
    if _is_leaf(value):
        return []
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


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
        if self.kind not in _CONTAINERS:
            return next(leaves)
        return self.filled([part.build(leaves) for part in self.parts])

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
    leaves: list[NDArray[Any]] = []
    form = _flatten(example, leaves)
    return None if form is None else (form, leaves)


def _flatten(value: Any, leaves: list[NDArray[Any]]) -> TreeSpec | None:
    kind = type(value)
    if kind in _ARRAYS or kind in _NUMBERS or (isinstance(value, np.generic) and kind is value.dtype.type):
        array = np.asarray(value)
        if array.dtype.kind not in _STACKABLE:
            return None
        leaves.append(array)
        if kind in _ARRAYS:
            return _ARRAY
        return _NUMBER if kind in _NUMBERS else _SCALAR
    if kind is torch.Tensor:
        if value.device.type != "cpu" or value.dtype == torch.bfloat16 or value.layout != torch.strided:
            return None
        try:
            leaves.append(value.detach().numpy())
        except (TypeError, RuntimeError):  # of a type that NumPy lacks, or a lazy conjugate
            return None
        return _TENSOR
    if not _is_plain(kind):
        return None
    parts = []
    for _, part in children(value):
        form = _flatten(part, leaves)
        if form is None:
            return None
        parts.append(form)
    names, named = (tuple(value), None) if kind is dict else ((), kind if _is_named_tuple(kind) else None)
    return TreeSpec("tuple" if named else kind.__name__, names, tuple(parts), named)


def _is_plain(kind: type) -> bool:
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
    for key, part in children(example) if _is_plain(kind) else ():
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
    if len(form.parts) != len(other.parts) or form.names != other.names:
        return False
    if (form.kind in _CONTAINERS or other.kind in _CONTAINERS) and form.kind != other.kind:
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
    if kind == "tensor":
        return torch.from_numpy(np.asarray(leaf))
    if kind == "number":
        return leaf.item()
    if kind == "scalar":
        return leaf[()]
    return np.asarray(leaf)


def stack(examples: Sequence[Any]) -> Columns | None:
    """Examples as one stack; None where they have no common fixed shape and numeric type."""
    first = flatten(examples[0]) if examples else None
    if first is None or not first[1]:
        return None
    columns = Columns(first[0], [])
    return columns if _stack(columns.form, examples, columns.arrays) else None


def _stack(form: TreeSpec, values: Sequence[Any], columns: list[NDArray[Any]]) -> bool:
    """Append a column for each leaf of the first value's form; False where another value doesn't fit it."""
    kinds = set(map(type, values))
    if form.kind not in _CONTAINERS:
        # Arrays, and NumPy's scalars of one class, are leaves as they are; to convert each takes longer than
        # to copy it.
        leaves: Any = values
        if not (kinds.issubset(_ARRAYS) if form is _ARRAY else form is _SCALAR and len(kinds) == 1):
            leaves = []
            if any(_flatten(value, leaves) is not form for value in values):
                return False
        if len({(leaf.shape, leaf.dtype) for leaf in leaves}) > 1:
            return False
        # Half of np.stack's time; that keeps another order in memory, e.g. of channels, as torch does.
        columns.append(np.array(leaves) if leaves[0].flags.c_contiguous else np.stack(leaves))
        return True
    if len(kinds) > 1:
        return False
    if form.kind == "dict":
        if any(tuple(value) != form.names for value in values):
            return False
        fields: Any = ([value[name] for value in values] for name in form.names)
    else:
        if any(len(value) != len(form.parts) for value in values):
            return False
        fields = zip(*values, strict=True)
    return all(_stack(part, field, columns) for part, field in zip(form.parts, fields, strict=True))


def same_layout(columns: Columns, other: Columns) -> bool:
    """Whether two stacks can lie in one."""
    return columns.form == other.form and all(
        a.dtype == b.dtype and a.shape[1:] == b.shape[1:]
        for a, b in zip(columns.arrays, other.arrays, strict=True)
    )


def num_bytes(value: Any) -> int:
    """Host memory of the arrays, tensors and byte strings in an example; the rest hardly counts."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return 0
        parts = [value._indices(), value._values()] if value.is_sparse else [value]
        return sum(int(part.nbytes) for part in parts)
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    return sum(num_bytes(part) for _, part in children(value))


def duplicate(value: Any) -> Any:
    """A deep copy of an example or a batch that shares no memory that can be written to; devices stay."""
    kind = type(value)
    if kind is torch.Tensor:
        # Each call of torch gives the interpreter's lock away and has to get it back.
        return value.detach().clone() if value.requires_grad else value.clone()
    if kind in _ARRAYS and value.dtype != object:
        return np.array(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind in (dict, list, tuple):
        return with_children(value, [duplicate(part) for _, part in children(value)])
    if _is_picture(kind):  # a tenth of the time that a deep copy takes
        copied = value.copy()
        copied.format = value.format
        return copied
    try:
        return copy.deepcopy(value)
    except RuntimeError:
        if not isinstance(value, torch.Tensor):
            raise
        return _tensor_of_a_subclass(value)


def _tensor_of_a_subclass(value: torch.Tensor) -> torch.Tensor:
    """A copy where torch makes no deep one: of a subclass that defines nothing, of what has a gradient."""
    copied = value.detach().as_subclass(torch.Tensor).clone().as_subclass(type(value))
    copied.__dict__.update(copy.deepcopy(value.__dict__))
    return copied


def isolated(value: Any, *, pictures: bool = True) -> Any:
    """An example that can be written into without changing the one given; objects of other kinds stay.

    Args:
        value: an example as its source gave it.
        pictures: whether PIL's images are copied, too, which decodes them; not before ``decode``.
    """
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind is dict:  # both first: an example of a tar shard is a dict of byte strings
        if _UNCHANGEABLE.issuperset(map(type, value.values())):
            return value.copy()
        return {key: isolated(part, pictures=pictures) for key, part in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        return duplicate(value)
    if isinstance(value, np.generic):
        return value
    if _is_plain(kind) or isinstance(value, dict | list):
        return with_children(value, [isolated(part, pictures=pictures) for _, part in children(value)])
    if isinstance(value, bytearray) or (pictures and _is_picture(kind)):
        return duplicate(value)
    if is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for part in fields(value):
            if hasattr(value, part.name):
                object.__setattr__(copied, part.name, isolated(getattr(value, part.name), pictures=pictures))
        return copied
    return value


def duplicate_many(batches: Sequence[Any]) -> list[Any]:
    """``duplicate`` of each of several batches of one form; tensors that fit together in one copy."""
    first = batches[0]
    alike = all(type(batch) is type(first) for batch in batches)
    if alike and type(first) is dict and first and all(list(batch) == list(first) for batch in batches):
        columns = [duplicate_many([batch[key] for batch in batches]) for key in first]
        return [dict(zip(first, row, strict=True)) for row in zip(*columns, strict=True)]
    if alike and type(first) in (list, tuple) and first and len({len(batch) for batch in batches}) == 1:
        columns = [duplicate_many(column) for column in zip(*batches, strict=True)]
        return [type(first)(row) for row in zip(*columns, strict=True)]
    if all(_can_join(batch, first) for batch in batches):
        return list(torch.split(_joined(batches), [len(batch) for batch in batches]))
    return [duplicate(batch) for batch in batches]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors one after another, in recycled memory where a plain array can hold them."""
    first = tensors[0]
    shape = (sum(map(len, tensors)), *first.shape[1:])
    num_bytes = math.prod(shape) * first.itemsize
    plain = first.device.type == "cpu" and not first.is_quantized and num_bytes > 0
    if not plain or not all(tensor.is_contiguous() for tensor in tensors):  # the result has their format
        return torch.cat(list(tensors))
    memory = torch.from_numpy(recycle.empty((num_bytes,), np.uint8))
    return torch.cat(list(tensors), out=memory.view(first.dtype).view(shape))


def _can_join(batch: Any, first: Any) -> bool:
    return (
        type(batch) is torch.Tensor
        and batch.layout == torch.strided
        and not batch.requires_grad
        and batch.dim() > 0
        and (batch.dtype, batch.device, batch.shape[1:]) == (first.dtype, first.device, first.shape[1:])
    )


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
    if _holds_picture(value):
        return (
            "convert it in decode=, e.g. numpy.asarray(image), or in augment=; a Hugging Face dataset gives "
            "arrays with dataset.with_format('numpy'), or encoded bytes for decode= with "
            "dataset.cast_column(NAME, datasets.Image(decode=False))"
        )
    return "make decode= or augment= give arrays, tensors or numbers"


def _holds_picture(value: Any) -> bool:
    return _is_picture(type(value)) or any(_holds_picture(part) for _, part in children(value))


def _is_picture(kind: type) -> bool:
    return any(base.__module__ == "PIL.Image" for base in kind.__mro__)
