"""Errors of the machine are raised, errors of examples are counted, and both name the example."""

import errno
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader
from adaecho.echo.read.chunks import is_of_machine
from adaecho.echo.variants import VARIANTS
from tests.echo.behavior.test_augment_and_collate import fail
from tests.echo.record_streams import Fetched
from tests.echo.sources import Dataset, Stream, arrays


def raised(action: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action()
    assert isinstance(caught.value, Exception)
    return caught.value


OF_MACHINE: list[Exception] = [
    urllib.error.URLError("connection reset"), http.client.IncompleteRead(b"", 7), MemoryError(),
    ConnectionResetError("peer went away"),
    *(OSError(number, "of the machine") for number in (errno.EIO, errno.EMFILE, errno.ENOSPC, errno.ESTALE)),
]  # fmt: skip
OF_EXAMPLE = [OSError("truncated"), OSError(errno.EINVAL, "seek"), KeyError("x")]


@pytest.mark.parametrize("error", [*OF_MACHINE, *OF_EXAMPLE], ids=repr)
def test_errors_of_the_machine_and_the_network(error: Exception) -> None:
    assert is_of_machine(error) == (error in OF_MACHINE)


def failing(error: Exception) -> Any:
    def read(row: int) -> int:
        if row == 3:
            raise error
        return row

    return read


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "processes": True}], ids=str)
def test_errors_of_the_machine_are_raised_and_bad_examples_counted(workers: dict[str, Any]) -> None:
    """Rows are read one by one or by ``__getitems__``."""
    common: dict[str, Any] = {"batch_size": 4, "order": "sequential", "max_bad_examples": 8, **workers}
    read = failing(OSError(errno.EMFILE, "Too many open files"))
    for given in ({"source": Fetched(8, read)}, {"source": range(8), "decode": read}):
        loader = EchoLoader(**given, **common)
        with loader, pytest.raises(OSError, match="Too many open files") as caught:
            next(iter(loader))
        assert "while reading" in caught.value.__notes__[0]
        assert loader.bad_examples == []
    with EchoLoader(Fetched(8, failing(OSError("broken data stream"))), **common) as loader:
        assert next(iter(loader)).tolist() == [0, 1, 2, 4]
        assert len(loader.bad_examples) == 1


def caught(source: Any, batch_size: int = 3, **arguments: Any) -> str:
    """The error of the first two batches, with its notes."""
    arguments = {"order": "sequential", **arguments}
    with EchoLoader(source, batch_size, **arguments) as loader, pytest.raises(Exception) as raised:  # noqa: PT011
        for _ in zip(range(2), loader, strict=False):
            pass
    return "\n".join([str(raised.value), *raised.value.__notes__])


def decode_ones(row: int) -> dict[str, int]:
    if row != 1:
        raise ValueError(f"row {row} is bad")
    return {"row": row}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("source", [[2] * 30, lambda: iter([2] * 30)], ids=["rows", "iterated"])
def test_a_source_with_only_bad_examples_is_an_error(source: Any, num_workers: int) -> None:
    message = caught(source, decode=decode_ones, max_bad_examples=100, num_workers=num_workers)
    assert "were bad" in message


def test_a_good_example_among_many_bad_ones_is_found() -> None:
    rows = [2] * 800 + [1] + [2] * 800
    loader = EchoLoader(rows, 1, decode=decode_ones, max_bad_examples=1600)
    assert [int(batch["row"]) for batch in islice(loader, 2)] == [1] * 2
    assert len(loader.bad_examples) == 1600


def fail_with_rng(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if example["label"] == 5:
        raise KeyError(f"no five {rng.random()}")
    return example


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("augment", [fail_with_rng, fail])
@pytest.mark.parametrize("echo", VARIANTS)
def test_an_error_of_augment_names_the_example(augment: Any, echo: str, num_workers: int) -> None:
    common: dict[str, Any] = {"augment": augment, "echo": echo, "num_workers": num_workers}
    assert "while augmenting example 5 of Dataset" in caught(Dataset(9), **common)
    if not num_workers:  # worker processes start slowly
        assert "while augmenting row 5 of the source" in caught(arrays(9), **common)


def test_an_error_names_the_row_or_the_count_of_a_stream() -> None:
    common: dict[str, Any] = {"augment": fail_with_rng}
    assert "while augmenting example 5 of Dataset" in caught(Dataset(6), order="permutation", **common)
    assert "augmenting example 5 (counted from 0 over all passes) of Stream" in caught(Stream(9), **common)
    assert "augmenting example 5 of Dataset" in caught(
        Dataset(9), decode=dict, buffer_format="encoded", **common
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_collate_names_the_first_and_the_last_example(num_workers: int) -> None:
    def collate(examples: list[Any]) -> Any:
        raise KeyError(len(examples))

    for source, name in ((Dataset(9), "example {} of Dataset"), (arrays(9), "row {} of the source")):
        named = f"while collating 3 examples, from {name.format(0)} to {name.format(2)}"
        for echo in VARIANTS:
            assert named in caught(source, collate=collate, echo=echo, num_workers=num_workers)
    assert "while collating example 0 of Dataset" in caught(Dataset(9), 1, collate=collate)


def test_an_error_of_different_shapes_names_the_remedy() -> None:
    def sizes() -> Iterator[Any]:
        for row in range(9):
            yield {"x": np.zeros(3 + (row == 4))}

    for num_workers in (0, 2):
        message = caught(sizes, num_workers=num_workers)
        assert "of equal shape; or pass collate=" in message
        assert (
            "while collating 3 examples, from example 3 (counted from 0 over all passes) of sizes" in message
        )
