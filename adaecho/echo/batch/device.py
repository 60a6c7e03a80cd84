"""Batches of any form: copies to a device during the step, and the number of examples."""

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from adaecho.echo.memory.pytree import children, with_children


class ToDevice:
    """Copies batches to a device in the loader's threads.

    For CUDA it pins a batch and copies it on a separate stream, during the step on the previous batch. Batch
    echo repeats batches on the device.

    Args:
        device: target device; None leaves batches unchanged.

    Raises:
        ValueError: torch does not know the device, or does not find it.
    """

    def __init__(self, device: str | torch.device | None) -> None:
        try:  # "cuda" is this thread's current device: in the loader's threads it would be the first device
            self._device = None if device is None else torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ValueError(
                f"device={str(device)!r}: torch finds no such device; pass None, or 'cpu' ({error})"
            ) from error
        self._cuda = self._device is not None and self._device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None

    def move(self, batch: Any) -> Any:
        """Return the batch on the device; called by the loader's threads."""
        if self._device is None:
            return batch
        if not self._cuda:
            return on_tensors(batch, lambda part: part.to(self._device))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = on_tensors(batch, self._copy)
        # The loader's thread waits, not the consumer.
        self._stream.synchronize()
        return moved

    def _copy(self, part: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            # Its tensors are unknown, so ``received`` cannot protect memory of the separate stream.
            with torch.cuda.stream(torch.cuda.default_stream(self._device)):
                return part.to(self._device)
        # torch pins CPU tensors only.
        pinned = part.pin_memory() if part.device.type == "cpu" else part
        return pinned.to(self._device, non_blocking=True)

    def received(self, batch: Any) -> None:
        """Record, in the consumer's thread, that its stream uses the memory."""
        if not self._cuda:
            return
        stream = torch.cuda.current_stream(self._device)
        # A thread may have cloned a repeat, on the default stream.
        stream.wait_stream(torch.cuda.default_stream(self._device))
        on_tensors(batch, lambda part: part.record_stream(stream) if isinstance(part, torch.Tensor) else part)


def on_tensors(batch: Any, call: Callable[[Any], Any]) -> Any:
    """Apply a function to each tensor of a batch, and to each object with ``to(device)``.

    Raises:
        ValueError: an object holds tensors but has no ``to``.
    """
    # A UserDict is, e.g., the BatchEncoding of Hugging Face.
    own = not isinstance(batch, dict | UserDict | list)
    if own and callable(getattr(batch, "to", None)):  # a tensor, PackedSequence, TensorDict, ...
        return call(batch)
    if isinstance(batch, dict | UserDict | list | tuple):
        return with_children(batch, [on_tensors(part, call) for _, part in children(batch)])
    held = getattr(batch, "__dict__", {}).values()
    if isinstance(batch, Mapping) or any(isinstance(part, torch.Tensor) for part in held):
        raise ValueError(
            f"device=: a batch of class {type(batch).__name__} has no method to(device); add the method, "
            "return a dict or a UserDict, or leave out device"
        )
    return batch


def batch_length(batch: Any) -> int:
    """Return the number of examples in a batch.

    * An array or tensor: its leading length.
    * A mapping or tuple of columns: the leading length of the first array. Without arrays: the length of the
      first mapping, tuple or list, with one entry for each example.
    * A list: the leading length that all its arrays share, as ``default_collate`` makes; else its length.

    Raises:
        ValueError: none of these applies.
    """
    length = _length(batch)
    if length is None:
        raise ValueError(
            f"source: the number of examples in a batch of class {type(batch).__name__} is unknown; pass "
            "batch_length=, a function of the batch"
        )
    return length


def _length(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return int(shape[0]) if len(shape) else None
    if isinstance(value, str | bytes):
        return None
    if isinstance(value, list):
        leading = _leading_lengths(value)
        return leading[0] if leading and len(set(leading)) == 1 else len(value)
    if isinstance(value, Mapping):
        return _of_columns(list(value.values()))
    if isinstance(value, tuple):
        return _of_columns(value)
    return len(value) if hasattr(value, "__len__") else None


def _of_columns(columns: Iterable[Any]) -> int | None:
    leading = _leading_lengths(columns)
    if leading:
        return leading[0]
    lengths = (len(column) if isinstance(column, tuple | list) else _length(column) for column in columns)
    return next((length for length in lengths if length is not None), None)


def _leading_lengths(values: Iterable[Any]) -> list[int]:
    """Leading lengths of the arrays in a sequence."""
    shapes = [getattr(value, "shape", None) for value in values]
    return [int(shape[0]) for shape in shapes if isinstance(shape, tuple) and len(shape)]
