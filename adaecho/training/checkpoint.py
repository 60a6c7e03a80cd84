"""Training states in the run folder's checkpoints, read without executing pickled code."""

import io
import pickle
import struct
from pathlib import Path
from typing import Any

import torch

from adaecho.errors import FolderError
from adaecho.masking import masked
from adaecho.records.folder import RunFolder

_UNREADABLE = (
    OSError, RuntimeError, EOFError, pickle.UnpicklingError, struct.error, LookupError, ValueError, TypeError,
    AttributeError,
)  # fmt: skip


def save(run: RunFolder, state: dict[str, Any]) -> None:
    """Keep ``state`` as the last checkpoint.

    Raises:
        FolderError: the disk is full or read-only, or another process has the folder; earlier checkpoints
            are untouched.
    """
    whole = io.BytesIO()  # torch would report a failed write in words of its own, without the reason
    torch.save(masked(state), whole)
    run.save_checkpoint(whole.getbuffer())


def unpacked(content: bytes) -> dict[str, Any]:
    """The state in the bytes of a checkpoint that ``load`` has found good on another rank, on the CPU."""
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def load(run: RunFolder, path: Path) -> dict[str, Any]:
    """The state in one of the folder's checkpoints.

    Raises:
        FolderError: it is damaged, of another run, or holds no training state; says which.
    """
    run.check_checkpoint(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise FolderError(f"{path}: {type(error).__name__} {str(error).partition(chr(10))[0]}") from error
    if not isinstance(state, dict) or "progress" not in state:
        raise FolderError(f"{path}: holds no training state")
    return state
