"""Parquet files, and what is wrong with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.errors import DataError


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn what a damaged file raises inside the block into a DataError that names it."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: not readable as parquet ({str(error).splitlines()[0]}); truncated? Fetch it again"
        ) from error


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The ``ParquetFile`` of a file.

    Raises:
        DataError: it is damaged, or its footer counts less than no rows.
    """
    from pyarrow import parquet

    with readable(file), parquet.ParquetFile(file) as table:
        about = table.metadata
        counts = [about.num_rows, *(about.row_group(group).num_rows for group in range(about.num_row_groups))]
        if min(counts) < 0:
            raise DataError(f"{file}: not readable as parquet (it counts {min(counts)} rows); fetch it again")
        yield table


def read_schema(file: Path) -> Any:
    """The Arrow schema of a file.

    Raises:
        DataError: it is damaged.
    """
    from pyarrow import parquet

    with readable(file):
        return parquet.read_schema(file)


def whole_numbers(column: Any, origin: str) -> NDArray[np.int64]:
    """A column of integers of whichever size, -1 where it holds none.

    Raises:
        DataError: one is larger than 63 bits hold.
    """
    import pyarrow

    try:
        return np.asarray(column.cast(pyarrow.int64()).fill_null(-1).to_numpy(), np.int64)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{origin}: a label can't be ({error})") from error


def describe(schema: Any) -> str:
    """Its columns with their types, for a message."""
    return ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"
