"""An error of augment or collate names the examples that it was given."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader
from adaecho.echo.variants import VARIANTS
from tests.echo.global_augments import fail
from tests.echo.sources import Dataset, Stream, arrays


def caught(source: Any, batch_size: int = 3, **arguments: Any) -> str:
    """The error that the first two batches end in, with its notes."""
    arguments = {"order": "stored", **arguments}
    with EchoLoader(source, batch_size, **arguments) as loader, pytest.raises(Exception) as raised:  # noqa: PT011
        for _ in zip(range(2), loader, strict=False):
            pass
    return "\n".join([str(raised.value), *raised.value.__notes__])


def no_five(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if example["label"] == 5:
        raise KeyError(f"no five {rng.random()}")
    return example


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("augment", [no_five, fail])
@pytest.mark.parametrize("echo", VARIANTS)
def test_the_example_that_an_augment_fails_at(augment: Any, echo: str, num_workers: int) -> None:
    common: dict[str, Any] = {"augment": augment, "echo": echo, "num_workers": num_workers}
    assert "while augmenting example 5 of Dataset" in caught(Dataset(9), **common)
    if not num_workers:  # where it could be a process, which takes seconds to start
        assert "while augmenting row 5 of the source" in caught(arrays(9), **common)


def test_the_row_is_the_permuted_one_and_a_stream_counts() -> None:
    assert "while augmenting example 5 of Dataset" in caught(Dataset(6), order="permutation", augment=no_five)
    stream = caught(Stream(9), augment=no_five)
    assert "while augmenting example 5 (counted from 0 over all passes) of Stream" in stream
    encoded = caught(Dataset(9), augment=no_five, decode=dict, place="encoded")
    assert "while augmenting example 5 of Dataset" in encoded


def test_a_block_names_the_first_and_the_last() -> None:
    class Block:
        def block(self, fields: Any, _: Any) -> Any:
            if 5 in fields["label"]:
                raise KeyError("no five")
            return fields

    named = "while augmenting 3 examples, from example 3 of Dataset to example 5 of Dataset"
    assert named in caught(Dataset(9), augment=Block())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_names_the_first_and_the_last(num_workers: int) -> None:
    def collate(examples: list[Any]) -> Any:
        raise KeyError(len(examples))

    for source, name in ((Dataset(9), "example {} of Dataset"), (arrays(9), "row {} of the source")):
        named = f"while collating 3 examples, from {name.format(0)} to {name.format(2)}"
        for echo in VARIANTS:
            assert named in caught(source, collate=collate, echo=echo, num_workers=num_workers)
    assert "while collating example 0 of Dataset" in caught(Dataset(9), 1, collate=collate)


def test_shapes_that_differ_name_two_examples() -> None:
    def sizes() -> Iterator[Any]:
        for row in range(9):
            yield {"x": np.zeros(3 + (row == 4))}

    for num_workers in (0, 2):
        told = caught(sizes, num_workers=num_workers)
        assert "shapes, (3,) and (4,)" in told
        assert "while collating example 3 (counted from 0 over all passes) of sizes and example 4 (c" in told
