"""What the buffer holds never shows in the batches, bad examples included."""

from itertools import islice

import numpy as np
import pytest

from adaecho import EchoLoader
from adaecho.echo.batch import augment

ROWS = [b"damaged" if row % 7 == 3 else np.full(4, row, np.int64).tobytes() for row in range(60)]


def decode(stored):
    if stored == b"damaged":
        raise ValueError("no rows in these bytes")
    return {"x": np.frombuffer(stored, np.int64)}


def add_noise(example, rng):
    return {"x": example["x"] + rng.integers(0, 1000)}


def run(place, batches, state=None, **more):
    given = {"decode": decode, "augment": add_noise, "shuffle_buffer": 16, "max_bad_examples": 100, **more}
    with EchoLoader(ROWS, 4, place=place, **given) as loader:
        if state is not None:
            loader.load_state_dict(state)
        taken = [batch["x"].tolist() for batch in islice(loader, batches)]
        return taken, loader.fresh_examples, loader.bad_examples, loader.state_dict()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("echo", "factor"), [("none", 1), ("batch", 2), ("example_before_augmentation", 2.5)]
)
def test_bad_examples_are_skipped_alike_and_a_run_may_go_on_in_another_place(echo, factor, num_workers):
    more = {"echo": echo, "factor": factor, "num_workers": num_workers}
    decoded, encoded, auto = (run(place, 30, **more)[:3] for place in ("decoded", "encoded", "auto"))
    assert decoded == encoded == auto
    assert decoded[2]
    first, *_, state = run("decoded", 20, **more)
    assert first + run("encoded", 10, state, **more)[0] == decoded[0]


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
    settings = EchoLoader(ROWS, 4, echo=echo, shuffle_buffer=16, max_bad_examples=bad).settings
    given = augment.Functions(decode, None, None, None, settings, "auto")
    assert given.choose_place(lambda: ROWS[0]) == expected
