"""State after every batch, for every variant, source and number of workers."""

import io
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from tests.echo.sources import IDS, SOURCES, VARIANTS, Dataset, arrays
from tests.helpers import through_torch_save


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_restores_at_every_batch(variant: dict[str, Any], kind: str, num_workers: int) -> None:
    make, augment, _, extra = SOURCES[kind]
    common: dict[str, Any] = {
        "batch_size": 4, "shuffle_buffer": 9, "seed": 3, "augment": augment, **variant, **extra,
    }  # fmt: skip
    with EchoLoader(make(11), num_workers=num_workers, **common) as loader:
        iterator = iter(loader)
        states, batches, counts = [loader.state_dict()], [], [0]
        for step in range(8):
            batches.append(next(iterator))
            counts.append(loader.fresh_examples)
            if step % 2:
                loader.next_fresh_examples()  # looking ahead must not show in the state
            states.append(loader.state_dict())
    for position, state in enumerate(states):
        with EchoLoader(make(11), num_workers=(num_workers + position) % 2, **common) as restored:
            restored.load_state_dict(through_torch_save(state))
            assert restored.fresh_examples == counts[position]
            again = restored.state_dict()
            assert_same_position(again, state)
            for batch, step in zip(islice(restored, 3), range(position, 8), strict=False):
                assert torch.equal(batch["x"], batches[step]["x"])
                assert torch.equal(batch["label"], batches[step]["label"])
                assert restored.fresh_examples == counts[step + 1]


def assert_same_position(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(one) == set(other)
    for name in set(one) - {"clocks", "reread_examples"}:
        if name in ("examples", "batches"):
            assert torch.equal(one[name].pop("buffer"), other[name].pop("buffer"))
        if name == "held_batches":
            assert [items.tolist() for items in one[name].values()] == [
                items.tolist() for items in other[name].values()
            ]
        else:
            assert one[name] == other[name]


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_restores_within_epochs(variant: dict[str, Any], kind: str) -> None:
    make, augment, _, extra = SOURCES[kind]
    common: dict[str, Any] = {
        "batch_size": 4, "shuffle_buffer": 9, "augment": augment, "epochs": 1, **variant, **extra,
    }  # fmt: skip
    loader = EchoLoader(make(11), **common)
    states, batches, passes = [], [], []
    for number in range(3):
        for batch in loader:
            batches.append(batch)
            states.append(loader.state_dict())
            passes.append(number)
    for position, state in enumerate(states):
        restored = EchoLoader(make(11), num_workers=position % 2, **common)
        restored.load_state_dict(through_torch_save(state))
        rest = [batch for _ in range(passes[position], 3) for batch in restored]
        if passes[position] < 2 and position + 1 < len(passes) and passes[position + 1] > passes[position]:
            # After the last batch of a pass the next iter() begins a new one.
            rest = rest[: len(batches) - position - 1]
        for batch, expected in zip(rest, batches[position + 1 :], strict=False):
            assert torch.equal(batch["x"], expected["x"])
        assert len(rest) >= len(batches) - position - 1


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_restores_each_rank(variant: dict[str, Any]) -> None:
    for kind in ("map", "stream"):
        make, augment, _, extra = SOURCES[kind]
        common: dict[str, Any] = {
            "batch_size": 3, "shuffle_buffer": 5, "augment": augment, "rank": 1, "world_size": 3,
            **variant, **extra,
        }  # fmt: skip
        loader = EchoLoader(make(17), **common)
        list(islice(loader, 9))
        restored = EchoLoader(make(17), **common)
        restored.load_state_dict(loader.state_dict())
        for one, other in zip(islice(loader, 6), restored, strict=False):
            assert torch.equal(one["x"], other["x"])


def test_reads_again_what_the_buffer_held_and_no_more() -> None:
    source = Dataset(500)
    common: dict[str, Any] = {"batch_size": 10, "echo": "example_before_augmentation", "factor": 2}
    loader = EchoLoader(source, shuffle_buffer=100, **common)
    list(islice(loader, 20))
    held = loader.fresh_examples_in_buffer
    assert 50 <= held < 100  # two uses of some examples wait in the buffer
    state = loader.state_dict()
    source.reads = 0
    restored = EchoLoader(source, shuffle_buffer=100, **common)
    restored.load_state_dict(state)
    assert source.reads == restored.reread_examples
    assert held <= restored.reread_examples <= held + 1  # and the example whose echo is in progress
    assert restored.fresh_examples == loader.fresh_examples


def test_the_state_is_small() -> None:
    loader = EchoLoader(
        arrays(50_000), 100, shuffle_buffer=20_000, echo="example_before_augmentation", factor=2
    )
    next(iter(loader))
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    assert file.tell() <= 64 * 20_000


def test_another_loaders_state_is_refused() -> None:
    state = EchoLoader(arrays(10), 2, seed=1).state_dict()
    with pytest.raises(ValueError, match="seed was 1 and is 2 now"):
        EchoLoader(arrays(10), 2, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="batch_size was 2 and is 5 now"):
        EchoLoader(arrays(10), 5, seed=1).load_state_dict(state)


def test_a_loader_can_go_back() -> None:
    with EchoLoader(arrays(30), 4, shuffle_buffer=6, num_workers=1) as loader:
        list(islice(loader, 3))
        state = loader.state_dict()
        first = [batch["label"] for batch in islice(loader, 5)]
        loader.load_state_dict(state)
        again = [batch["label"] for batch in islice(loader, 5)]
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_the_beginning_of_a_pass_after_one_given_up(variant: dict[str, Any], num_workers: int) -> None:
    common: dict[str, Any] = {"batch_size": 4, "shuffle_buffer": 9, "epochs": 1, **variant}
    with EchoLoader(Dataset(31), num_workers=num_workers, **common) as loader:
        list(islice(loader, 3))
        loader.next_fresh_examples()
        iterator = iter(loader)
        state = loader.state_dict()
        assert loader.fresh_examples_in_buffer == 0
        expected = [batch["label"].tolist() for batch in iterator]
    with EchoLoader(Dataset(31), **common) as restored:
        restored.load_state_dict(through_torch_save(state))
        assert [batch["label"].tolist() for batch in restored] == expected


def test_what_iterates_otherwise_the_second_time_is_reported() -> None:
    lengths = iter([9, 2])
    source = type("Shrinking", (), {"__iter__": lambda self: iter(np.arange(next(lengths, 2)))})()  # noqa: ARG005
    loader = EchoLoader(source, 2, epochs=1)
    list(islice(loader, 4))
    state = loader.state_dict()
    with pytest.raises(ValueError, match="must give the same examples again"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("source", [range(40), lambda: iter(range(40))], ids=["rows", "stream"])
def test_what_can_not_be_decoded_again_is_never_swapped(source: Any) -> None:
    broken: set[int] = set()

    def decode(number: int) -> int:
        if number in broken:
            raise ValueError("not this time")
        return number

    common: dict[str, Any] = {
        "batch_size": 2, "shuffle_buffer": 8, "order": "stored", "decode": decode, "max_bad_examples": 5,
    }  # fmt: skip
    loader = EchoLoader(source, **common)
    next(iter(loader))
    state = loader.state_dict()
    held = (state["examples"]["buffer"] >> 16).tolist()
    broken.add(held[0])
    with pytest.raises(ValueError, match="not this time") as caught:
        EchoLoader(source, **common).load_state_dict(state)
    assert "again to restore the buffer; it could be read before" in caught.value.__notes__[0]


@pytest.mark.parametrize("decode", [None, lambda batch: batch["x"]], ids=["", "decode"])
@pytest.mark.parametrize("kind", ["stream", "rows"])
def test_whole_batches_read_again_count_their_examples(kind: str, decode: Any) -> None:
    batches = [torch.arange(3 + number % 2) for number in range(40)]
    source = batches if decode is None else [{"x": batch, "bytes": b"more"} for batch in batches]
    source = source if kind == "rows" else source.__iter__  # type: ignore[assignment]
    common: dict[str, Any] = {"echo": "batch", "factor": 2, "batch_shuffle_buffer": 6, "order": "stored"}
    loader = EchoLoader(source, None, decode=decode, **common)
    list(islice(loader, 9))
    state = loader.state_dict()
    restored = EchoLoader(source, None, decode=decode, **common)
    restored.load_state_dict(state)
    read = range(state["next_index"]) if kind == "stream" else state["held_batches"]["numbers"].tolist()
    assert restored.reread_examples == sum(3 + number % 2 for number in read)
    assert [batch.tolist() for batch in islice(restored, 6)] == [
        batch.tolist() for batch in islice(loader, 6)
    ]


@pytest.mark.parametrize("batch_size", [1, None])
def test_a_buffer_of_tiny_batches_takes_no_more(batch_size: int | None) -> None:
    source = Dataset(5000, lambda row: np.zeros(1) if batch_size is None else row)
    common: dict[str, Any] = {"echo": "batch", "factor": 2, "batch_shuffle_buffer": 2000}
    loader = EchoLoader(source, batch_size, **common)
    next(iter(loader))
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    assert file.tell() <= 64 * loader.fresh_examples_in_buffer + 8000  # what a state takes without a buffer
