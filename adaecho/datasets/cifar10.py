"""CIFAR-10 in the three forms people have it: parquet in the hub's schema, the original pickles, the hub."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from adaecho.datasets import hub
from adaecho.datasets.cifar10_pickle import load_batch
from adaecho.datasets.encoded_images import decode_images
from adaecho.datasets.parquet import describe, read_schema, readable
from adaecho.datasets.skipped_examples import SkippedExamples
from adaecho.datasets.split import Arrays as Images
from adaecho.errors import DataError

SIDE = 32
NUM_CLASSES = 10
_COLUMNS = ("img", "label")
_NEEDED = "img (a struct with a field bytes) and label (an integer)"

Part = Literal["train", "test"]
_PICKLES: dict[Part, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
    "test": ("test_batch",),
}


class Storage(Protocol):
    """Where a copy of CIFAR-10 lies; nothing but its existence is known before ``read``."""

    @property
    def has_test(self) -> bool: ...

    def files(self) -> list[Path]:
        """The files of all parts."""

    def read(self, part: Part, bad: SkippedExamples) -> Images:
        """All usable examples of one part in stored order.

        Raises:
            DataError: unreadable, of another schema, or more bad examples than allowed.
        """


def find(path: str | None) -> Storage:
    """The storage that ``data.path`` names.

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
        return [file for part in _PICKLES for file in self.folder.glob(f"{part}-*.parquet")]

    def read(self, part: Part, bad: SkippedExamples) -> Images:
        files = sorted(self.folder.glob(f"{part}-*.parquet"))
        return _concatenate([_decode_table(_read_parquet(file), str(file), bad) for file in files])


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub in the same schema, through ``datasets`` and its cache."""

    name: str
    has_test: bool = True

    def files(self) -> list[Path]:
        return hub.files_of(hub.load(self.name, split="train"))

    def read(self, part: Part, bad: SkippedExamples) -> Images:
        stored = hub.load(self.name, split=part)
        return _decode_table(stored.data.table, f"{self.name} ({part})", bad)


@dataclass(frozen=True)
class PickleFolder:
    """The batches of www.cs.toronto.edu/~kriz/cifar.html, python version, as torchvision lays them out."""

    folder: Path

    @property
    def has_test(self) -> bool:
        return (self.folder / _PICKLES["test"][0]).exists()

    def files(self) -> list[Path]:
        names = (name for part in _PICKLES.values() for name in part)
        return [self.folder / name for name in names if (self.folder / name).exists()]

    def read(self, part: Part, bad: SkippedExamples) -> Images:
        missing = [name for name in _PICKLES[part] if not (self.folder / name).exists()]
        if missing:
            raise DataError(f"{self.folder}: {', '.join(missing)} missing; unpack the whole archive again")
        batches = []
        for name in _PICKLES[part]:
            pixels, labels = load_batch(self.folder / name)
            # Stored as the red, green and blue plane one after another.
            images = np.ascontiguousarray(pixels.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))
            batches.append(_keep_good(images, labels, [], str(self.folder / name), bad))
        return _concatenate(batches)


def _read_parquet(file: Path) -> Any:
    from pyarrow import parquet

    _check_schema(read_schema(file), str(file))
    with readable(file):
        return parquet.read_table(file, columns=list(_COLUMNS))


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


def _decode_table(table: Any, origin: str, bad: SkippedExamples) -> Images:
    from pyarrow import compute

    _check_schema(table.schema, origin)
    encoded = compute.struct_field(table.column("img"), "bytes").to_pylist()
    images, undecodable = decode_images(encoded, SIDE)
    labels = compute.fill_null(table.column("label"), -1).to_numpy().astype(np.int64)
    return _keep_good(images, labels, undecodable, origin, bad)


def _keep_good(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    undecodable: list[tuple[int, str]],
    origin: str,
    bad: SkippedExamples,
) -> Images:
    reasons = dict(undecodable)
    for row in np.flatnonzero((labels < 0) | (labels >= NUM_CLASSES)).tolist():
        reasons.setdefault(row, f"label {labels[row]} is not one of 0 to {NUM_CLASSES - 1}")
    for row in sorted(reasons):
        bad.add(f"{origin}, row {row}", reasons[row])
    keep = np.ones(len(labels), bool)
    keep[list(reasons)] = False
    return {"image": images[keep], "label": labels[keep]}


def _concatenate(parts: list[Images]) -> Images:
    return {name: np.concatenate([part[name] for part in parts]) for name in ("image", "label")}
