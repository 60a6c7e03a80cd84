"""The global generators that a run's steps may draw from: seeded for a run, kept in its checkpoints."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed(number: int) -> None:
    """Seed those of torch (every device's), NumPy and ``random``."""
    torch.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


def state(device: torch.device) -> dict[str, Any]:
    """Where they are: tensors, plain numbers and tuples of such."""
    name, key, *more = np.random.get_state()  # key: uint32 [624]
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (name, np.asarray(key).tolist(), *more),
        "python": random.getstate(),
    }


def restore(before: dict[str, Any], device: torch.device) -> None:
    """Go on from a ``state``."""
    torch.set_rng_state(before["cpu"])
    if before["cuda"] is not None:
        torch.cuda.set_rng_state(before["cuda"], device)
    np.random.set_state(before["numpy"])
    random.setstate(before["python"])


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Put them back after the block."""
    before = state(device)
    try:
        yield
    finally:
        restore(before, device)
