"""``augment=(once, each_time)``: the first comes before an echo of examples, the second after; both keyed."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo import pipeline
from adaecho.echo.order import keyed
from tests.echo import reference
from tests.echo.global_augments import draw, draw_again
from tests.echo.sources import IDS, SOURCES, VARIANTS, Dataset, arrays, assert_same, reference_examples
from tests.helpers import through_torch_save


class Times:
    """Vectorised: multiplies x by a keyed number."""

    def block(self, fields: dict[str, Any], item_keys: Any) -> dict[str, Any]:
        return {**fields, "x": fields["x"] * keyed.uniform(item_keys, 0)[:, None]}


def times(one: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**one, "x": one["x"] * rng.random()}


def reference_times(one: dict[str, Any], key: int) -> dict[str, Any]:
    return {**one, "x": one["x"] * reference.uniform(key, 0)}


def reference_times_single(one: dict[str, Any], key: int) -> dict[str, Any]:
    return times(one, np.random.Generator(np.random.Philox(key=key)))


def split(kind: str) -> tuple[Any, dict[str, Any]]:
    """What the loader is given for a kind of source, and what the reference is."""
    _, each_time, reference_each_time, _ = SOURCES[kind]
    if hasattr(each_time, "block"):
        return (Times(), each_time), {"once": reference_times, "augment": reference_each_time}
    return (times, each_time), {"once": reference_times_single, "augment": reference_each_time}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_equals_the_slow_reference(variant: dict[str, Any], kind: str, num_workers: int) -> None:
    make, _, _, extra = SOURCES[kind]
    augment, by_reference = split(kind)
    common: dict[str, Any] = {"batch_size": 6, "shuffle_buffer": 7, "seed": 5, **variant, **extra}
    expected = reference.batches(reference_examples(kind, 23), **by_reference, **common)
    with EchoLoader(make(23), augment=augment, num_workers=num_workers, **common) as loader:
        for batch, (one, reads) in zip(islice(loader, 20), expected, strict=False):
            assert_same(batch, one)
            assert loader.fresh_examples == reads


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["arrays", "map", "stream"])
def test_resumes_are_exact(kind: str, num_workers: int) -> None:
    make, _, _, extra = SOURCES[kind]
    common: dict[str, Any] = {
        "augment": split(kind)[0], "echo": "example_before_augmentation", "factor": 2.6, "shuffle_buffer": 9,
        "num_workers": num_workers, **extra,
    }  # fmt: skip
    with EchoLoader(make(19), 4, **common) as loader:
        expected = [batch["x"] for batch in islice(loader, 24)]
    for stop in (1, 7, 16):
        with EchoLoader(make(19), 4, **common) as loader:
            list(islice(loader, stop))
            state = through_torch_save(loader.state_dict())
        with EchoLoader(make(19), 4, **common) as resumed:
            resumed.load_state_dict(state)
            for batch, other in zip(islice(resumed, 8), expected[stop:], strict=False):
                assert torch.equal(batch["x"], other)


def test_the_first_part_works_once_for_each_fresh_example() -> None:
    calls = {"once": 0, "each_time": 0}

    def counting(name: str) -> Any:
        def count(one: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:  # noqa: ARG001
            calls[name] += 1
            return one

        return count

    loader = EchoLoader(
        Dataset(40), 5, augment=(counting("once"), counting("each_time")), factor=4,
        echo="example_before_augmentation", shuffle_buffer=8, epochs=1,
    )  # fmt: skip
    batches = list(loader)
    assert len(batches) == 32
    assert calls == {"once": 40, "each_time": 160}


def test_parts_that_draw_from_the_global_generators_have_a_process_each() -> None:
    common: dict[str, Any] = {
        "augment": (draw, draw_again), "echo": "example_before_augmentation", "factor": 2,
        "shuffle_buffer": 7,
    }  # fmt: skip
    expected = list(islice(EchoLoader(Dataset(20), 6, **common), 8))
    with EchoLoader(Dataset(20), 6, num_workers=2, **common) as loader:
        for batch, other in zip(islice(loader, 8), expected, strict=True):
            assert torch.equal(batch["drawn"], other["drawn"])
            assert torch.equal(batch["drawn again"], other["drawn again"])
            assert not torch.equal(batch["drawn"], batch["drawn again"])


def test_the_parts_draw_independently() -> None:
    def draw_as(name: str) -> Any:
        return lambda one, rng: {**one, name: rng.random()}

    loader = EchoLoader(
        arrays(2000), 2000, augment=(draw_as("once"), draw_as("each_time")), factor=2,
        echo="example_before_augmentation",
    )  # fmt: skip
    batch = next(iter(loader))
    once, each_time = batch["once"].numpy(), batch["each_time"].numpy()  # [2000], an example's two in a row
    assert np.array_equal(once[::2], once[1::2])
    assert not np.isclose(each_time[::2], each_time[1::2]).any()
    assert abs(np.corrcoef(once, each_time)[0, 1]) < 0.1


def test_what_is_augmented_before_the_buffer_is_decoded_there() -> None:
    common: dict[str, Any] = {
        "augment": (times, times), "decode": dict, "factor": 2, "echo": "example_before_augmentation",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"place='encoded' with .*and augment=\(once, each_time\)"):
        EchoLoader(Dataset(9), 3, place="encoded", **common)
    settings = EchoLoader(Dataset(9), 3, shuffle_buffer=4, **common).settings
    source = pipeline.MapSource(Dataset(9))
    assert pipeline.choose_place("auto", dict, (times, times), source, settings) == "decoded"


@pytest.mark.parametrize(
    ("augment", "told"),
    [
        ((times,), r"a tuple is \(once, each_time\), and this one has 1 parts"),
        ((times, times, times), "this one has 3 parts"),
        ((times, None), "a NoneType can't be called"),
        ((3, times), "a int can't be called"),
    ],
)
def test_other_tuples_are_refused(augment: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EchoLoader(Dataset(9), 3, augment=augment)
