"""CIFAR-10 in memory: tables in the hub's schema (``img``, ``label``), or the original pickles."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from adaecho.datasets.split import Arrays as Images
from adaecho.datasets.storage import SkippedExamples
from adaecho.datasets.stored import load
from adaecho.errors import DataError

SIDE = 32
NUM_CLASSES = 10
_CHUNK = 500  # encoded images that a thread takes at a time
_PICKLES = "cifar-10-batches-py"  # the folder in cifar-10-python.tar.gz

Part = Literal["train", "test"]
Decode = Callable[[dict[str, Any]], dict[str, Any]]
"""From an encoded ``image`` and a ``label`` (or a shard's files) to both as they are used."""


class Cifar10(NamedTuple):
    """Stored images.

    Attributes:
        read: ``read(part, bad)`` gives all usable examples of a part, decoded, in stored order.
        has_test: whether there is a part "test".
        files: of all parts.
    """

    read: Callable[[Part, SkippedExamples], Images]
    has_test: bool
    files: list[Path]


def find(path: str | None, decode: Decode) -> Cifar10:
    """The images that ``data.path`` names.

    Args:
        path: a folder with parquet files, the folder ``cifar-10-batches-py`` or the one it lies in, or a hub
            id.
        decode: of one example.

    Raises:
        DataError: there is nothing of the kind; ``read`` raises it where more is bad than allowed.
    """
    if path is None:
        raise DataError("data.path=null: cifar10 needs a folder or a hub id, e.g. data.path=uoft-cs/cifar10")
    folder = Path(path).expanduser()
    root = folder.parent if folder.name == _PICKLES else folder
    if (root / _PICKLES).is_dir():
        return Cifar10(lambda part, _: _pickled(root, part), True, sorted((root / _PICKLES).iterdir()))
    stored = load(path, ("img", "label"))

    def read(part: Part, bad: SkippedExamples) -> Images:
        if part not in stored.splits:
            raise DataError(f"data.path={path}: has no split {part}, but {', '.join(stored.splits)}")
        rows = enumerate(stored.splits[part])
        examples = (
            (f"{path} ({part}), row {row}", {"image": one["img"]["bytes"], "label": one["label"]})
            for row, one in rows
        )
        return decoded(examples, decode, bad)

    return Cifar10(read, "test" in stored.splits, stored.files)


def _pickled(root: Path, part: Part) -> Images:
    """By torchvision, which compares checksums first: only the original archive's files are unpickled."""
    from torchvision.datasets import CIFAR10

    try:
        stored = CIFAR10(root, train=part == "train")
    except RuntimeError as error:
        raise DataError(
            f"{root / _PICKLES}: by their checksums not the files of cifar-10-python.tar.gz, or not all of "
            "them; unpack the archive again"
        ) from error
    return {"image": np.ascontiguousarray(stored.data), "label": np.array(stored.targets, dtype=np.int64)}


def decoded(examples: Iterable[tuple[str, dict[str, Any]]], decode: Decode, bad: SkippedExamples) -> Images:
    """All usable examples, decoded on all cores: OpenCV releases the GIL.

    Args:
        examples: each with what to call it in a message.
        decode: of one.
        bad: takes those that can't be decoded.
    """
    rows = list(examples)

    def some(begin: int) -> list[dict[str, Any] | ValueError]:
        found = list[dict[str, Any] | ValueError]()
        for _, example in rows[begin : begin + _CHUNK]:
            try:
                found.append(decode(example))
            except ValueError as error:
                found.append(error)
        return found

    usable = []
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = (one for chunk in threads.map(some, range(0, len(rows), _CHUNK)) for one in chunk)
        for (origin, _), one in zip(rows, found, strict=True):
            if isinstance(one, ValueError):
                bad.add(origin, str(one))
            else:
                usable.append(one)
    if not usable:
        raise DataError("data.path: holds no usable examples")
    return {name: np.stack([example[name] for example in usable]) for name in ("image", "label")}
