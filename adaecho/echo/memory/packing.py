"""Examples of any shape as a few plain tensors and back: what a checkpoint can hold without pickled code.

``torch.save`` writes each tensor as a raw file of its archive, beside everything else of a checkpoint.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adaecho.echo.memory.pool import Examples
from adaecho.echo.memory.tree import Columns, TreeSpec

Bytes = NDArray[np.uint8]

# How a number lies among the content: layouts hold none, as equal ones of other kinds would be taken for it.
_PLAIN = {bool: "?", float: "<f8"}


def pack(things: Examples) -> dict[str, Any]:
    """Numbers, strings, tuples and tensors that ``unpack`` makes the same examples from.

    Raises:
        ValueError: an example holds what can't be stored as numbers, bytes or text.
    """
    if isinstance(things, Columns):
        return {
            "form": _plain_form(things.form),
            "arrays": [torch.from_numpy(array.copy()) for array in things.arrays],
        }
    packer = _Packer()
    which = [packer.add(example) for example in things]
    return {
        "layouts": list(packer.layouts),
        "which": torch.tensor(which, dtype=torch.int64),
        "sizes": torch.tensor(packer.sizes, dtype=torch.int64),
        "content": torch.from_numpy(np.concatenate([np.empty(0, dtype=np.uint8), *packer.content])),
    }


def unpack(packed: dict[str, Any]) -> Examples:
    """The examples again, in memory of their own."""
    if "form" in packed:
        return Columns(_form(packed["form"]), [tensor.numpy().copy() for tensor in packed["arrays"]])
    unpacker = _Unpacker(packed["sizes"].tolist(), packed["content"].numpy())
    return [unpacker.take(packed["layouts"][index]) for index in packed["which"].tolist()]


def _plain_form(form: TreeSpec) -> tuple[Any, ...]:
    if form.cls is not None:
        raise _unpackable(form.cls.__name__)
    return form.kind, form.names, tuple(_plain_form(part) for part in form.parts)


def _form(plain: Any) -> TreeSpec:
    kind, names, parts = plain
    return TreeSpec(kind, tuple(names), tuple(_form(part) for part in parts))


def _unpackable(kind: str) -> ValueError:
    return ValueError(
        f"restore='snapshot': a {kind} can't be stored as numbers, bytes or text; decode it to arrays, or "
        "choose restore='replay'"
    )


class _Packer:
    """Collects the leaves of examples, and each different layout once."""

    def __init__(self) -> None:
        self.layouts: dict[Any, int] = {}
        self.sizes: list[int] = []
        self.content: list[Bytes] = []

    def add(self, example: Any) -> int:
        """Take an example in; the number of its layout."""
        return self.layouts.setdefault(self._layout(example), len(self.layouts))

    def _layout(self, value: Any) -> tuple[Any, ...]:
        if type(value) is dict:
            return "dict", tuple(value), tuple(self._layout(part) for part in value.values())
        if type(value) in (list, tuple):
            return type(value).__name__, tuple(self._layout(part) for part in value)
        if type(value) is torch.Tensor:
            return self._tensor(value)
        if type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic):
            return self._array(value)
        if value is None:
            return "value", None
        if type(value) in _PLAIN:
            self.content.append(np.frombuffer(np.array(value, _PLAIN[type(value)]).tobytes(), np.uint8))
            return (type(value).__name__,)
        return self._text(value)

    def _tensor(self, value: torch.Tensor) -> tuple[Any, ...]:
        if value.layout != torch.strided or value.is_nested:
            raise _unpackable("sparse or nested tensor")
        self.sizes += value.shape
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        self.content.append(plain.reshape(-1).view(torch.uint8).numpy())
        return "tensor", str(value.dtype).removeprefix("torch."), value.ndim

    def _array(self, value: Any) -> tuple[Any, ...]:
        if value.dtype.hasobject or value.dtype.kind == "V":
            raise _unpackable("array of objects" if value.dtype.hasobject else "structured array")
        self.sizes += value.shape
        self.content.append(np.frombuffer(value.tobytes(), dtype=np.uint8))
        return "array" if isinstance(value, np.ndarray) else "scalar", value.dtype.str, value.ndim

    def _text(self, value: Any) -> tuple[Any, ...]:
        kind = type(value).__name__
        if type(value) is int:
            value = str(value)
        if type(value) is str:
            value = value.encode("utf-8", "surrogateescape")
        if type(value) is not bytes:
            raise _unpackable(kind)
        self.sizes.append(len(value))
        self.content.append(np.frombuffer(value, dtype=np.uint8))
        return (kind,)


class _Unpacker:
    """Gives the leaves of examples in the order in which they were packed."""

    def __init__(self, sizes: list[int], content: Bytes) -> None:
        self._sizes: Iterator[int] = iter(sizes)
        self._content, self._offset = content, 0

    def take(self, layout: Any) -> Any:
        """The next example, or a part of it."""
        kind, *rest = layout
        if kind == "dict":
            return {name: self.take(part) for name, part in zip(*rest, strict=True)}
        if kind in ("list", "tuple"):
            parts = [self.take(part) for part in rest[0]]
            return parts if kind == "list" else tuple(parts)
        if kind == "value":
            return rest[0]
        if kind in ("bool", "float"):
            return self._array(np.dtype(_PLAIN[bool if kind == "bool" else float]), 0).item()
        if kind == "tensor":
            return self._tensor(getattr(torch, rest[0]), rest[1])
        if kind in ("array", "scalar"):
            array = self._array(np.dtype(rest[0]), rest[1])
            return array if kind == "array" else array[()]
        text = self._bytes(next(self._sizes)).tobytes()
        if kind == "bytes":
            return text
        return int(text) if kind == "int" else text.decode("utf-8", "surrogateescape")

    def _tensor(self, dtype: torch.dtype, ndim: int) -> torch.Tensor:
        shape = [next(self._sizes) for _ in range(ndim)]
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8).numpy()[:] = self._bytes(tensor.numel() * dtype.itemsize)
        return tensor

    def _array(self, dtype: np.dtype[Any], ndim: int) -> NDArray[Any]:
        shape = [next(self._sizes) for _ in range(ndim)]
        return self._bytes(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)

    def _bytes(self, count: int) -> Bytes:
        content = self._content[self._offset : self._offset + count].copy()
        self._offset += count
        return content
