"""CIFAR-10 as people have it: parquet in the hub's schema, the hub, the original pickles, tar shards.

An example of a shard is ``<key>.png`` (or another encoding) and ``<key>.cls`` with its label, as in
WebDataset; ``scripts/cifar10_shards.py`` writes such shards.
"""

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from adaecho.datasets import hub
from adaecho.datasets.parquet import (
    check_parts,
    class_names,
    describe,
    held,
    opened,
    read_schema,
    whole_numbers,
)
from adaecho.datasets.split import Arrays as Images
from adaecho.datasets.storage import SkippedExamples, shard_errors, warn_of_unread
from adaecho.errors import DataError
from adaecho.masking import masked
from adaecho.shards import TarShards

SIDE = 32
NUM_CLASSES = 10
_CHUNK = 500  # encoded images that a thread takes at a time
_COLUMNS = ("img", "label")
_NEEDED = "img (a struct with a field bytes) and label (an integer)"

Part = Literal["train", "test"]
Decode = Callable[[dict[str, Any]], dict[str, Any]]
"""From an encoded ``image`` and a ``label`` (or a shard's files) to both as they are used."""
_PICKLES: dict[Part, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
    "test": ("test_batch",),
}


def find(path: str | None) -> "ParquetFolder | HubDataset | PickleFolder":
    """The storage that ``data.path`` names; nothing but its existence is known before ``read``.

    ``read(part, decode, bad)`` gives all usable examples of one part in stored order. It raises DataError
    where files are unreadable, of another schema, or hold more bad examples than allowed. ``names()`` gives
    those of the classes, where the data tells them, and raises it where two files tell others.

    Args:
        path: a folder with ``train-*.parquet`` and ``test-*.parquet``, or with the original ``data_batch_1``
            to ``data_batch_5`` and ``test_batch``; the parent of such a folder; or a hub id, ``owner/name``.

    Raises:
        DataError: there is nothing of the kind.
    """
    if path is None:
        raise DataError("data.path=null: cifar10 needs a folder or a hub id, e.g. data.path=uoft-cs/cifar10")
    folder = Path(path).expanduser()
    if not folder.exists():
        if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
            return HubDataset(path)
        raise DataError(f"data.path={path}: there is no such folder, and it is no hub id (owner/name)")
    if not folder.is_dir():
        raise DataError(f"data.path={path}: is a file; give the folder it lies in")
    for inner in (folder, *sorted(child for child in folder.iterdir() if child.is_dir())):
        if list(inner.glob("train-*.parquet")):
            return ParquetFolder(inner)
        if (inner / _PICKLES["train"][0]).exists():
            return PickleFolder(inner)
    raise DataError(
        f"data.path={path}: neither train-*.parquet nor data_batch_1 lies in this folder or in one inside "
        f"it; {_what_lies_in(folder)}"
    )


def _what_lies_in(folder: Path) -> str:
    names = sorted(child.name for child in folder.iterdir())
    if not names:
        return "it is empty"
    return f"it holds {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@dataclass(frozen=True)
class ParquetFolder:
    """Files ``<part>-*.parquet`` with columns ``img`` {bytes, path} and ``label``, as the hub stores them."""

    folder: Path

    @property
    def has_test(self) -> bool:
        return bool(list(self.folder.glob("test-*.parquet")))

    def files(self) -> list[Path]:
        return [file for part in _PICKLES for file in sorted(self.folder.glob(f"{part}-*.parquet"))]

    def names(self) -> tuple[str, ...]:
        check_parts(self.files())
        return class_names(self.files(), "label")

    def read(self, part: Part, decode: Decode, bad: SkippedExamples) -> Images:
        rows: list[tuple[str, dict[str, Any]]] = []
        for file in sorted(self.folder.glob(f"{part}-*.parquet")):
            _check_schema(read_schema(file), str(file))
            with opened(file) as table:
                labels = table.read(columns=["label"]).column(0)
                rows += _rows(held(table, file, "img"), labels, str(file))
        return _decoded(rows, decode, bad)


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub in the same schema, through ``datasets`` and its cache."""

    name: str
    has_test: bool = True

    def files(self) -> list[Path]:
        return hub.files_of(hub.load(self.name, split="train"))

    def names(self) -> tuple[str, ...]:
        return tuple(getattr(hub.load(self.name, split="train").features.get("label"), "names", ()))

    def read(self, part: Part, decode: Decode, bad: SkippedExamples) -> Images:
        table = hub.load(self.name, split=part).data.table
        _check_schema(table.schema, self.name)
        rows = _rows(table.column("img"), table.column("label"), f"{self.name} ({part})")
        return _decoded(rows, decode, bad)


@dataclass(frozen=True)
class PickleFolder:
    """The batches of www.cs.toronto.edu/~kriz/cifar.html, python version, read by torchvision.

    It compares their checksums first: what is unpickled is the original archive's and nothing else.
    """

    folder: Path
    has_test: bool = True

    def names(self) -> tuple[str, ...]:
        return ()

    def files(self) -> list[Path]:
        names = (name for part in _PICKLES.values() for name in part)
        return [self.folder / name for name in names if (self.folder / name).exists()]

    def read(self, part: Part, _: Decode, __: SkippedExamples) -> Images:
        from torchvision.datasets import CIFAR10

        where = self.folder.resolve()
        in_folder = type("Batches", (CIFAR10,), {"base_folder": where.name})
        try:
            stored = in_folder(where.parent, train=part == "train")
        except RuntimeError as error:
            raise DataError(
                f"{self.folder}: by their checksums not the files of cifar-10-python.tar.gz, or not all of "
                "them; unpack the archive again"
            ) from error
        labels = np.array(stored.targets, dtype=np.int64)
        return {"image": np.ascontiguousarray(stored.data), "label": labels}


def _check_schema(schema: Any, origin: str) -> None:
    from pyarrow import types

    found = {field.name: field.type for field in schema}
    img, label = (found.get(name) for name in _COLUMNS)
    fits = (
        img is not None
        and types.is_struct(img)
        and img.get_field_index("bytes") >= 0
        and (types.is_binary(kind := img.field("bytes").type) or types.is_large_binary(kind))
        and label is not None
        and types.is_integer(label)
    )
    if not fits:
        raise DataError(f"{origin}: needs the columns {_NEEDED}, and has {describe(schema)}")


def _rows(images: Any, labels: Any, origin: str) -> list[tuple[str, dict[str, Any]]]:
    """Encoded examples, each with what to call it in a message."""
    from pyarrow import compute

    encoded = compute.struct_field(images, "bytes").to_pylist()
    numbers = whole_numbers(labels, origin).tolist()
    return [
        (f"{origin}, row {row}", {"image": image, "label": label})
        for row, (image, label) in enumerate(zip(encoded, numbers, strict=True))
    ]


def _decoded(rows: list[tuple[str, dict[str, Any]]], decode: Decode, bad: SkippedExamples) -> Images:
    """All usable examples, decoded on all cores: OpenCV releases the GIL."""

    def tried(example: dict[str, Any]) -> dict[str, Any] | str:
        try:
            return decode(example)
        except ValueError as error:
            return str(error).strip()

    def some(begin: int) -> list[dict[str, Any] | str]:
        return [tried(example) for _, example in rows[begin : begin + _CHUNK]]

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = [one for chunk in threads.map(some, range(0, len(rows), _CHUNK)) for one in chunk]
    usable = []
    for (origin, _), one in zip(rows, found, strict=True):
        if isinstance(one, str):
            bad.add(origin, one)
        else:
            usable.append(one)
    if not usable:
        return {"image": np.empty((0, SIDE, SIDE, 3), np.uint8), "label": np.empty(0, np.int64)}
    return {name: np.stack([example[name] for example in usable]) for name in ("image", "label")}


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
    check_parts(sorted(folder.glob("*.tar")))
    warn_of_unread(folder, {*folder.glob("*")} - {*folder.glob("*.tar")})
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
    name = masked(", ".join(shards.urls))
    with shard_errors(), closing(iter(shards)) as examples:
        rows = [(f"example {number} of {name}", example) for number, example in enumerate(examples)]
    found = _decoded(rows, decode, bad)
    if not len(found["label"]):
        raise DataError(f"{name}: the tar shards hold no usable examples")
    return found
