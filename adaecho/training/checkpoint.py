"""Checkpoints: written atomically, the last good one kept, read without executing pickled code."""

import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from adaecho.errors import FolderError
from adaecho.records.files import folder_errors

LAST, PREVIOUS, PARTIAL = "last.pt", "previous.pt", "partial.pt"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write ``state`` as the last checkpoint; the one before it stays as the previous.

    A kill at any instant leaves at least one of the two whole: the new file gets its name only when its bytes
    are on disk.

    Raises:
        FolderError: the disk is full or read-only; earlier checkpoints are untouched.
    """
    partial = folder / PARTIAL
    whole = io.BytesIO()  # torch would report a failed write in words of its own, without the reason
    torch.save(state, whole)
    with folder_errors(partial):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.write(whole.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            if (folder / LAST).exists():
                os.replace(folder / LAST, folder / PREVIOUS)
            os.replace(partial, folder / LAST)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def load(folder: Path) -> dict[str, Any] | None:
    """The last checkpoint that can be read, or None where there is none.

    Raises:
        FolderError: checkpoints exist and none of them can be read.
    """
    broken = []
    for name in (LAST, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(state, dict):
                raise ValueError("holds no training state")
            return state
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
            broken.append(f"{path}: {type(error).__name__} {str(error).partition(chr(10))[0]}")
            print(f"warning: checkpoint {path} can't be read, trying an older one", file=sys.stderr)
    if broken:
        raise FolderError("no checkpoint can be read: " + "; ".join(broken) + "; fresh=true starts anew")
    return None
