"""Read CIFAR-10 into memory, from tables with columns ``img`` and ``label`` or from the original pickles."""

import os
from collections.abc import Callable, Iterable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from adaecho.datasets.split import Arrays as Images
from adaecho.datasets.storage import BadExampleBudget, load_tables
from adaecho.errors import DataError

SIDE = 32
NUM_CLASSES = 10
_CHUNK = 500  # number of encoded images that a thread decodes at a time
_PICKLES = "cifar-10-batches-py"  # name of the folder in cifar-10-python.tar.gz

Split = Literal["train", "test"]
Decode = Callable[[dict[str, Any]], dict[str, Any]]
"""A function that decodes one example: an encoded ``image`` and its ``label``, or the files of a shard."""


class Cifar10(NamedTuple):
    """The files of CIFAR-10 that were found at a path, and a function that reads them."""

    # read(split, bad) returns the arrays image and label, and adds images that cannot be decoded to bad
    read: Callable[[Split, BadExampleBudget], Images]
    has_test: bool  # whether there is a split "test"
    files: list[Path]  # of all splits


def find(path: str | None, decode: Decode) -> Cifar10:
    """Find the CIFAR-10 images at a path, without reading them.

    Args:
        path: a folder with parquet files, the folder ``cifar-10-batches-py`` or its parent, or a hub id.
        decode: a function that decodes one example.
    """
    if path is None:
        raise DataError("data.path=null: cifar10 needs a folder or a Hub ID, e.g. data.path=uoft-cs/cifar10")
    folder = Path(path).expanduser()
    root = folder.parent if folder.name == _PICKLES else folder
    if (root / _PICKLES).is_dir():
        return Cifar10(lambda split, _: _read_pickles(root, split), True, sorted((root / _PICKLES).iterdir()))
    tables = load_tables(path, ("img", "label"))

    def read(split: Split, bad: BadExampleBudget) -> Images:
        if split not in tables.splits:
            raise DataError(f"data.path={path}: has no split {split}, only {', '.join(tables.splits)}")
        examples = (
            (f"{path} ({split}), row {row}", {"image": example["img"]["bytes"], "label": example["label"]})
            for row, example in enumerate(tables.splits[split])
        )
        return decode_all(examples, decode, bad)

    return Cifar10(read, "test" in tables.splits, tables.files)


def _read_pickles(root: Path, split: Split) -> Images:
    """Read a split of the original CIFAR-10 archive."""
    from torchvision.datasets import CIFAR10

    try:
        # torchvision compares checksums first, so that only the original files are unpickled.
        stored = CIFAR10(root, train=split == "train")
    except RuntimeError as error:
        raise DataError(
            f"{root / _PICKLES}: files of cifar-10-python.tar.gz are missing or have wrong checksums; unpack "
            "the archive again"
        ) from error
    return {"image": np.ascontiguousarray(stored.data), "label": np.array(stored.targets, dtype=np.int64)}


def decode_all(
    examples: Iterable[tuple[str, dict[str, Any]]], decode: Decode, bad: BadExampleBudget
) -> Images:
    """Decode examples in parallel on all cores, and stack those that can be decoded.

    Args:
        examples: pairs (name, example), where the name is used in messages.
        bad: collects the examples that cannot be decoded.
    """

    def attempt(named: tuple[str, dict[str, Any]]) -> dict[str, Any] | str:
        try:
            return decode(named[1])
        except ValueError as error:
            return f"{named[0]}: {error}"

    with ThreadPool(os.cpu_count()) as threads:  # OpenCV releases the GIL
        decoded = threads.map(attempt, examples, _CHUNK)
    bad.add(*(line for line in decoded if isinstance(line, str)))
    usable = [example for example in decoded if not isinstance(example, str)]
    if not usable:
        raise DataError("data.path: contains no usable examples")
    return {name: np.stack([example[name] for example in usable]) for name in ("image", "label")}
