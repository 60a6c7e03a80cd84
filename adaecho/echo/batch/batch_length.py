"""How many examples a batch of a pre-batched source holds."""

from collections.abc import Iterable, Mapping
from typing import Any


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
