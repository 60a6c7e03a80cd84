"""The global generators that a run's steps may draw from: seeded for a run, kept in its checkpoints."""

import random
from typing import Any

import numpy as np
import torch

_NUMBERS = 624  # of a Mersenne Twister


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
    """Go on from a ``state``; one of an earlier version holds torch's alone.

    Raises:
        ValueError: one of them, which may be anyone's, would read beyond its numbers.
    """
    _check_torch(before["cpu"])
    torch.set_rng_state(before["cpu"])
    if device.type == "cuda" and before["cuda"] is not None:
        torch.cuda.set_rng_state(before["cuda"], device)
    if "numpy" in before:
        name, key, position, has_normal, normal = before["numpy"]
        is_within = type(position) is int and 0 <= position <= _NUMBERS == len(key)
        if type(before["numpy"]) is not tuple or not is_within:
            raise ValueError("NumPy's generator stands nowhere in its numbers")
        np.random.set_state((name, key, position, has_normal, normal))
        random.setstate(before["python"])


def _check_torch(state: torch.Tensor) -> None:
    """Of torch's Mersenne Twister: how many are left, and where the next lies (ATen/CPUGeneratorImpl.cpp)."""
    left, position = int(state[8:12].view(torch.int32)), int(state[16:24].view(torch.int64))
    if left < 1 or position < 0 or left + position > _NUMBERS + 1:
        raise ValueError("torch's generator stands nowhere in its numbers")
