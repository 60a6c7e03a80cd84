"""Compare EchoLoader with the mini loader, which implements the paper, and with recorded streams.

540 random settings run against the mini loader, some with bad examples. 240 recorded streams cover other
features. Each stream also resumes from some batch, bit for bit.
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
from tests.needs import first_form

SETTINGS, CHUNKS = 540, 30  # the gate runs half of the chunks, because each takes 3 s


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
    """Kind of source, length, augmentation, bad rows, and the arguments of both loaders."""
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
        "order": "sequential"
        if kind == "stream"
        else draw.choice(["permutation", "permutation", "sequential"]),
        "epochs": epochs, "drop_last": draw.random() < 0.4,
        "seed": draw.choice([0, -1, draw.randrange(1 << 70)]),
        "rank": draw.randrange(world), "world_size": world,
    }  # fmt: skip
    # Each iteration has a batch, and the buffer holds at most as many epochs as the loader accepts
    given["drop_last"] &= bool(epochs) and length * epochs // world >= given["batch_size"]
    most = 6 * length / world
    given["shuffle_buffer"] = min(given["shuffle_buffer"], int(most))
    given["batch_shuffle_buffer"] = min(given["batch_shuffle_buffer"], int(most / given["batch_size"]))
    augments = draw.choice(["none", "each time", "each time", "once and each time"])
    augments = "each time" if kind == "ragged" else augments
    # Each rank has a batch, and with epochs= all ranks have the same number
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


def assert_equal(batch: dict[str, Any], expected: dict[str, Any], note: str) -> None:
    assert list(batch) == list(expected), note
    for name, field in expected.items():
        assert batch[name].dtype == field.dtype, note
        assert torch.equal(batch[name], field), f"{note}: {name} is {batch[name]}, must be {field}"


States = dict[int, tuple[int, Any]]
"""Fresh examples and the state by number of batches."""


def follow(loader: EchoLoader, mini: MiniLoader, stops: list[int], note: str, source: Any = None) -> States:
    """Compare batches up to the last stop over several iterations. Returns the states at the stops."""
    states = {}
    if mini.n in stops:
        states[mini.n] = loader.fresh_examples, copy.deepcopy(loader.state_dict())
    while mini.n < max(stops):
        if mini.epochs and hasattr(loader.dataset, "__len__"):
            assert mini.bad or len(loader) == len(mini), note
        for (expected, fresh), batch in zip(mini, loader, strict=True):
            where = f"{note}, batch {mini.n}"
            assert_equal(batch, expected, where)
            assert loader.fresh_examples == fresh, where
            assert source is None or source.reads == fresh, where
            if mini.n in stops:
                if mini.n % 2 and source is None:
                    loader.next_fresh_examples()  # reading ahead must not change the state
                # Reading ahead may have found the end, and bad examples before it
                final_fresh = loader.fresh_examples if mini.bad else fresh
                states[mini.n] = final_fresh, copy.deepcopy(loader.state_dict())
            if mini.n == max(stops):
                break
        else:
            assert mini.drop_last or not loader.fresh_examples_in_buffer, f"{note}, after batch {mini.n}"
    return states


def resume(loader: EchoLoader, mini: MiniLoader, n: int, fresh: int, state: Any, note: str) -> None:
    if n % 3 == 0:
        state = through_torch_save(state)
    loader.load_state_dict(state)
    if n % 3 == 1:
        loader.load_state_dict(loader.state_dict())  # of a loader without batches
    if not mini.drop_last:
        assert loader.fresh_examples == fresh, f"{note}, loaded after batch {n}"
    mini.n = n
    follow(loader, mini, [n + 4], f"{note}, resumed after batch {n}")


def hold(number: int, num_workers: Sequence[int] = (0, 0, 0, 0, 0, 0, 1, 2, 5)) -> None:
    """Compare the stream of one setting and two resumes, with any of these numbers of workers."""
    draw = random.Random(-number)
    source, mini, given = loaders(number)
    note = f"setting {number}: {setting(number)}"

    def workers() -> dict[str, int]:
        return {"num_workers": draw.choice(num_workers), "prefetch": draw.randrange(4)}

    first, stops = workers(), draw.sample(range(12), 2)
    # Inline, the source counts fresh examples. A stream reads the examples of all ranks.
    counts = isinstance(source, Dataset) or (isinstance(source, Stream) and mini.world_size == 1)
    with EchoLoader(source, **given, **first) as loader:
        # With decode, the loader reads one example in advance
        counted = source if counts and not first["num_workers"] and not mini.bad else None
        states = follow(loader, mini, [*stops, 12], note, counted)
    for n in stops:
        with EchoLoader(source, **given, **workers()) as resumed:
            resume(resumed, mini, n, *states[n], note)


@pytest.mark.parametrize("chunk", first_form(*range(CHUNKS // 2), also=range(CHUNKS // 2, CHUNKS)))
def test_streams_and_resumes_equal_the_mini_loader(chunk: int) -> None:
    for number in range(chunk, SETTINGS, CHUNKS):
        hold(number)


@pytest.mark.parametrize("about", record_streams.ABOUT)
def test_streams_and_resumes_equal_the_recorded_digests(about: str) -> None:
    recorded = json.loads(record_streams.RECORDED.read_text())
    assert list(recorded) == record_streams.NAMES
    for name in [name for name in recorded if name.split()[0] == about]:
        assert record_streams.digest(name) == recorded[name], f"{name}: {record_streams.setting(name)[1]}"
