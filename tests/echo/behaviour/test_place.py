"""What the buffer holds never shows in the batches, bad examples included."""

import numpy as np
import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.batch import augment

VARIANTS = [("none", 1), ("batch", 2), ("example_before_augmentation", 2.5)]


class Stored:
    """Rows as bytes; every seventh is damaged."""

    def __len__(self):
        return 60

    def __getitem__(self, row):
        return b"damaged" if row % 7 == 3 else np.full(4, row, np.int64).tobytes()


def decode(stored):
    if stored == b"damaged":
        raise ValueError("no rows in these bytes")
    return {"x": np.frombuffer(stored, np.int64)}


def add_noise(example, rng):
    return {"x": example["x"] + rng.integers(0, 1000)}


def run(echo, factor, place, batches=30, **changes):
    arguments = {
        "decode": decode,
        "augment": add_noise,
        "shuffle_buffer": 16,
        "max_bad_examples": 100,
        **changes,
    }
    with EchoLoader(Stored(), 4, echo=echo, factor=factor, place=place, **arguments) as loader:
        batches = [next(batch)["x"] for batch in [iter(loader)] for _ in range(batches)]
        return torch.stack(batches), loader.fresh_examples, loader.bad_examples, loader.state_dict()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("echo", "factor"), VARIANTS)
def test_bad_examples_are_skipped_alike(echo, factor, num_workers):
    decoded, encoded, auto = (
        run(echo, factor, place, num_workers=num_workers) for place in ("decoded", "encoded", "auto")
    )
    assert torch.equal(decoded[0], encoded[0])
    assert torch.equal(decoded[0], auto[0])
    assert decoded[1:3] == encoded[1:3] == auto[1:3]
    assert decoded[2]


def test_a_run_may_go_on_in_another_place():
    whole, *_ = run("example_before_augmentation", 2, "decoded", batches=40)
    first, _, _, state = run("example_before_augmentation", 2, "decoded", batches=20)
    loader = EchoLoader(
        Stored(), 4, echo="example_before_augmentation", factor=2, place="encoded", decode=decode,
        augment=add_noise, shuffle_buffer=16, max_bad_examples=100,
    )  # fmt: skip
    with loader:
        loader.load_state_dict(state)
        batches = iter(loader)
        rest = torch.stack([next(batches)["x"] for _ in range(20)])
    assert torch.equal(torch.cat([first, rest]), whole)


@pytest.mark.parametrize(
    ("echo", "bad", "free", "expected"),
    [
        ("none", 0, 10**9, "encoded"),
        ("batch", 0, 10**9, "encoded"),
        ("none", 1, 10**9, "decoded"),
        ("example_before_augmentation", 0, 10**9, "decoded"),
        ("example_before_augmentation", 0, 16 * 32 * 2 - 1, "encoded"),
        ("example_before_augmentation", 5, 16 * 32 * 2 - 1, "encoded"),
        ("example_before_augmentation", 5, 16 * 32 * 2, "decoded"),
        ("example_after_augmentation", 0, 1, "decoded"),
    ],
)
def test_auto_weighs_work_against_memory(echo, bad, free, expected, monkeypatch):
    monkeypatch.setattr(augment, "free_bytes", lambda: free)
    settings = EchoLoader(Stored(), 4, echo=echo, shuffle_buffer=16, max_bad_examples=bad).settings
    given = augment.Functions(decode, None, None, None, settings, "auto")
    assert given.choose_place(lambda: Stored()[0]) == expected
