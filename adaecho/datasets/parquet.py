"""Parquet files, and what is wrong with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def read_schema(file: Path) -> Any:
    """The Arrow schema of a file.

    Raises:
        DataError: it is damaged.
    """
    from pyarrow import parquet

    with readable(file):
        return parquet.read_schema(file)


def describe(schema: Any) -> str:
    """Its columns with their types, for a message."""
    return ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"
