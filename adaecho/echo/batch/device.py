"""A batch of any form: its way to the device, beside the training step, and how many examples it holds."""

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from adaecho.echo.memory.pytree import children, with_children


class ToDevice:
    """Moves batches in the loader's threads.

    On CUDA a batch is pinned and copied on a stream of its own, so that the copy runs beside the step on the
    batch before. A batch echo repeats what lies on the device already.

    Args:
        device: where to; None leaves batches as they are.

    Raises:
        ValueError: torch knows no such device, or doesn't find it.
    """

    def __init__(self, device: str | torch.device | None) -> None:
        try:
            self._device = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device={device!r}: torch knows no such device ({error})") from error
        self._cuda = self._device is not None and self._device.type == "cuda"
        if self._device is not None and not _is_found(self._device):
            kind = self._device.type.upper()
            raise ValueError(f"device='{device}': torch finds no {kind} device here; give None, or 'cpu'")
        if self._device == torch.device("cuda"):
            # The current one of this thread: that of the loader's threads would be the first.
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream: torch.cuda.Stream | None = None

    def move(self, batch: Any) -> Any:
        """The batch there, complete; called by the loader's threads."""
        if self._device is None:
            return batch
        if not self._cuda:
            return on_tensors(batch, lambda tensor: tensor.to(self._device))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = on_tensors(batch, self._copy)
        # This thread waits, not the consumer's.
        self._stream.synchronize()
        return moved

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # What lies on a device already can't be pinned.
        pinned = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
        return pinned.to(self._device, non_blocking=True)

    def received(self, batch: Any) -> None:
        """Called by the consumer's thread: the memory is in use on its stream from here on."""
        if not self._cuda:
            return
        stream = torch.cuda.current_stream(self._device)
        # A thread may have cloned a repeat, on the default stream.
        stream.wait_stream(torch.cuda.default_stream(self._device))
        on_tensors(batch, lambda tensor: tensor.record_stream(stream))


def _is_found(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_available()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
    return True


def on_tensors(batch: Any, call: Callable[[torch.Tensor], Any]) -> Any:
    """A batch of the same form with the result of a call for each tensor; what is no tensor stays.

    Raises:
        ValueError: it is a mapping of a kind that can't be made again.
    """
    if isinstance(batch, torch.Tensor):
        return call(batch)
    # A UserDict is, e.g., the BatchEncoding of Hugging Face.
    if isinstance(batch, dict | UserDict | list | tuple):
        return with_children(batch, [on_tensors(part, call) for _, part in children(batch)])
    if isinstance(batch, Mapping):
        raise ValueError(
            f"device=: a batch that is a {type(batch).__name__} can't be made again from its fields; make it "
            "a dict or a UserDict, or leave device out"
        )
    return batch


def batch_length(batch: Any) -> int:
    """Examples in a batch.

    * An array or tensor: its leading length.
    * A mapping or a tuple, whose parts are columns: that of the first array; without one, of the first
      mapping, tuple or list, where a tuple or list has one entry for each example. Numbers and text tell
      nothing.
    * A list: the leading length that all arrays in it share, which is what ``default_collate`` makes;
      else its entries are the examples.

    Raises:
        ValueError: none of these tells.
    """
    length = _length(batch)
    if length is None:
        raise ValueError(
            f"source: can't tell how many examples are in a batch that is a {type(batch).__name__}; give "
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
    """The leading lengths of the arrays among them."""
    shapes = [getattr(value, "shape", None) for value in values]
    return [int(shape[0]) for shape in shapes if isinstance(shape, tuple) and len(shape)]
