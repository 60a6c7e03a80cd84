"""Copy batches of any structure to a device, and count their examples."""

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from adaecho.echo.memory.pytree import children, with_children


class ToDevice:
    """Copies batches to a device while the training loop computes; with None, leaves batches unchanged."""

    def __init__(self, device: str | torch.device | None) -> None:
        # The device is resolved here, because "cuda" means the calling thread's current device, which in the
        # loader's threads would be the first one.
        self._device = None if device is None else torch.empty(0, device=device).device
        self._cuda = self._device is not None and self._device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None

    def move(self, batch: Any) -> Any:
        """Copy a batch to the device, in a thread of the loader."""
        if self._device is None:
            return batch
        if not self._cuda:
            return on_tensors(batch, lambda part: part.to(self._device))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = on_tensors(batch, self._copy)
        # The loader's thread waits for the copy here, so that the training loop does not have to.
        self._stream.synchronize()
        return moved

    def _copy(self, part: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            # The tensors inside this object are unknown, so ``received`` could not record that the training
            # loop's stream uses their memory. The copy therefore runs on the default stream.
            with torch.cuda.stream(torch.cuda.default_stream(self._device)):
                return part.to(self._device)
        # torch can pin only tensors in CPU memory.
        pinned = part.pin_memory() if part.device.type == "cpu" else part
        return pinned.to(self._device, non_blocking=True)

    def received(self, batch: Any) -> None:
        """Keep a batch's memory from being reused before the calling thread's CUDA stream has read it."""
        if not self._cuda:
            return
        # Otherwise torch could reuse the memory for the next copy while the step still reads it.
        stream = torch.cuda.current_stream(self._device)
        # A loader thread may have cloned this repeat on the default stream, which must finish first.
        stream.wait_stream(torch.cuda.default_stream(self._device))
        on_tensors(batch, lambda part: part.record_stream(stream) if isinstance(part, torch.Tensor) else part)


def on_tensors(batch: Any, call: Callable[[Any], Any]) -> Any:
    """Apply ``call`` to all tensors in a nested batch, and return the results with the same structure."""
    # Hugging Face's BatchEncoding, for example, is a UserDict.
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
    """Return the number of examples in a batch, inferred from its structure.

    * Array or tensor: the length of its first axis.
    * Mapping or tuple: the length of its first array or, without arrays, of its first nested container.
    * List: the common length of its arrays if there is one, otherwise the length of the list.
    * Other objects except strings and bytes: ``len(batch)``.

    Raises:
        ValueError: none of these rules applies.
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
    parts = [part for _, part in children(value)]
    leading = [int(part.shape[0]) for part in parts if getattr(part, "shape", ())]
    if isinstance(value, list):
        return leading[0] if len(set(leading)) == 1 else len(value)
    if isinstance(value, Mapping | tuple):
        lengths = (len(part) if isinstance(part, tuple | list) else _length(part) for part in parts)
        return next((length for length in (*leading, *lengths) if length is not None), None)
    return len(value) if hasattr(value, "__len__") and not isinstance(value, str | bytes) else None
