"""Whether a source gives the same things again: fingerprints of a few, compared when these are read again.

What can only be iterated is read again from some place on after a resume. Where its order, or what it draws,
follows no seed, other things come then: some would be used too often, others never.
"""

import dataclasses
import hashlib
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_KEPT = 1024  # many more than are read ahead of the consumer
_IN_A_STATE = 16  # buffers that shuffle a little give the same thing at some places
_ELEMENTS, _PARTS, _DEPTH = 256, 8, 4  # of an array and of a list, about; of what holds others

Witness = tuple[int, int]
"""The serial of a thing, and its fingerprint."""


class Witnesses:
    """Some of the things that a reader has read. One thread adds them while another saves a state.

    Args:
        spacing: one of so many things is a witness.
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

    def add(self, serial: int, thing: Any) -> None:
        """Remember a thing, if it is to be a witness."""
        if serial // self._world % self._spacing:
            return
        witness = serial, fingerprint(thing)
        with self._lock:
            self._seen.append(witness)

    def before(self, serial: int) -> list[list[int]]:
        """The last few before a serial, as plain numbers: the same ones however far has been read ahead."""
        with self._lock:
            return [list(witness) for witness in self._seen if witness[0] < serial][-_IN_A_STATE:]

    def expect(self, witnesses: list[list[int]]) -> None:
        """What a state holds: these things are to come again, as far as they are read again."""
        self._expected = {int(serial): int(found) for serial, found in witnesses}
        with self._lock:
            self._seen = deque(self._expected.items(), maxlen=_KEPT)

    def is_as_before(self, serial: int, thing: Any) -> bool:
        """Whether a thing that is read again is what it was, as far as is known."""
        expected = self._expected.pop(serial, None)
        return expected is None or expected == fingerprint(thing)


def fingerprint(thing: Any) -> int:
    """56 bits of about so many elements of each array, by content: the same in every process."""
    digest = hashlib.blake2b(digest_size=7)
    _feed(thing, digest.update, _DEPTH)
    return int.from_bytes(digest.digest(), "big")


def _feed(thing: Any, update: Any, depth: int) -> None:
    update(type(thing).__name__.encode())
    if isinstance(thing, torch.Tensor):
        thing = _array(thing)
    if isinstance(thing, np.ndarray):
        update(f"{thing.dtype}{thing.shape}".encode())
        some = thing.flat[:: max(1, thing.size // _ELEMENTS)]
        thing = some.tolist() if some.dtype.hasobject else some.tobytes()
    if isinstance(thing, bytes | bytearray | memoryview):
        update(bytes(thing[:: max(1, len(thing) // (_ELEMENTS * 16))]))
    elif isinstance(thing, str | int | float | np.generic):
        update(str(thing).encode())
    elif isinstance(thing, list | tuple) and depth:
        update(str(len(thing)).encode())
        for part in thing[:: max(1, len(thing) // _PARTS)]:
            _feed(part, update, depth - 1)
    elif isinstance(thing, Mapping) and depth:
        for key, value in thing.items():
            update(str(key).encode())
            _feed(value, update, depth - 1)
    elif dataclasses.is_dataclass(thing) and depth:  # of other objects what is content can't be told
        _feed(getattr(thing, "__dict__", {}), update, depth - 1)


def _array(tensor: torch.Tensor) -> Any:
    """As NumPy sees it; its form alone where it can't, or on a device that one would have to wait for."""
    try:
        return tensor.detach().numpy()
    except (TypeError, RuntimeError):
        return f"{tensor.dtype}{tuple(tensor.shape)}"
