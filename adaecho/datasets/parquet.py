"""Parquet files, and what is wrong with them."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.errors import DataError

# As the hub names them: which part of how many, and once a digest of the content.
_PART = re.compile(r"[-.](\d+)-of-(\d+)(?:-[0-9a-f]{16})?\.\w+(?:\.gz)?$")
_MOST_ROWS, _MOST_UNPACKED = 256, 1 << 26  # rows, and bytes, at once
_MOST_HELD = 1 << 28  # bytes that a column may unpack to, of whatever file; else four times the file's


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn what a damaged file raises inside the block into a DataError that names it."""
    import pyarrow

    if file.exists() and not file.is_file():  # to open a pipe would wait for ever
        raise DataError(f"{file}: is no regular file; remove it")
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
        DataError: it is damaged, or its footer counts less than no rows, more than it has bytes, or others
            than its row groups have.
    """
    from pyarrow import parquet

    with readable(file), parquet.ParquetFile(file, page_checksum_verification=True) as table:
        about = table.metadata
        counts = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
        wrong = [count for count in (about.num_rows, *counts) if not 0 <= count <= file.stat().st_size]
        if wrong:
            raise DataError(f"{file}: not readable as parquet (it counts {wrong[0]} rows); fetch it again")
        if sum(counts) != about.num_rows:
            raise DataError(
                f"{file}: not readable as parquet (it counts {about.num_rows} rows, and {sum(counts)} in its "
                "row groups); fetch it again"
            )
        yield table


def class_names(files: Sequence[Path], column: str) -> tuple[str, ...]:
    """What ``datasets`` wrote of the numbers in a column; none where something else wrote all files.

    Raises:
        DataError: one file numbers other classes than another.
    """
    found: tuple[str, ...] = ()
    for file in files:
        try:
            about = json.loads(read_schema(file).metadata[b"huggingface"])
            names = tuple(map(str, about["info"]["features"][column]["names"]))
        except (KeyError, TypeError, ValueError, RecursionError):
            continue
        found = found or names
        if names != found:
            raise DataError(
                f"{file}: its labels number other classes than those of the tables before it: "
                f"{', '.join(names[:5])} and {', '.join(found[:5])}; write them with one numbering"
            )
    return found


def check_parts(files: Iterable[Path]) -> None:
    """Raises DataError where a part of a data set lies there twice, or it is divided in two ways."""
    parts: dict[tuple[str, str], Path] = {}
    divisions: dict[str, tuple[str, Path]] = {}
    for file in files:
        if (found := _PART.search(file.name)) is None:
            continue
        whole, part, number = str(file)[: -len(found[0])], *found.groups()
        same_part = parts.setdefault((whole, part), file)
        divided, first = divisions.setdefault(whole, (number, file))
        if same_part != file or divided != number:
            other = first if same_part == file else same_part
            raise DataError(
                f"{file}: lies beside {other.name}, as of another download of the same data, and examples "
                "would be read twice; move one of them away"
            )


def values(table: Any, file: Path, column: str, groups: list[int] | None = None) -> Iterator[Any]:
    """A column, of all row groups or some, as Arrow arrays of few rows: no more is unpacked at once.

    A page of a dictionary, or one of zeros, makes a hundred gigabytes out of some hundred bytes.

    Raises:
        DataError: of a row group it takes more than 256 MiB, and more than a hundred times the file's size.
    """
    most = max(_MOST_HELD, 100 * file.stat().st_size)  # text is packed ten times
    rows = _MOST_ROWS
    for group in range(table.num_row_groups) if groups is None else groups:
        about = table.metadata.row_group(group)
        chunks = [about.column(number) for number in range(about.num_columns)]
        parts = [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{column}.")]
        size = sum(part.total_uncompressed_size for part in parts)
        if size > most:
            raise _too_large(file, column, most, group)
        rows = max(
            1, min(rows, _MOST_UNPACKED // max(size, 1))
        )  # each may repeat the largest value of a page
    for some in table.iter_batches(batch_size=rows, row_groups=groups, columns=[column], use_threads=False):
        yield some.column(0)


def held(table: Any, file: Path, column: str, groups: list[int] | None = None) -> Any:
    """``values`` as one chunked array.

    Raises:
        DataError: they take more than 256 MiB, and more than four times what the file does.
    """
    import pyarrow

    most, size, parts = max(_MOST_HELD, 4 * file.stat().st_size), 0, []
    for some in values(table, file, column, groups):
        size += some.nbytes
        if size > most:
            raise _too_large(file, column, most, *(groups or ()))
        parts.append(some)
    return pyarrow.chunked_array(parts, table.schema_arrow.field(column).type)


def _too_large(file: Path, column: str, most: int, *groups: int) -> DataError:
    where = f"row group {groups[0]} of its" if groups else "its"
    return DataError(
        f"{file}: {where} column {column!r} unpacks to more than {most:,} bytes; write it anew in smaller "
        "row groups"
    )


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
