"""Training states in the run folder, read without executing pickled code."""

import io
import pickle
from typing import Any

import torch

from adaecho.errors import FolderError
from adaecho.records.files import folder_errors
from adaecho.records.folder import RunFolder


def save(run: RunFolder, state: dict[str, Any]) -> None:
    """Keep ``state`` as the last checkpoint; where that fails (FolderError), the one before it stays."""
    whole = io.BytesIO()  # torch would report a failed write in words of its own, without the reason
    torch.save(state, whole)
    run.save_checkpoint(whole.getbuffer())


def load(run: RunFolder) -> dict[str, Any] | None:
    """The state in the folder's checkpoint, on the CPU; None where there is none.

    Raises:
        FolderError: it can't be read or is damaged.
    """
    if not run.checkpoint.exists():
        return None
    try:
        with folder_errors(run.checkpoint):
            state: dict[str, Any] = torch.load(run.checkpoint, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise FolderError(
            f"{run.checkpoint}: damaged ({type(error).__name__}). Put a good copy back, or start anew with "
            "fresh=true (the old folder is kept beside the new one)"
        ) from error
    return state
