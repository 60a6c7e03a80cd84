"""``place="augmented"``: the same batches, from a buffer that holds patches, not what they are cut from."""

import gc
import weakref
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from tests.echo.global_augments import draw
from tests.echo.sources import IDS, SOURCES, VARIANTS, Dataset, Stream
from tests.helpers import through_torch_save

ECHO: dict[str, Any] = {"echo": "example_before_augmentation", "shuffle_buffer": 9, "seed": 4}


def crop(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Two neighbours of a long array, as a view; and what it was cut from is written into."""
    start = rng.integers(0, len(example["x"]) - 2)
    patch = {"x": example["x"][start : start + 2], "label": example["label"]}
    patch["x"] += 1000
    return patch


def widened(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**example, "x": example["x"][rng.integers(0, 5) :][:30]}


def volume(row: int) -> dict[str, Any]:
    return {"x": np.arange(40.0) + 40 * row, "label": row}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("factor", [1, 3, 2.6])
@pytest.mark.parametrize("kind", SOURCES)
def test_batches_and_counts_are_those_of_a_buffer_of_examples(
    kind: str, factor: float, num_workers: int
) -> None:
    make, augment, _, extra = SOURCES[kind]
    runs = []
    for place in ("decoded", "augmented"):
        common: dict[str, Any] = {**ECHO, **extra, "augment": augment, "factor": factor, "place": place}
        with EchoLoader(make(17), 5, num_workers=num_workers, **common) as loader:
            taken = [(batch["x"], batch["label"], loader.fresh_examples) for batch in islice(loader, 25)]
        runs.append(taken)
    for decoded, augmented in zip(*runs, strict=True):
        assert torch.equal(decoded[0], augmented[0])
        assert torch.equal(decoded[1], augmented[1])
        assert decoded[2] == augmented[2]


@pytest.mark.parametrize("augment", [crop, (widened, crop), draw])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_crops_pairs_and_global_generators(augment: Any, num_workers: int) -> None:
    runs = []
    for place in ("decoded", "augmented"):
        common: dict[str, Any] = {**ECHO, "augment": augment, "factor": 3, "place": place, "epochs": 1}
        with EchoLoader(Dataset(13, volume), 4, num_workers=num_workers, **common) as loader:
            runs.append([(batch["label"], batch.get("x", batch.get("drawn"))) for batch in loader])
    assert len(runs[0]) == len(runs[1]) == 10
    for decoded, augmented in zip(*runs, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(decoded, augmented, strict=True))


@pytest.mark.parametrize("make", [Dataset, Stream])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("first", "second"), [("augmented", "augmented"), ("decoded", "augmented")])
def test_resumes_are_exact_in_either_place(make: Any, num_workers: int, first: str, second: str) -> None:
    order = {"order": "stored"} if make is Stream else {}
    common: dict[str, Any] = {**ECHO, **order, "augment": crop, "factor": 2.6, "num_workers": num_workers}
    with EchoLoader(make(19, volume), 4, **common) as loader:
        expected = [batch["x"] for batch in islice(loader, 26)]
    for stop in (1, 6, 17):
        with EchoLoader(make(19, volume), 4, place=first, **common) as loader:
            list(islice(loader, stop))
            state = through_torch_save(loader.state_dict())
        with EchoLoader(make(19, volume), 4, place=second, **common) as resumed:
            resumed.load_state_dict(state)
            for batch, other in zip(islice(resumed, 9), expected[stop:], strict=False):
                assert torch.equal(batch["x"], other)


class Tracked(np.ndarray):
    """An array that can be referred to weakly."""


def test_nothing_keeps_what_patches_were_cut_from() -> None:
    alive: list[weakref.ref[Any]] = []

    def decode(row: dict[str, Any]) -> dict[str, Any]:
        whole = np.zeros(1 << 16).view(Tracked)
        alive.append(weakref.ref(whole))
        return {**row, "x": whole}

    common = {**ECHO, "shuffle_buffer": 80, "augment": crop, "factor": 4, "place": "augmented"}
    with EchoLoader(Dataset(60), 4, decode=decode, **common) as loader:
        list(islice(loader, 9))
        gc.collect()
        assert len(alive) == 29, "of 80 slots and 36 items, at four a volume"
        assert [reference for reference in alive if reference() is not None] == []


def test_patches_leave_with_their_repeats() -> None:
    loader = EchoLoader(Dataset(40, volume), 4, augment=crop, factor=4, place="augmented", epochs=1, **ECHO)
    list(loader)
    pool = loader._stages.batches._pool._pool  # type: ignore[union-attr]
    assert pool._examples.count(None) == len(pool._examples) > 0


def test_a_factor_that_is_not_known_when_an_example_is_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"place='augmented' with factor='auto': .* give a number"):
        EchoLoader(Dataset(9), 3, **{**ECHO, "augment": crop, "factor": "auto", "place": "augmented"})


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_variant_takes_it_and_resumes(variant: dict[str, Any], num_workers: int) -> None:
    common: dict[str, Any] = {**ECHO, **variant, "augment": crop, "num_workers": num_workers}
    with EchoLoader(Dataset(19, volume), 4, **common) as loader:
        expected = [batch["x"] for batch in islice(loader, 26)]
    for stop in (3, 14):
        with EchoLoader(Dataset(19, volume), 4, place="augmented", **common) as loader:
            begun = [batch["x"] for batch in islice(loader, stop)]
            state = through_torch_save(loader.state_dict())
        with EchoLoader(Dataset(19, volume), 4, place="augmented", **common) as resumed:
            resumed.load_state_dict(state)
            rest = [batch["x"] for batch in islice(resumed, 26 - stop)]
        assert all(torch.equal(one, other) for one, other in zip(begun + rest, expected, strict=True))


def test_without_an_augmentation_it_changes_nothing() -> None:
    common = {**ECHO, "factor": 2, "epochs": 1}
    with EchoLoader(Dataset(9), 3, place="augmented", **common) as loader:
        rows = [batch["label"].tolist() for batch in loader]
    with EchoLoader(Dataset(9), 3, **common) as loader:
        assert [batch["label"].tolist() for batch in loader] == rows


def test_a_failing_augment_names_the_example() -> None:
    def fail(example: dict[str, Any], rng: Any) -> dict[str, Any]:  # noqa: ARG001
        if example["label"] == 2:
            raise KeyError("no two")
        return example

    common = {**ECHO, "augment": fail, "factor": 2, "place": "augmented", "order": "stored"}
    with pytest.raises(KeyError, match="no two") as caught:
        list(islice(EchoLoader(Dataset(9), 3, max_bad_examples=3, **common), 9))
    assert "while augmenting" in caught.value.__notes__[0]
