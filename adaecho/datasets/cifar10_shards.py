"""CIFAR-10 as encoded images in tar shards, on disk, over http(s) or on a store of fsspec.

An example is ``<key>.png`` (or another encoding) and ``<key>.cls`` with its label, as in WebDataset;
``scripts/cifar10_shards.py`` writes such shards.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaecho.datasets.skipped_examples import SkippedExamples
from adaecho.datasets.split import Arrays as Images
from adaecho.datasets.storage import shard_errors
from adaecho.errors import DataError
from adaecho.masking import masked
from adaecho.shards import TarShards

Decode = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Cifar10Shards:
    """Where the parts lie.

    Attributes:
        train: streamed anew for each pass.
        validation: read into memory.
        test: None where there is none.
    """

    train: TarShards
    validation: TarShards
    test: TarShards | None


def find_shards(path: str | None, validation_shards: str | None, *, seed: int) -> Cifar10Shards | None:
    """The shards that ``data.path`` names; None where it names no shards.

    Args:
        path: a folder with ``train*.tar``, ``val*.tar`` and perhaps ``test*.tar``; or the training
            shards themselves, by path, url or pattern (see ``TarShards``).
        validation_shards: the validation shards; None: those of the folder.
        seed: of the order of the training shards, another one in each pass.

    Raises:
        DataError: there are training shards and no validation shards.
    """
    if path is None:
        return None
    folder = Path(path).expanduser()
    named = ".tar" in path.partition("?")[0].rpartition("/")[2]
    if not named and not list(folder.glob("train*.tar")):
        return None
    in_folder = {part: sorted(map(str, folder.glob(f"{part}*.tar"))) for part in ("train", "val", "test")}
    validation = [validation_shards] if validation_shards is not None else in_folder["val"]
    if not validation:
        raise DataError(
            f"data.path={path}: shards are streamed, so none of them can be held out; name the validation "
            "shards with task.validation_shards="
        )
    return Cifar10Shards(
        train=_shards([path] if named else in_folder["train"], seed),
        validation=_shards(validation),
        test=_shards(in_folder["test"]) if in_folder["test"] else None,
    )


def _shards(urls: list[str], seed: int | None = None) -> TarShards:
    with shard_errors():  # one after another: they were shuffled as they were written, and records say so
        return TarShards(urls, order="stored" if seed is None else "shards", seed=seed or 0, open_shards=1)


def read_shards(shards: TarShards, decode: Decode, bad: SkippedExamples) -> Images:
    """All usable examples in stored order: ``image`` uint8 [N, H, W, 3], ``label`` int64 [N].

    Raises:
        DataError: a damaged archive, no examples, or more bad ones than allowed.
    """
    decoded, names = [], masked(", ".join(shards.urls))
    with shard_errors(), closing(iter(shards)) as examples:
        for number, example in enumerate(examples):
            try:
                decoded.append(decode(example))
            except ValueError as error:
                bad.add(f"example {number} of {names}", str(error))
    if not decoded:
        raise DataError(f"{names}: the tar shards hold no usable examples")
    return {name: np.stack([example[name] for example in decoded]) for name in ("image", "label")}
