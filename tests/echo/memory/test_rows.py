"""Rows of structured arrays are views: what is written into one, or refilled, stays out of what is kept."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader
from adaecho.echo.memory.pytree import num_bytes

ROW = np.dtype([("x", "f4", (3,)), ("y", "i8")])


def table() -> np.ndarray[Any, Any]:
    rows = np.zeros(20, ROW)
    rows["y"] = np.arange(20)
    rows["x"] = np.arange(20)[:, None]
    return rows


class Refilled:
    """A source around one buffer of one row, or of a batch of them as a list, which it fills again."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        buffer = np.zeros(self.size, ROW)
        for number in range(24 * 5 // self.size):
            buffer["y"] = np.arange(self.size) + number * self.size
            buffer["x"] = buffer["y"][:, None]
            yield [buffer[place] for place in range(self.size)] if self.size > 1 else buffer[0]


def written(row: Any, *_: object) -> dict[str, Any]:
    x = row["x"]
    x += 100
    return {"x": x, "y": int(row["y"])}


@pytest.mark.parametrize("hook", ["augment", "decode"])
def test_a_row_of_a_structured_array_is_the_sources(hook: str) -> None:
    rows = table()
    echo: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 8}
    loader = EchoLoader(rows, 5, epochs=2, **{hook: written}, **echo)  # type: ignore[arg-type]
    found = {float(value) for batch in loader for value in (batch["x"][:, 0] - batch["y"])}
    assert found == {100.0}
    assert (rows == table()).all()


def test_a_row_that_is_filled_again_is_kept_as_it_was() -> None:
    echo: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 30}
    loader = EchoLoader(Refilled(1), 5, epochs=1, augment=written, **echo)
    found = [
        (float(x), int(y)) for batch in loader for x, y in zip(batch["x"][:, 0], batch["y"], strict=True)
    ]
    assert sorted(found) == sorted([(100.0 + y, y) for y in range(120)] * 2)


def test_batches_of_rows_that_are_filled_again_are_kept_as_they_were() -> None:
    loader = EchoLoader(Refilled(5), None, echo="batch", factor=2, batch_shuffle_buffer=4, epochs=1)
    found = [int(row["y"]) for batch in loader for row in batch]
    assert sorted(found) == sorted([*range(120)] * 2)


def test_a_row_takes_the_memory_of_its_fields() -> None:
    assert num_bytes(table()[0]) == ROW.itemsize
