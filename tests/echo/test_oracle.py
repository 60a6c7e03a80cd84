"""EchoLoader against the mini loader, which holds the paper's words, and against recorded streams.

540 random settings of the first, bad examples among them, 240 of what it does not hold; each is resumed
somewhere, bit for bit.
"""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.order import keyed
from adaecho.echo.variants import VARIANTS
from tests.echo import record_streams
from tests.echo.mini_loader import MiniLoader, uniform
from tests.echo.sources import SOURCES, Bad, Dataset, Stream, reference_examples
from tests.helpers import through_torch_save

SETTINGS, CHUNKS = 540, 30


class Scale:
    def block(self, fields: dict[str, Any], item_keys: Any) -> dict[str, Any]:
        return {**fields, "x": fields["x"] * keyed.uniform(item_keys, 0)[:, None]}


def scale(one: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**one, "x": one["x"] * rng.random()}


def scale_by_key(one: dict[str, Any], key: int) -> dict[str, Any]:
    return scale(one, np.random.Generator(np.random.Philox(key=key)))


def scale_block_by_key(one: dict[str, Any], key: int) -> dict[str, Any]:
    return {**one, "x": one["x"] * uniform(key, 0)}


def setting(number: int) -> tuple[str, int, str, frozenset[int], dict[str, Any]]:
    """Source, its length, which augments, which rows are bad, and the arguments of both loaders."""
    draw = random.Random(number)
    kind, length = draw.choice(list(SOURCES)), draw.choice([5, 11, 23, 50])
    echo = draw.choice([*VARIANTS, "batch"])
    world = draw.choice([1, 1, 2, 3])
    epochs = draw.choice([None, None, 1, 2]) if kind != "stream" or world == 1 else None
    given: dict[str, Any] = {
        "batch_size": draw.choice([1, 2, 3, 4, 6, 8]), "echo": echo,
        "factor": 1 if echo == "none" else draw.choice([1, 2, 3, 5, 1.25, 2.5, 3.3]),
        "shuffle_buffer": draw.choice([0, 1, 2, 7, 20, 40]),
        "batch_shuffle_buffer": draw.choice([0, 0, 1, 3, 10]) if echo == "batch" else 0,
        "order": "stored" if kind == "stream" else draw.choice(["permutation", "permutation", "stored"]),
        "epochs": epochs, "drop_last": draw.random() < 0.4,
        "seed": draw.choice([0, -1, draw.randrange(1 << 70)]),
        "rank": draw.randrange(world), "world_size": world,
    }  # fmt: skip
    # No iteration without a batch, and no more passes in a buffer than a loader takes.
    given["drop_last"] &= bool(epochs) and length * epochs // world >= given["batch_size"]
    most = 6 * length / world
    given["shuffle_buffer"] = min(given["shuffle_buffer"], int(most))
    given["batch_shuffle_buffer"] = min(given["batch_shuffle_buffer"], int(most / given["batch_size"]))
    augments = draw.choice(["none", "each time", "each time", "once and each time"])
    augments = "each time" if kind == "ragged" else augments
    # No rank may be left without a batch; nor, where iterations end, may one have fewer than the others.
    most = length // world - (given["batch_size"] if given["drop_last"] else 1)
    most = 0 if epochs and world > 1 else most
    bad = frozenset(draw.sample(range(length), max(0, min(draw.choice([0, 0, 1, 2, length // 3]), most))))
    return kind, length, augments, bad, given


def loaders(number: int) -> tuple[Any, MiniLoader, dict[str, Any]]:
    kind, length, augments, bad, given = setting(number)
    make, each_time, each_time_by_key, _ = SOURCES[kind]
    once, once_by_key = (
        (Scale(), scale_block_by_key) if hasattr(each_time, "block") else (scale, scale_by_key)
    )
    augment, by_key = {
        "none": (None, (None, None)),
        "each time": (each_time, (None, each_time_by_key)),
        "once and each time": ((once, each_time), (once_by_key, each_time_by_key)),
    }[augments]
    mini = MiniLoader(reference_examples(kind, length), **given, bad=bad, once=by_key[0], augment=by_key[1])
    damage = {"decode": Bad(*bad), "max_bad_examples": len(bad)} if bad else {}
    return make(length), mini, {"augment": augment, **damage, **given}


def assert_equal(batch: dict[str, Any], expected: dict[str, Any], told: str) -> None:
    assert list(batch) == list(expected), told
    for name, field in expected.items():
        assert batch[name].dtype == field.dtype, told
        assert torch.equal(batch[name], field), f"{told}: {name} is {batch[name]}, must be {field}"


Places = dict[int, tuple[int, Any]]
"""After how many batches: fresh examples, and the state."""


def follow(loader: EchoLoader, mini: MiniLoader, stops: list[int], told: str, source: Any = None) -> Places:
    """Compare batches up to the last of some places, from one iteration to the next; the states there."""
    places = {}
    if mini.n in stops:
        places[mini.n] = loader.fresh_examples, copy.deepcopy(loader.state_dict())
    while mini.n < max(stops):
        if mini.epochs and hasattr(loader.dataset, "__len__"):
            assert mini.bad or len(loader) == len(mini), told
        for (expected, fresh), batch in zip(mini, loader, strict=True):
            where = f"{told}, batch {mini.n}"
            assert_equal(batch, expected, where)
            assert loader.fresh_examples == fresh, where
            assert source is None or source.reads == fresh, where
            if mini.n in stops:
                if mini.n % 2 and source is None:
                    loader.next_fresh_examples()  # looking ahead must not show in the state
                # The look may have found the end, and bad ones before it.
                told_fresh = loader.fresh_examples if mini.bad else fresh
                places[mini.n] = told_fresh, copy.deepcopy(loader.state_dict())
            if mini.n == max(stops):
                break
        else:
            assert mini.drop_last or not loader.fresh_examples_in_buffer, f"{told}, after batch {mini.n}"
    return places


def resume(loader: EchoLoader, mini: MiniLoader, n: int, fresh: int, state: Any, told: str) -> None:
    if n % 3 == 0:
        state = through_torch_save(state)
    loader.load_state_dict(state)
    if n % 3 == 1:
        loader.load_state_dict(loader.state_dict())  # handed on by a loader that took nothing
    if not mini.drop_last:
        assert loader.fresh_examples == fresh, f"{told}, loaded after batch {n}"
    mini.n = n
    follow(loader, mini, [n + 4], f"{told}, resumed after batch {n}")


def hold(number: int, num_workers: Sequence[int] = (0, 0, 0, 0, 0, 0, 1, 2, 5)) -> None:
    """Compare one setting's stream, and resumes from two places in it, with any of these workers."""
    draw = random.Random(-number)
    source, mini, given = loaders(number)
    told = f"setting {number}: {setting(number)}"

    def workers() -> dict[str, int]:
        return {"num_workers": draw.choice(num_workers), "prefetch": draw.randrange(4)}

    first, stops = workers(), draw.sample(range(12), 2)
    # Inline, what is read is what is fresh; but a stream is read through for all ranks.
    counts = isinstance(source, Dataset) or (isinstance(source, Stream) and mini.world_size == 1)
    with EchoLoader(source, **given, **first) as loader:
        # With a decode one is looked at beforehand.
        counted = source if counts and not first["num_workers"] and not mini.bad else None
        places = follow(loader, mini, [*stops, 12], told, counted)
    for n in stops:
        with EchoLoader(source, **given, **workers()) as resumed:
            resume(resumed, mini, n, *places[n], told)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_equals_the_mini_loader_also_from_anywhere(chunk: int) -> None:
    for number in range(chunk, SETTINGS, CHUNKS):
        hold(number)


@pytest.mark.parametrize("about", record_streams.ABOUT)
def test_equals_the_recorded_streams_also_from_anywhere(about: str) -> None:
    recorded = json.loads(record_streams.RECORDED.read_text())
    assert list(recorded) == record_streams.NAMES
    for name in [name for name in recorded if name.split()[0] == about]:
        assert record_streams.digest(name) == recorded[name], f"{name}: {record_streams.setting(name)[1]}"
