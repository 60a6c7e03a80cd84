"""Whether a source gives the same examples again: fingerprints of a few, compared when these are read again.

What can only be iterated is read again from some place on after a resume. Where its order, or what it draws,
follows no seed, other examples come then: some would be used too often, others never. What is said of
examples goes for whole batches, where the source gives these.
"""

import dataclasses
import functools
import hashlib
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_KEPT = 1024  # many more than are read ahead of the consumer
_FIRST = 32  # of a pass, each a witness: few have been read when an early state is made
_IN_A_STATE = 32  # buffers that shuffle a little give the same example at some places
_WHOLE_BYTES, _ELEMENTS = 1 << 14, 2048  # of an array: what is small, and of what is larger so many
_PARTS, _DEPTH = 8, 4  # of a list, about; of what holds others

Witness = tuple[int, int]
"""The serial of an example, and its fingerprint."""


class Witnesses:
    """Some of the examples that a reader has read. One thread adds them while another saves a state.

    Args:
        spacing: one of so many examples is a witness.
        world: ranks that share out serials.
    """

    def __init__(self, spacing: int = 1, world: int = 1) -> None:
        self._spacing, self._world = spacing, world
        self._lock = threading.Lock()
        self._seen: deque[Witness] = deque(maxlen=_KEPT)
        self._expected: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._seen.clear()

    def add(self, serial: int, index: int, example: Any, *, always: bool = False) -> None:
        """Remember an example, if it is to be a witness; its index in its pass is counted over all ranks."""
        if not always and index // self._world >= _FIRST and serial // self._world % self._spacing:
            return
        witness = serial, fingerprint(example)
        with self._lock:
            self._seen.append(witness)

    def before(self, serial: int) -> list[list[int]]:
        """The last few before a serial, as plain numbers: the same ones however far has been read ahead."""
        with self._lock:
            return [list(witness) for witness in self._seen if witness[0] < serial][-_IN_A_STATE:]

    def expect(self, witnesses: list[list[int]]) -> None:
        """What a state holds: these examples are to come again, as far as they are read again."""
        self._expected = {int(serial): int(known) for serial, known in witnesses}
        with self._lock:
            self._seen = deque(self._expected.items(), maxlen=_KEPT)

    def is_as_before(self, serial: int, example: Any) -> bool:
        """Whether an example that is read again is what it was, as far as is known."""
        expected = self._expected.pop(serial, None)
        return expected is None or expected == fingerprint(example)


def fingerprint(example: Any) -> int:
    """56 bits of what an example is made of, of a large array about so many elements; alike in every process.

    The lowest bit says whether any content was seen, or types and shapes alone.
    """
    digest = _Digest()
    digest.feed(example, _DEPTH)
    return (int.from_bytes(digest.of_all.digest(), "big") & ~1) | digest.saw_content


def tells_content(witnesses: list[list[int]]) -> bool:
    """Whether another order of the examples would show in these."""
    return any(known & 1 for _, known in witnesses)


class _Digest:
    def __init__(self) -> None:
        self.of_all = hashlib.blake2b(digest_size=7)
        self.saw_content = False

    def feed(self, value: Any, depth: int) -> None:
        """Add a value, and what it holds down to a depth."""
        self.of_all.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            self.of_all.update(f"{value.dtype}{tuple(value.shape)}".encode())
            for array in _arrays(value):
                self._feed_array(array)
        elif isinstance(value, np.ndarray) or hasattr(type(value), "__array_interface__"):  # Pillow's images
            self._feed_array(np.asarray(value))
        elif isinstance(value, bytes | bytearray | memoryview):
            self._feed_array(np.frombuffer(value, np.uint8))
        elif isinstance(value, str | int | float | np.generic):
            self._feed_content(str(value).encode())
        elif isinstance(value, list | tuple) and depth:
            self.of_all.update(str(len(value)).encode())
            for part in value[:: max(1, len(value) // _PARTS)]:
                self.feed(part, depth - 1)
        elif isinstance(value, Mapping) and depth:
            self._feed_named(value, depth)
        elif dataclasses.is_dataclass(value) and depth:
            self._feed_named(getattr(value, "__dict__", {}), depth)
        elif depth:  # an object of some class; its numbers may be of that object alone, as a time is
            attributes = getattr(value, "__dict__", {})
            self._feed_named(
                {name: part for name, part in attributes.items() if isinstance(part, _CONTENT)}, depth
            )

    def _feed_named(self, parts: Mapping[Any, Any], depth: int) -> None:
        for name, part in parts.items():
            self.of_all.update(str(name).encode())
            self.feed(part, depth - 1)

    def _feed_array(self, array: NDArray[Any]) -> None:
        """All of a small array, else elements at random places: evenly spaced ones may all be padding."""
        self.of_all.update(f"{array.dtype}{array.shape}".encode())
        if array.nbytes > _WHOLE_BYTES:
            array = array.flat[_indices(array.size)]
        self._feed_content(str(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())

    def _feed_content(self, content: bytes) -> None:
        self.of_all.update(content)
        self.saw_content |= bool(content)


@functools.lru_cache(maxsize=64)
def _indices(size: int) -> NDArray[np.int64]:
    """The indices of the elements of an array to look at, rising, int64 [_ELEMENTS]; always the same."""
    return np.sort(np.random.Generator(np.random.PCG64(size)).integers(size, size=_ELEMENTS))


_CONTENT = (torch.Tensor, np.ndarray, bytes, bytearray, str, list, tuple, Mapping)
_SAME_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _arrays(tensor: torch.Tensor) -> list[NDArray[Any]]:
    """A tensor as NumPy sees it, its bits where NumPy hasn't its type; a sparse one by its parts.

    None of another layout, nor on another device, which one would have to wait for.
    """
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [*_arrays(tensor._indices()), *_arrays(tensor._values())]
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return []
    try:
        return [tensor.resolve_conj().resolve_neg().numpy()]
    except (TypeError, RuntimeError):
        same_bits = _SAME_BITS.get(tensor.element_size())
        return [] if tensor.is_quantized or same_bits is None else [tensor.view(same_bits).numpy()]
