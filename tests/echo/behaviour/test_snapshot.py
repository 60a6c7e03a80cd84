"""``restore="snapshot"``: the state of a source that can only be iterated holds what its buffers hold."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from adaecho import EchoLoader, TarShards
from adaecho.echo.memory.packing import pack, unpack
from adaecho.echo.memory.tree import Columns, TreeSpec
from tests.echo.behaviour.test_restore import assert_same_position
from tests.echo.sources import IDS, VARIANTS, AddNoise, Stream, add_noise, ragged
from tests.helpers import through_torch_save
from tests.shards.archives import write_shards


class Text(Stream):
    """Ragged bytes and text, as they come from storage."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for one in super().__iter__():
            label = one["label"]
            yield {"raw": b"%d," % label * (label % 3), "name": f"é{label}", "label": label}


def length_and_noise(one: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": np.array([len(one["raw"]) + rng.random(), len(one["name"])]), "label": one["label"]}


class WritesInPlace(AddNoise):
    """Into the arrays that it is given."""

    def block(self, fields: dict[str, Any], item_keys: Any) -> dict[str, Any]:
        noisy = super().block(fields, item_keys)
        fields["x"][:] = -1
        return noisy


KINDS: dict[str, tuple[Any, Any]] = {
    "fixed": (Stream, WritesInPlace()),
    "ragged": (lambda length: Stream(length, ragged), add_noise),
    "bytes": (Text, length_and_noise),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_restores_at_every_batch_without_reading_the_buffer_again(
    variant: dict[str, Any], kind: str, num_workers: int
) -> None:
    make, augment = KINDS[kind]
    common: dict[str, Any] = {"batch_size": 4, "shuffle_buffer": 9, "seed": 3, "augment": augment, **variant}
    with EchoLoader(make(40), num_workers=num_workers, restore="snapshot", **common) as loader:
        iterator = iter(loader)
        states, batches, counts = [loader.state_dict()], [], [0]
        for step in range(8):
            batches.append(next(iterator))
            if step % 2:
                loader.next_fresh_examples()
            counts.append(loader.fresh_examples)
            states.append(loader.state_dict())
    replayed = list(islice(EchoLoader(make(40), **common), 8))
    assert all(torch.equal(one["x"], other["x"]) for one, other in zip(batches, replayed, strict=True))
    for position, state in enumerate(states):
        source = make(40)
        workers = (num_workers + position) % 2
        with EchoLoader(source, num_workers=workers, restore="snapshot", **common) as restored:
            restored.load_state_dict(through_torch_save(state))
            assert source.reads == state["next_index"] % 40  # passed over within the pass, no further back
            again = restored.state_dict()
            assert_same_contents(again.pop("contents"), state["contents"])
            assert_same_position(again, {name: state[name] for name in again})
            for batch, step in zip(islice(restored, 3), range(position, 8), strict=False):
                assert torch.equal(batch["x"], batches[step]["x"])
                assert torch.equal(batch["label"], batches[step]["label"])
                assert restored.fresh_examples == counts[step + 1]


def assert_same_contents(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(one) == set(other)
    for name in one:
        first, second = unpack(one[name]), unpack(other[name])
        assert repr(first) == repr(second)


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_restores_within_epochs(variant: dict[str, Any]) -> None:
    common: dict[str, Any] = {
        "batch_size": 4, "shuffle_buffer": 9, "augment": add_noise, "epochs": 1, **variant,
    }  # fmt: skip
    loader = EchoLoader(Stream(11), restore="snapshot", **common)
    batches, states = [], []
    for _ in range(2):
        for batch in loader:
            batches.append(batch)
            states.append(through_torch_save(loader.state_dict()))
    per_pass = len(batches) // 2
    for position, state in enumerate(states[: per_pass - 1]):
        with EchoLoader(Stream(11), num_workers=position % 2, restore="snapshot", **common) as restored:
            restored.load_state_dict(state)
            rest = [*restored, *restored]
        expected = batches[position + 1 :]
        assert all(torch.equal(one["x"], other["x"]) for one, other in zip(rest, expected, strict=True))


def test_whole_batches_are_held_too() -> None:
    def make() -> EchoLoader:
        batches = [{"x": torch.arange(4) + 4 * number} for number in range(9)]
        return EchoLoader(
            batches.__iter__, None, echo="batch", factor=2.5, batch_shuffle_buffer=3, restore="snapshot"
        )

    loader = make()
    for _ in range(12):
        next(iter(loader))["x"].fill_(-1)
        restored = make()
        restored.load_state_dict(through_torch_save(loader.state_dict()))
        state = loader.state_dict()
        expected = [batch["x"].tolist() for batch in islice(loader, 3)]
        assert [batch["x"].tolist() for batch in islice(restored, 3)] == expected
        loader.load_state_dict(state)


def test_shards_begin_where_they_were(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", 4, 60)

    def loader(restore: str) -> EchoLoader:
        shards = TarShards(f"{tmp_path}/data/*.tar", order="stored")
        return EchoLoader(shards, 2, shuffle_buffer=12, restore=restore, collate=list)

    for restore, fewest, most in (("snapshot", 0, 2), ("replay", 13, 60)):
        first = loader(restore)
        list(islice(first, 20))
        restored = loader(restore)
        restored.load_state_dict(through_torch_save(first.state_dict()))
        assert list(islice(restored, 9)) == list(islice(first, 9))
        assert fewest <= restored.reread_examples <= most


def test_what_has_random_access_is_always_read_again() -> None:
    loader = EchoLoader([{"x": 1}] * 9, 3, shuffle_buffer=4, restore="snapshot")
    next(iter(loader))
    assert "contents" not in loader.state_dict()


def test_packing_keeps_kinds() -> None:
    class Pair(NamedTuple):
        a: int

    value = {
        "array": np.arange(6, dtype=">i2").reshape(2, 3), "scalar": np.float32(0.1), "zero": np.array(3),
        "tensor": torch.arange(3).to(torch.bfloat16), "empty": torch.zeros(0, 4),
        "text": np.array(["a", "bc"]),
        "plain": [None, True, 1 << 70, -0.5, "a\udcff", b"\0b"], 7: (np.datetime64("2020-01-01"), ()),
    }  # fmt: skip
    packed = through_torch_save(pack([value, value, {"other": 1}]))
    assert len(packed["layouts"]) == 2
    again = unpack(packed)
    assert isinstance(again, list)
    assert repr(again) == repr([value, value, {"other": 1}])
    assert again[0]["tensor"].dtype == torch.bfloat16
    assert again[0]["array"].dtype == np.dtype(">i2")
    again[0]["array"][:] = 0
    assert again[1]["array"].any()
    stack = Columns(TreeSpec("dict", ("a",), (TreeSpec("tensor"),)), [np.ones((2, 3))])
    assert repr(unpack(through_torch_save(pack(stack)))) == repr(stack)
    for bad in (object(), Pair(1), np.array([object()])):
        with pytest.raises(ValueError, match="restore='snapshot': a"):
            pack([{"bad": bad}])


def test_equal_numbers_of_other_kinds_are_kept_apart() -> None:
    values = [{"n": "a", "y": y} for y in (True, 1.0, 1, False, 0.0, -0.0, float("nan"), None)]
    packed = through_torch_save(pack(values))
    assert repr(unpack(packed)) == repr(values)
    many = pack([{"n": "a", "y": float(number)} for number in range(100)])
    assert len(many["layouts"]) == 1


def test_what_would_come_back_as_something_else_is_refused() -> None:
    pairs = np.zeros(2, [("a", "i4"), ("b", "f4")])
    for bad, named in (
        (pairs, "structured array"),
        (pairs[0], "structured array"),
        (torch.eye(2).to_sparse(), "sparse"),
    ):
        with pytest.raises(ValueError, match=f"restore='snapshot': a {named}"):
            pack([("a", bad)])
