"""The original CIFAR-10 batches, read without executing what a pickle may carry."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaecho.errors import DataError

PIXELS = 3 * 32 * 32

# What the original files need to rebuild their one array, under the module names of old and new NumPy.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArraysOnly(pickle.Unpickler):
    """Dicts, lists, strings, numbers and NumPy arrays; any other class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR-10 batch needs") from None


def load_batch(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels uint8 [n, 3072] (red, green, blue planes) and labels int64 [n] of one batch.

    Raises:
        DataError: the file is no such batch, or names anything but NumPy's arrays.
    """
    try:
        with file.open("rb") as stream:
            # Python 2 wrote them: its byte strings are array data here.
            batch = _ArraysOnly(stream, encoding="bytes").load()
    except Exception as error:  # damaged bytes can raise nearly anything
        raise DataError(
            f"{file}: not readable as a CIFAR-10 batch ({error}); unpack the archive again"
        ) from error
    keys = set(batch) if isinstance(batch, dict) else set()
    if not keys >= {b"data", b"labels"}:
        found = ", ".join(sorted(map(str, keys))) or f"a {type(batch).__name__}"
        raise DataError(f"{file}: needs the keys b'data' and b'labels', and has {found}")
    return _check(batch[b"data"], batch[b"labels"], file)


def _check(pixels: Any, labels: Any, file: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    shape, kind = getattr(pixels, "shape", None), getattr(pixels, "dtype", type(pixels).__name__)
    if shape is None or len(shape) != 2 or shape[1] != PIXELS or kind != np.uint8:
        raise DataError(f"{file}: its data must be uint8 of shape [n, {PIXELS}], and is {kind} of {shape}")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(f"{file}: its labels must be a list of integers, and are a {type(labels).__name__}")
    if len(labels) != len(pixels):
        raise DataError(f"{file}: {len(pixels)} images and {len(labels)} labels; unpack the archive again")
    return pixels, np.array(labels, dtype=np.int64)
