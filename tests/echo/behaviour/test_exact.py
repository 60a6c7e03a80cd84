"""Batches and counts against the slow reference, bit for bit, in every variant."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader
from adaecho.echo.order.factor import repeats
from tests.echo.sources import (
    IDS,
    SOURCES,
    VARIANTS,
)


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_abandoned_pass_is_followed_by_a_whole_one(kind: str, num_workers: int) -> None:
    make, _, _, extra = SOURCES[kind]
    loader = EchoLoader(make(10), 4, epochs=1, shuffle_buffer=2, num_workers=num_workers, **extra)
    next(iter(loader))
    assert loader.fresh_examples == 6
    labels = [label for batch in loader for label in batch["label"].tolist()]
    assert sorted(labels) == list(range(10))
    assert loader.fresh_examples == 16


def test_fractional_repeats_are_bernoulli_and_independent() -> None:
    extra = repeats(7, np.arange(200_000), 2.3) - 2
    # Five standard deviations of the mean and of a lag-1 correlation.
    assert extra.mean() == pytest.approx(0.3, abs=5 * np.sqrt(0.21 / 200_000))
    assert np.corrcoef(extra[1:], extra[:-1])[0, 1] == pytest.approx(0, abs=5 / np.sqrt(200_000))
    assert set(np.unique(extra)) == {0, 1}


def test_the_leaving_slot_is_uniform() -> None:
    """The delay in a true buffer of B slots is geometric with mean B."""
    size = 20
    loader = EchoLoader({"x": np.arange(60_000)}, 60_000, shuffle_buffer=size, order="stored", epochs=1)
    (batch,) = loader
    positions = np.empty(60_000)
    positions[batch["x"].numpy()] = np.arange(60_000)
    delay = positions + size - np.arange(60_000)
    inner = delay[: 60_000 - 20 * size]
    assert inner.min() >= 1
    assert inner.mean() == pytest.approx(size, rel=0.03)
    assert (inner == 1).mean() == pytest.approx(1 / size, rel=0.1)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_writing_into_a_batch_changes_no_repeat(variant: dict[str, Any], kind: str, num_workers: int) -> None:
    make, augment, _, extra = SOURCES[kind]
    for own_collate in (None, lambda examples: {"x": examples[0]["x"], "label": examples[0]["label"]}):
        common: dict[str, Any] = {"batch_size": 3, "shuffle_buffer": 4, "collate": own_collate, **variant}
        common.update(extra, num_workers=num_workers, augment=None if kind != "ragged" else augment)
        if kind == "ragged" and own_collate is not None:
            continue
        with EchoLoader(make(8), **common) as clean, EchoLoader(make(8), **common) as written:
            for one, other in zip(islice(clean, 20), written, strict=False):
                assert np.array_equal(one["x"], other["x"])
                other["x"][...] = -1
