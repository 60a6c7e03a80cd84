"""Whether a source gives the same examples again: fingerprints of a few, compared when these are read again.

What can only be iterated is read again from some place on after a resume. Where its order, or what it draws,
follows no seed, other examples come then: some would be used too often, others never. What is said of
examples goes for whole batches, where the source gives these.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_KEPT = 1024  # many more than are read ahead of the consumer
_FIRST = 32  # of a pass, each a witness: few have been read when an early state is made
_IN_A_STATE = 32  # buffers that shuffle a little give the same example at some places
_ELEMENTS = 4096  # of an array, at most
_PARTS, _DEPTH = 8, 4  # of a list, about; of what holds others
_SIZED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_TELLING = (torch.Tensor, np.ndarray, bytes, bytearray, str, list, tuple, Mapping)

Witness = tuple[int, int, int]
"""The serial of an example, its fingerprint, and a digest of the rows of its pass up to it, where known."""


class Witnesses:
    """Some of the examples that a reader has read. One thread adds them while another saves a state.

    Args:
        spacing: one of so many examples is a witness.
        world: ranks that share out serials.

    Attributes:
        rows_are_same: of the example compared last.
    """

    def __init__(self, spacing: int = 1, world: int = 1) -> None:
        self._spacing, self._world = spacing, world
        self._seen: list[Witness] = []  # never changed: another takes its place
        self._expected: dict[int, Witness] = {}
        self.rows_are_same = True

    def clear(self) -> None:
        """Forget all."""
        self._seen = []

    def add(self, serial: int, index: int, example: Any, rows: int = 0, *, always: bool = False) -> None:
        """Remember an example, if it is to be a witness; its index in its pass is counted over all ranks."""
        if always or index // self._world < _FIRST or not serial // self._world % self._spacing:
            self._seen = [*self._seen[1 - _KEPT :], (serial, fingerprint(example), rows)]

    def before(self, serial: int) -> list[list[int]]:
        """The last few before a serial, as plain numbers: the same ones however far has been read ahead."""
        return [list(witness) for witness in self._seen if witness[0] < serial][-_IN_A_STATE:]

    def expect(self, witnesses: list[list[int]]) -> None:
        """What a state holds: these examples are to come again, as far as they are read again."""
        self._seen = [(int(serial), int(known), int(rows)) for serial, known, rows in witnesses]
        self._expected = {witness[0]: witness for witness in self._seen}

    def is_as_before(self, serial: int, example: Any, rows: int = 0) -> bool:
        """Whether an example that is read again is what it was, and of the same rows, as far as is known."""
        expected = self._expected.pop(serial, None)
        self.rows_are_same = expected is None or expected[2] == rows
        return expected is None or (self.rows_are_same and expected[1] == fingerprint(example))


def tells_content(witnesses: list[list[int]]) -> bool:
    """Whether another order of the examples would show in these."""
    return any(known & 1 for _, known, _ in witnesses)


def fingerprint(example: Any) -> int:
    """56 bits of what an example is made of, of a large array so many elements; alike in every process.

    The lowest bit says whether any content was seen, or types and shapes alone.
    """
    digest, content_seen = hashlib.blake2b(digest_size=7), False
    waiting = [(example, _DEPTH)]
    for value, depth in waiting:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor | np.ndarray) else ""
        digest.update(f"{type(value).__name__}{getattr(value, 'dtype', '')}{shape}".encode())
        content = _content(value)
        if content is not None:
            digest.update(content)
            content_seen |= bool(content)
        elif depth:
            names, parts = _parts(value)
            digest.update(str(names).encode())
            waiting += [(part, depth - 1) for part in parts]
    return (int.from_bytes(digest.digest(), "big") & ~1) | content_seen


def _content(value: Any) -> bytes | None:
    """What a leaf holds; None of what has parts, or shows nothing without waiting for a device."""
    if isinstance(value, str | int | float | np.generic):
        return str(value).encode()
    if isinstance(value, bytes | bytearray | memoryview):
        value = np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray) or hasattr(type(value), "__array_interface__"):  # Pillow's images
        array = np.asarray(value)
        array = array.flat[_places(array.size)]  # [_ELEMENTS] or fewer
        return str(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
    of_tensor = isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_quantized
    if not of_tensor or value.layout is not torch.strided:
        return None
    plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    plain = plain.view(_SIZED.get(plain.element_size(), plain.dtype))  # nothing can be taken of uint16
    elements = plain.take(torch.from_numpy(_places(plain.numel())))  # [_ELEMENTS] or fewer
    content: bytes = elements.view(torch.uint8).numpy().tobytes()
    return content


@functools.lru_cache(maxsize=64)
def _places(size: int) -> NDArray[np.int64]:
    """Which elements of an array to look at, rising: all of few, else random ones, always the same.

    Evenly spaced ones may all be padding.
    """
    if size <= _ELEMENTS:
        return np.arange(size)
    return np.sort(np.random.Generator(np.random.PCG64(size)).integers(size, size=_ELEMENTS))


def _parts(value: Any) -> tuple[list[Any], list[Any]]:
    """The names of the parts of a value, or their number, and about so many of them."""
    if isinstance(value, list | tuple):
        return [len(value)], list(value[:: max(1, len(value) // _PARTS)])
    if isinstance(value, torch.Tensor):
        sparse = value.layout is torch.sparse_coo and value.device.type == "cpu"
        return [], [value._indices(), value._values()] if sparse else []
    if not isinstance(value, Mapping):
        # Of an object of some class; its numbers may be of that object alone, as a time is.
        known: Any = object if dataclasses.is_dataclass(value) else _TELLING
        named = getattr(value, "__dict__", {}).items()
        value = {name: part for name, part in named if isinstance(part, known)}
    return list(value), list(value.values())
