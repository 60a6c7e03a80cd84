"""Batches and counts against the slow reference, bit for bit."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo import keys
from tests.echo import reference

VARIANTS = [
    {"echo": "none"},
    {"echo": "example_before_augmentation", "factor": 1},
    {"echo": "example_before_augmentation", "factor": 2},
    {"echo": "example_before_augmentation", "factor": 2.6},
    {"echo": "example_after_augmentation", "factor": 3},
    {"echo": "example_after_augmentation", "factor": 1.3},
    {"echo": "batch", "factor": 1},
    {"echo": "batch", "factor": 2},
    {"echo": "batch", "factor": 2.5, "batch_shuffle_buffer": 3},
]
IDS = ["-".join(str(value) for value in variant.values()) for variant in VARIANTS]


class AddNoise:
    """Vectorised: adds a keyed number to x."""

    def block(self, arrays: dict[str, Any], item_keys: Any) -> dict[str, Any]:
        noise = keys.uniform(item_keys, 0)
        return {**arrays, "x": arrays["x"] + noise[:, None]}


def add_noise(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**example, "x": example["x"] + rng.random()}


def reference_block(example: dict[str, Any], key: int) -> dict[str, Any]:
    return {**example, "x": example["x"] + reference.uniform(key, 0)}


def reference_single(example: dict[str, Any], key: int) -> dict[str, Any]:
    return {**example, "x": example["x"] + np.random.Generator(np.random.Philox(key=key)).random()}


class Dataset:
    """Map-style, and counts its own reads."""

    def __init__(self, length: int) -> None:
        self.reads = 0
        self.examples = [{"x": np.array([float(row), -float(row)]), "label": row} for row in range(length)]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.reads += 1
        return self.examples[row]


def arrays(length: int) -> dict[str, Any]:
    rows = np.arange(length)
    return {"x": np.stack([rows, -rows], axis=1).astype(float), "label": rows}


def assert_same(batch: dict[str, torch.Tensor], expected: list[dict[str, Any]]) -> None:
    assert batch["label"].tolist() == [example["label"] for example in expected]
    assert batch["x"].numpy().tobytes() == np.stack([example["x"] for example in expected]).tobytes()


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
@pytest.mark.parametrize("shuffle_buffer", [0, 1, 7, 40])
@pytest.mark.parametrize("kind", ["arrays", "map"])
def test_equals_the_slow_reference(variant: dict[str, Any], shuffle_buffer: int, kind: str) -> None:
    common: dict[str, Any] = {"batch_size": 6, "shuffle_buffer": shuffle_buffer, "seed": 5, **variant}
    source = arrays(23) if kind == "arrays" else Dataset(23)
    augment = AddNoise() if kind == "arrays" else add_noise
    by_reference = reference_block if kind == "arrays" else reference_single
    loader = EchoLoader(source, augment=augment, **common)
    expected = reference.batches(Dataset(23).examples, augment=by_reference, **common)
    for batch, (one, reads) in zip(islice(loader, 40), expected, strict=False):
        assert_same(batch, one)
        assert loader.fresh_examples == reads
        if isinstance(source, Dataset):
            assert source.reads == reads


@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_restores_at_every_batch(variant: dict[str, Any]) -> None:
    common: dict[str, Any] = {
        "batch_size": 4, "shuffle_buffer": 9, "seed": 3, "augment": add_noise, **variant,
    }  # fmt: skip
    loader = EchoLoader(Dataset(11), **common)
    iterator = iter(loader)
    states = [loader.state_dict()]
    batches, counts = [], []
    for _ in range(14):
        batches.append(next(iterator))
        counts.append(loader.fresh_examples)
        if len(batches) % 2:
            loader.next_fresh_examples()  # looking ahead must not show in the state
        states.append(loader.state_dict())
    for position, state in enumerate(states):
        restored = EchoLoader(Dataset(11), **common)
        restored.load_state_dict(state)
        assert restored.fresh_examples == ([0, *counts])[position]
        for batch, fresh in zip(islice(restored, 5), range(position, 14), strict=False):
            assert torch.equal(batch["x"], batches[fresh]["x"])
            assert torch.equal(batch["label"], batches[fresh]["label"])
            assert restored.fresh_examples == counts[fresh]
