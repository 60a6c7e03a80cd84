"""Batches and counts against the slow reference, bit for bit, in every variant."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.order.factor import repeats
from tests.echo.sources import (
    IDS,
    SOURCES,
    VARIANTS,
    Dataset,
    add_noise,
    arrays,
)


def test_each_iteration_is_new_passes() -> None:
    loader = EchoLoader(Dataset(10), 4, epochs=1, shuffle_buffer=3, num_workers=1)
    orders = [[label for batch in loader for label in batch["label"].tolist()] for _ in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


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


def test_a_second_iterator_of_an_endless_loader_continues() -> None:
    whole = list(islice(EchoLoader(Dataset(10), 3, seed=1), 8))
    loader = EchoLoader(Dataset(10), 3, seed=1, num_workers=2)
    parts = [*islice(loader, 3), *islice(loader, 5)]
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one["label"], other["label"])


def test_echo_before_augments_anew_and_after_repeats_bit_for_bit() -> None:
    common: dict[str, Any] = {"batch_size": 30, "factor": 3, "augment": add_noise, "epochs": 1}
    for echo, distinct in (("example_before_augmentation", 30), ("example_after_augmentation", 10)):
        (batch,) = EchoLoader(Dataset(10), echo=echo, **common)
        assert len(np.unique(batch["x"].numpy()[:, 0])) == distinct


@pytest.mark.parametrize("factor", [1, 2, 3, 1.25, 2.5, 3.9])
def test_every_fresh_example_leaves_floor_or_ceil_times(factor: float) -> None:
    for echo in ("example_before_augmentation", "example_after_augmentation"):
        loader = EchoLoader(arrays(400), 64, echo=echo, factor=factor, shuffle_buffer=50, epochs=1)
        labels = np.concatenate([batch["label"].numpy() for batch in loader])
        counts = np.bincount(labels, minlength=400)
        assert set(counts) <= {int(np.floor(factor)), int(np.ceil(factor))}
        assert 400 * factor == pytest.approx(counts.sum(), rel=0.06)


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


def test_a_shuffled_batch_mixes_its_source() -> None:
    loader = EchoLoader(arrays(1000), 100, shuffle_buffer=500, order="stored")
    first = next(iter(loader))["label"].numpy()
    assert len(np.unique(first)) == 100
    assert first.max() > 400
    assert loader.fresh_examples == 600
    assert loader.fresh_examples_in_buffer == 500


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


def test_read_ahead_counts_nothing() -> None:
    source = Dataset(50)
    with EchoLoader(source, 4, shuffle_buffer=3, num_workers=2, prefetch=4) as loader:
        assert loader.fresh_examples == 0
        next(iter(loader))
        assert loader.fresh_examples == 7
        assert loader.next_fresh_examples() == 11
        assert loader.fresh_examples == 7
        assert source.reads >= 11


def test_batch_buffer_holds_whole_batches() -> None:
    loader = EchoLoader(arrays(40), 4, echo="batch", factor=2, batch_shuffle_buffer=4, order="stored")
    seen = [tuple(batch["label"].tolist()) for batch in islice(loader, 40)]
    assert all(labels[0] % 4 == 0 and labels[-1] == labels[0] + 3 for labels in seen)
    assert seen != sorted(seen)
