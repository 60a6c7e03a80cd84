"""Validation images, read and decoded anew for each evaluation by several threads."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from adaecho.errors import DataError


class ReadAnew:
    """Examples of a source in batches.

    Args:
        source: ``source[row]`` is an example, ``source.origin(row)`` its name.
        prepare: of one example: decodes and resizes.
        batch_size: examples at once.
        threads: that read and prepare.
    """

    def __init__(self, source: Any, prepare: Callable[[Any], Any], *, batch_size: int, threads: int) -> None:
        self._source, self._prepare = source, prepare
        self._batch_size, self._threads = batch_size, threads

    def __len__(self) -> int:
        return len(self._source)

    def batches(self, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], list[Any]]]:
        """Row numbers and prepared examples of each batch of these rows.

        Raises:
            DataError: an example can't be prepared: a metric over the others would be another metric.
        """
        with ThreadPoolExecutor(self._threads) as pool:
            for begin in range(0, len(rows), self._batch_size):
                part = rows[begin : begin + self._batch_size]
                yield part, list(pool.map(self._one, part))

    def _one(self, row: int) -> Any:
        example = self._source[row]
        try:
            return self._prepare(example)
        except ValueError as error:
            origin = getattr(self._source, "origin", None)
            name = f"example {row}" if origin is None else origin(row)
            raise DataError(f"validation, {name}: {error}; mend it, or take it out of the split") from error
