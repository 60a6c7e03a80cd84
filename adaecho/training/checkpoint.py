"""Write and read checkpoints without pickled code, and restore the global random generators."""

import io
import random
from typing import Any

import numpy as np
import torch

from adaecho.records.folder import RunFolder


def save(run: RunFolder, state: dict[str, Any]) -> None:
    """Write a checkpoint. If writing fails, the previous checkpoint is unchanged."""
    # Write to memory first, because torch.save hides the reason if writing to a file fails.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    run.write(run.checkpoint, buffer.getbuffer())


def load(run: RunFolder) -> dict[str, Any] | None:
    """Return the state in a run's checkpoint, with tensors on the CPU, or None without a checkpoint."""
    exists = run.checkpoint.exists()
    return torch.load(run.checkpoint, map_location="cpu", weights_only=True) if exists else None


def seed_generators(seed: int) -> None:
    """Seed the global random generators of torch (on every device), NumPy and ``random``."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the global random generators."""
    name, key, *more = np.random.get_state()  # key: uint32 [624]
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (name, np.asarray(key).tolist(), *more),
        "python": random.getstate(),
    }


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states that ``rng_state`` returned."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
