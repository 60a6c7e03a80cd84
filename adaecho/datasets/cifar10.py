"""CIFAR-10 in the three forms people have it: parquet in the hub's schema, the original pickles, the hub."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from adaecho.datasets import hub
from adaecho.datasets.parquet import describe, read_schema, readable, whole_numbers
from adaecho.datasets.skipped_examples import SkippedExamples
from adaecho.datasets.split import Arrays as Images
from adaecho.errors import DataError
from adaecho.transforms.photographs import decode_image

SIDE = 32
NUM_CLASSES = 10
_CHUNK = 500  # encoded images that a thread takes at a time
_COLUMNS = ("img", "label")
_NEEDED = "img (a struct with a field bytes) and label (an integer)"

Part = Literal["train", "test"]
_PICKLES: dict[Part, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
    "test": ("test_batch",),
}


def find(path: str | None) -> "ParquetFolder | HubDataset | PickleFolder":
    """The storage that ``data.path`` names; nothing but its existence is known before ``read``.

    ``read(part, bad)`` gives all usable examples of one part in stored order. It raises DataError where files
    are unreadable, of another schema, or hold more bad examples than allowed.

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
    """The batches of www.cs.toronto.edu/~kriz/cifar.html, python version, read by torchvision.

    It compares their checksums first: what is unpickled is the original archive's and nothing else.
    """

    folder: Path
    has_test: bool = True

    def files(self) -> list[Path]:
        names = (name for part in _PICKLES.values() for name in part)
        return [self.folder / name for name in names if (self.folder / name).exists()]

    def read(self, part: Part, _: SkippedExamples) -> Images:
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
    images, reasons = _decode_images(encoded)
    return _keep_good(images, whole_numbers(table.column("label"), origin), reasons, origin, bad)


def _keep_good(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    reasons: dict[int, str],
    origin: str,
    bad: SkippedExamples,
) -> Images:
    """All but the rows that have a reason, or a label that can't be."""
    for row in np.flatnonzero((labels < 0) | (labels >= NUM_CLASSES)).tolist():
        reasons.setdefault(row, f"label {labels[row]} is not one of 0 to {NUM_CLASSES - 1}")
    for row in sorted(reasons):
        bad.add(f"{origin}, row {row}", reasons[row])
    keep = np.ones(len(labels), bool)
    keep[list(reasons)] = False
    return {"image": images[keep], "label": labels[keep]}


def _concatenate(parts: list[Images]) -> Images:
    return {name: np.concatenate([part[name] for part in parts]) for name in ("image", "label")}


def _decode_images(encoded: list[bytes | None]) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """Decode RGB images on all cores; OpenCV releases the GIL.

    Args:
        encoded: PNG, WebP, JPEG, ...; None where a row has no bytes.

    Returns:
        uint8 [len(encoded), 32, 32, 3], and the reasons of those that can't be used, by their numbers; their
        pixels are undefined.
    """
    images = np.empty((len(encoded), SIDE, SIDE, 3), np.uint8)

    def why_bad(begin: int) -> dict[int, str]:
        reasons = {}
        for row in range(begin, min(begin + _CHUNK, len(encoded))):
            try:
                images[row] = _decode(encoded[row])
            except ValueError as error:
                reasons[row] = str(error).strip()
        return reasons

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        chunks = list(threads.map(why_bad, range(0, len(encoded), _CHUNK)))
    return images, {row: reason for chunk in chunks for row, reason in chunk.items()}


def _decode(encoded: bytes | None) -> NDArray[np.uint8]:
    # Unlike Pillow, OpenCV checks PNG checksums to the end; both give the same pixels for whole images.
    image = decode_image(encoded)
    if image.shape[:2] != (SIDE, SIDE):
        height, width = image.shape[:2]
        raise ValueError(f"the image has {height}x{width} pixels, {SIDE}x{SIDE} are needed")
    return image
