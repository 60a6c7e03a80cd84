"""Restoring buffers: examples that are read again."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from tests.echo.others import plain
from tests.echo.sources import example, held_serials
from tests.helpers import through_torch_save


def add_random_integer(one: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    one["x"] += rng.integers(100)
    return one


add_random_integer.thread_safe = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 3}, {"num_workers": 2, "processes": True}], ids=str)
@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_a_resume_reads_each_buffered_example_once(kind: str, workers: Any, tmp_path: Path) -> None:
    reads = tmp_path / "reads"

    class Rows:
        """Appends the number of each row that any process reads to a file."""

        thread_safe = True

        def __len__(self) -> int:
            return 3000

        def __getitem__(self, row: int) -> Any:
            with reads.open("a") as file:
                file.write(f"{row}\n")
            return example(row)

    source: Any = Rows() if kind == "rows" else lambda: map(Rows().__getitem__, range(3000))
    common: dict[str, Any] = {
        "batch_size": 8, "echo": "example_before_augmentation", "factor": 4, "shuffle_buffer": 90,
        "augment": add_random_integer, "order": "sequential",
    }  # fmt: skip
    with EchoLoader(source, **common) as loader:
        list(islice(loader, 30))
        state, held = loader.state_dict(), loader.fresh_examples_in_buffer
        expected = [batch["x"].tolist() for batch in islice(loader, 100)]
    reads.unlink()
    with EchoLoader(source, **common, **workers) as restored:
        restored.load_state_dict(through_torch_save(state))
        assert restored.fresh_examples == state["fresh_examples"]
        assert reads.exists() == (kind == "stream")  # rows are read with the next batch
        batches = iter(restored)
        assert next(batches)["x"].tolist() == expected[0]
        assert kind == "stream" or restored.reread_examples == held
        assert [batch["x"].tolist() for batch in islice(batches, 99)] == expected[1:]
        assert kind == "stream" or restored.reread_examples == held
    read = reads.read_text().split()
    assert len(set(read)) == len(read)
    if workers == {}:
        assert len(read) == restored.reread_examples + restored.fresh_examples - state["fresh_examples"]


def test_an_iterable_that_yields_fewer_examples_again_is_refused() -> None:
    lengths = iter([9, 2, 2])
    loader = EchoLoader(lambda: iter(range(next(lengths))), 2, epochs=1)
    list(islice(loader, 4))
    state = loader.state_dict()
    with pytest.raises(ValueError, match="must yield the same examples again"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("source", [range(40), lambda: iter(range(40))], ids=["rows", "stream"])
def test_an_example_that_fails_when_read_again_is_an_error(source: Any) -> None:
    broken: set[int] = set()

    def decode(number: int) -> int:
        if number in broken:
            raise ValueError("not this time")
        return number

    common: dict[str, Any] = {
        "shuffle_buffer": 8,
        "order": "sequential",
        "decode": decode,
        "max_bad_examples": 5,
    }
    loader, restored = (EchoLoader(source, 2, **common) for _ in range(2))
    next(iter(loader))
    broken.add(held_serials(loader)[0])
    restored.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="not this time") as caught:
        list(islice(restored, 40))
    assert "again for the buffer; the first read succeeded" in caught.value.__notes__[0]


@pytest.mark.parametrize("decode", [None, lambda batch: batch["x"]], ids=["", "decode"])
@pytest.mark.parametrize("kind", ["stream", "rows"])
def test_reread_examples_counts_the_examples_of_whole_batches(kind: str, decode: Any) -> None:
    batches = [torch.arange(3 + number % 2) for number in range(40)]
    source: Any = batches if decode is None else [{"x": batch, "bytes": b"more"} for batch in batches]
    source = source if kind == "rows" else source.__iter__
    common: dict[str, Any] = {"echo": "batch", "factor": 2, "batch_shuffle_buffer": 6, "order": "sequential"}
    loader, restored = (EchoLoader(source, None, decode=decode, **common) for _ in range(2))
    list(islice(loader, 9))
    restored.load_state_dict(state := loader.state_dict())
    read = range(state["next_index"]) if kind == "stream" else sorted(set(held_serials(loader)))
    assert plain(list(islice(restored, 60))) == plain(list(islice(loader, 60)))
    assert restored.reread_examples == sum(3 + number % 2 for number in read)
