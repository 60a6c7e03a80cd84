"""Augment and collate: random numbers, two-part augmentation, format of the buffer."""

import multiprocessing
import os
import random
import time
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.batch.augment import Functions
from tests.echo.sources import IDS, VARIANTS, Dataset, add_noise, arrays


def draw_globally(example: dict[str, Any]) -> dict[str, Any]:
    drawn = [float(torch.rand(())), random.random(), np.random.rand()]
    return {"label": example["label"], "drawn": torch.tensor(drawn, dtype=torch.float64), "pid": os.getpid()}


def draw_again(example: dict[str, Any]) -> dict[str, Any]:
    return {**example, "drawn again": draw_globally(example)["drawn"]}


def fail(example: dict[str, Any]) -> dict[str, Any]:
    if example["label"] == 5:
        raise KeyError("no five")
    return example


ECHOED: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 7}


def test_once_is_called_once_for_each_fresh_example() -> None:
    calls: list[str] = []

    def counting(name: str) -> Any:
        return lambda one, _: calls.append(name) or one

    parts = counting("once"), counting("each time")
    assert len(list(EchoLoader(Dataset(40), 5, augment=parts, epochs=1, **{**ECHOED, "factor": 4}))) == 32
    assert Counter(calls) == {"once": 40, "each time": 160}


def test_once_and_each_time_draw_independent_random_numbers() -> None:
    def draw_as(name: str) -> Any:
        return lambda one, *, rng: {**one, name: rng.random()}

    parts = draw_as("once"), draw_as("each_time")
    batch = next(iter(EchoLoader(arrays(2000), 2000, augment=parts, **{**ECHOED, "shuffle_buffer": 0})))
    once, each_time = batch["once"].numpy(), batch["each_time"].numpy()  # [2000], an example's two in a row
    assert np.array_equal(once[::2], once[1::2])
    assert not np.isclose(each_time[::2], each_time[1::2]).any()
    assert abs(np.corrcoef(once, each_time)[0, 1]) < 0.1


def test_once_requires_decoded_examples_in_the_buffer() -> None:
    common: dict[str, Any] = {"augment": (add_noise, add_noise), "decode": dict, **ECHOED}
    with pytest.raises(ValueError, match=r"buffer_format='encoded' with .*no augmentation before the echo"):
        EchoLoader(Dataset(9), 3, buffer_format="encoded", **common)
    settings = EchoLoader(Dataset(9), 3, **common).settings
    functions = Functions(dict, (add_noise, add_noise), None, None, settings, "auto")
    assert functions.split_at_buffer(str)[0].decode is dict


@pytest.mark.parametrize("augment", [draw_globally, (draw_globally, draw_again)], ids=["one", "two parts"])
def test_one_argument_augment_is_the_same_for_any_number_of_workers(augment: Any) -> None:
    common: dict[str, Any] = {"batch_size": 6, "augment": augment, **ECHOED}
    torch.manual_seed(1)
    own = torch.rand(8)
    torch.manual_seed(1)
    expected = list(islice(EchoLoader(Dataset(20), **common), 8))
    drawn = []
    with EchoLoader(Dataset(20), num_workers=2, **common) as loader:
        for batch, other in zip(islice(loader, 8), expected, strict=True):
            drawn.append(torch.rand(()))
            assert os.getpid() not in batch.pop("pid").tolist()
            assert all(torch.equal(batch[name], other[name]) for name in batch)
            assert not torch.equal(batch["drawn"], batch.get("drawn again", own))
    assert torch.equal(torch.stack(drawn), own)
    assert multiprocessing.active_children() == []


ROWS = [b"damaged" if row % 7 == 3 else np.full(4, row, np.int64).tobytes() for row in range(60)]


def decode(stored: bytes) -> Any:
    if stored == b"damaged":
        raise ValueError("no rows in these bytes")
    return {"x": np.frombuffer(stored, np.int64)}


def run(place: str, batches: int, state: Any = None, **more: Any) -> Any:
    given = {"decode": decode, "augment": add_noise, "shuffle_buffer": 16, "max_bad_examples": 100, **more}
    with EchoLoader(ROWS, 4, buffer_format=place, **given) as loader:
        if state is not None:
            loader.load_state_dict(state)
        taken = [batch["x"].tolist() for batch in islice(loader, batches)]
        return taken, loader.fresh_examples, loader.bad_examples, loader.state_dict()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("echo", "factor"), [("none", 1), ("batch", 2), ("example_before_augmentation", 2.5)]
)
def test_batches_do_not_depend_on_the_buffer_format(echo: str, factor: float, num_workers: int) -> None:
    more = {"echo": echo, "factor": factor, "num_workers": num_workers}
    decoded, encoded, auto = (run(place, 30, **more)[:3] for place in ("decoded", "encoded", "auto"))
    assert decoded == encoded == auto
    assert decoded[2]
    first, *_, state = run("decoded", 20, **more)
    assert first + run("encoded", 10, state, **more)[0] == decoded[0]


@pytest.mark.parametrize(
    ("echo", "bad", "encoded"),
    [
        ("none", 0, True),
        ("batch", 0, True),
        ("none", 1, False),
        ("example_before_augmentation", 0, False),
        ("example_after_augmentation", 0, False),
    ],
)
def test_auto_keeps_examples_encoded_if_none_is_decoded_twice(echo: str, bad: int, encoded: bool) -> None:
    settings = EchoLoader(ROWS, 4, echo=echo, shuffle_buffer=16, max_bad_examples=bad).settings
    before, after = Functions(decode, None, None, None, settings, "auto").split_at_buffer(str)
    assert (before.decode is None) == encoded == (after is not None)


def noisy_collate(rows: list[int], rng: np.random.Generator) -> list[tuple[int, float]]:
    """A collate function that draws random numbers, like CutMix."""
    return [(row, rng.random()) for row in rows]


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_random_numbers_of_collate_depend_on_the_batch_alone(variant: dict[str, Any]) -> None:
    found = []
    for num_workers, processes in ((0, False), (3, False), (2, True)):
        common: dict[str, Any] = {"shuffle_buffer": 5, "num_workers": num_workers, "processes": processes}
        with EchoLoader(list(range(50)), 4, collate=noisy_collate, seed=3, **common, **variant) as loader:
            first = list(islice(loader, 9))
            state = loader.state_dict()
            rest = list(islice(loader, 20))
            loader.load_state_dict(state)
            assert list(islice(loader, 20)) == rest
        found.append(first + rest)
    assert found[0] == found[1] == found[2]
    fresh = [batch for batch in found[0] if variant.get("echo") != "batch"]
    assert len({drawn for batch in fresh for _, drawn in batch}) == 4 * len(fresh)


def test_threads_call_collate_one_at_a_time() -> None:
    running, most = [0], [0]

    def collate(rows: list[int]) -> list[int]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.001)
        running[0] -= 1
        return rows

    with EchoLoader(list(range(200)), 4, epochs=1, num_workers=4, collate=collate) as loader:
        assert len(list(loader)) == 50
    assert most == [1]
