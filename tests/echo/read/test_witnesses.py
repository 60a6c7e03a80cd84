"""What is read again after a resume is compared: fingerprints of examples, and what is said of them."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from adaecho import EchoLoader
from adaecho.echo.read.sequential import ReplayFingerprints, fingerprint
from tests.echo.behaviour.test_around_data_loaders import LOADERS as AROUND


def test_contents_that_a_thread_draws_for_the_same_rows_are_warned_of() -> None:
    loader, restored = (
        EchoLoader(AROUND["shuffle"](), None, epochs=1, echo="batch", factor=2, num_workers=1)
        for _ in range(2)
    )
    with loader, restored:
        next(iter(loader))
        with pytest.warns(UserWarning, match=r"other contents than before, of the same rows.*num_workers=1"):
            restored.load_state_dict(loader.state_dict())


def padded(rows: int, columns: int, other: int) -> torch.Tensor:
    """A batch that tells nothing at even spacing: every row begins alike and ends in padding."""
    batch = torch.zeros(rows, columns, dtype=torch.int64)
    batch[:, 1 : columns // 5] = (torch.arange(rows * (columns // 5 - 1)).view(rows, -1) + other) % 2
    return batch


def test_a_state_holds_the_last_few_witnesses() -> None:
    witnesses = ReplayFingerprints(spacing=4, world=2)
    for serial in range(1, 5000, 2):
        witnesses.add(serial, serial, serial)
    kept = witnesses.before(4990)
    assert kept[::3] == list(range(4985 - 31 * 8, 4990, 8))
    assert witnesses.before(64)[::3] == list(range(1, 64, 2)), "each of the first"
    again = ReplayFingerprints(spacing=4, world=2)
    again.expect(kept)
    assert again.before(4990) == kept
    assert again.is_as_before(4985, 4985)
    assert not again.is_as_before(4977, 4985)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(9), torch.arange(9).flip(0)),
        (np.zeros((3, 4)), np.zeros((4, 3))),
        ([1, 2, 3], [1, 3, 2]),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (b"abc", b"abd"),
        ("text", "test"),
        (torch.zeros(3, dtype=torch.float32), torch.zeros(3, dtype=torch.float64)),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        (random.Random, np.random),
        (torch.ones(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)),
        *((torch.ones(4).to(kind), torch.zeros(4).to(kind)) for kind in (torch.uint16, torch.float8_e4m3fn)),
        (Image.new("L", (8, 8), 1), Image.new("L", (8, 8), 2)),
        (SimpleNamespace(rows=torch.ones(3)), SimpleNamespace(rows=torch.zeros(3))),
        (padded(64, 512, 0), padded(64, 512, 1)),
        (padded(64, 784, 0), padded(64, 784, 1)),
    ],
)
def test_a_fingerprint_is_one_of_content(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one) < 1 << 56


def test_a_fingerprint_looks_at_little_of_what_is_large() -> None:
    large = torch.zeros(1 << 22)
    assert fingerprint([large.view(64, -1).T] * 1000) == fingerprint([large.view(64, -1).T] * 1000)
