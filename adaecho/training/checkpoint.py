"""Training states in the run folder's checkpoints, read without executing pickled code."""

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch

from adaecho.errors import FolderError
from adaecho.records.files import folder_errors
from adaecho.records.folder import RunFolder

_UNREADABLE = (
    RuntimeError, EOFError, struct.error, LookupError, ValueError, TypeError, AttributeError, BadZipFile,
)  # fmt: skip


def save(run: RunFolder, state: dict[str, Any]) -> None:
    """Keep ``state`` as the last checkpoint.

    Raises:
        FolderError: the disk is full or read-only, or another process has the folder; earlier checkpoints
            are untouched.
    """
    whole = io.BytesIO()  # torch would report a failed write in words of its own, without the reason
    torch.save(state, whole)
    run.save_checkpoint(whole.getbuffer())


def unpacked(content: bytes) -> dict[str, Any]:
    """The state in the bytes of a checkpoint that ``load`` has found good on another rank, on the CPU."""
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    _make_plain(state)
    return state


def load(run: RunFolder, path: Path) -> dict[str, Any]:
    """The state in one of the folder's checkpoints.

    Raises:
        DiskError: it can't be read now.
        FolderError: it is damaged, of another run, or holds no training state; says which.
    """
    run.check_checkpoint(path)
    try:
        with folder_errors(path):
            _check_members(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
            _make_plain(state)
    except pickle.UnpicklingError:
        # Without torch's own words, which end in how to load it all the same.
        raise FolderError(
            f"{path}: UnpicklingError: it holds objects that only code in it could make, so none was read"
        ) from None
    except _UNREADABLE as error:
        raise FolderError(f"{path}: {type(error).__name__} {str(error).partition(chr(10))[0]}") from error
    if not isinstance(state, dict) or "progress" not in state:
        raise FolderError(f"{path}: holds no training state")
    return state


def _make_plain(state: Any) -> None:
    """Have what torch loads in plain containers and tensors: others bring attributes, that say how to load.

    Of those only the versions of modules stay. What a source told of its position stays as it is.
    """
    if not isinstance(state, dict):
        return
    for name in ("model", "average", "best_model", "optimizer"):
        if isinstance(found := state.get(name), Mapping):
            state[name] = _plain(found)
            if name in ("model", "average"):
                state[name]._metadata = {
                    module: {"version": more["version"]} if "version" in more else {}
                    for module, more in getattr(found, "_metadata", {}).items()
                }
    for own in state.get("ranks", ()):
        own.update({name: _plain(own[name]) for name in ("losses", "buffers", "rng") if name in own})


def _plain(value: Any) -> Any:
    """Raises ValueError where a tensor is no dense one of numbers."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise ValueError(f"a tensor of layout {value.layout}, which no checkpoint of a run holds")
        return value.detach().clone()  # neither attributes nor numbers that lie in one place
    if isinstance(value, Mapping):
        return OrderedDict((key, _plain(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return kind(_plain(inner) for inner in value)
    return value


def _check_members(path: Path) -> None:
    """Raise ValueError where an archive's members are not stored as they are: they may be of any size."""
    with ZipFile(path) as archive:
        members = archive.infolist()
    if any(one.compress_type != ZIP_STORED or one.file_size != one.compress_size for one in members):
        raise ValueError("it is compressed, which no checkpoint is")
    if sum(one.file_size for one in members) > path.stat().st_size:
        raise ValueError("its members overlap, which no checkpoint's do")
