"""Batches and counts against the slow reference, bit for bit, in every variant."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.order.factor import repeats
from tests.echo import reference
from tests.echo.sources import (
    IDS,
    SOURCES,
    VARIANTS,
    Dataset,
    Stream,
    add_noise,
    arrays,
    assert_same,
    reference_examples,
)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_equals_the_slow_reference(variant: dict[str, Any], kind: str, num_workers: int) -> None:
    make, augment, by_reference, extra = SOURCES[kind]
    for shuffle_buffer in (0, 1, 7, 40) if num_workers == 0 else (7,):
        common: dict[str, Any] = {
            "batch_size": 6, "shuffle_buffer": shuffle_buffer, "seed": 5, **variant, **extra,
        }  # fmt: skip
        source = make(23)
        expected = reference.batches(reference_examples(kind, 23), augment=by_reference, **common)
        with EchoLoader(source, augment=augment, num_workers=num_workers, **common) as loader:
            for batch, (one, reads) in zip(islice(loader, 20), expected, strict=False):
                assert_same(batch, one)
                assert loader.fresh_examples == reads
                if num_workers == 0 and isinstance(source, Dataset | Stream):
                    assert source.reads == reads


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_epochs_drain_the_buffer(variant: dict[str, Any], num_workers: int, kind: str) -> None:
    make, augment, by_reference, extra = SOURCES[kind]
    for shuffle_buffer in (0, 5, 1000) if num_workers == 0 else (5,):
        common: dict[str, Any] = {
            "batch_size": 4, "shuffle_buffer": shuffle_buffer, "seed": 8, **variant, **extra,
        }  # fmt: skip
        loader = EchoLoader(make(11), augment=augment, epochs=2, num_workers=num_workers, **common)
        expected = list(
            reference.batches(reference_examples(kind, 11), augment=by_reference, passes=2, **common)
        )
        if kind == "map":
            assert len(loader) == len(expected)
        batches = list(loader)
        assert len(batches) == len(expected)
        for batch, (one, _) in zip(batches, expected, strict=True):
            assert_same(batch, one)
        assert loader.fresh_examples == 22
        assert loader.fresh_examples_in_buffer == 0
        list(loader)
        assert loader.fresh_examples == 44


@pytest.mark.parametrize("kind", ["arrays", "map", "stream"])
def test_batches_are_the_same_for_any_number_of_workers_and_prefetch(kind: str) -> None:
    make, augment, _, extra = SOURCES[kind]
    for variant in VARIANTS:
        runs = []
        for num_workers, prefetch in ((0, 2), (1, 0), (8, 5)):
            common: dict[str, Any] = {"shuffle_buffer": 9, "augment": augment, **variant, **extra}
            with EchoLoader(make(19), 5, num_workers=num_workers, prefetch=prefetch, **common) as loader:
                runs.append([(batch["x"], loader.fresh_examples) for batch in islice(loader, 9)])
        for inline, one, eight in zip(*runs, strict=True):
            assert torch.equal(inline[0], one[0])
            assert torch.equal(inline[0], eight[0])
            assert inline[1] == one[1] == eight[1]


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


@pytest.mark.parametrize("variant", ["batch", "example_before_augmentation", "example_after_augmentation"])
def test_factor_1_is_no_echo(variant: str) -> None:
    common: dict[str, Any] = {"batch_size": 5, "shuffle_buffer": 6, "augment": add_noise, "seed": 2}
    plain = islice(EchoLoader(Dataset(12), echo="none", **common), 12)
    for batch, other in zip(plain, EchoLoader(Dataset(12), echo=variant, **common), strict=False):
        assert torch.equal(batch["x"], other["x"])


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


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_ranks_share_the_examples(variant: dict[str, Any], world: int, kind: str) -> None:
    make, augment, by_reference, extra = SOURCES[kind]
    common: dict[str, Any] = {"batch_size": 4, "shuffle_buffer": 5, "seed": 1, **variant, **extra}
    passes = 1 if kind == "map" else None  # ranks can't make passes of what is iterated
    for rank in range(world):
        loader = EchoLoader(
            make(17), augment=augment, rank=rank, world_size=world, epochs=passes, num_workers=rank, **common
        )
        expected = reference.batches(
            reference_examples(kind, 17),
            augment=by_reference,
            rank=rank,
            world=world,
            passes=passes,
            **common,
        )
        count = len(loader) if passes else 20
        for batch, (one, fresh) in zip(islice(loader, count), islice(expected, count), strict=True):
            assert_same(batch, one)
            assert loader.fresh_examples == fresh
        loader.close()


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
