"""Encoded images: parquet in the hub's schema, a folder for each class, or tar shards; or without classes.

Those with a class are map-style sources of the bytes of an image and its label; task imagenet decodes them.
ImageNet (O. Russakovsky et al., "Large Scale Visual Recognition Challenge", 2015) comes in each form.
"""

import errno
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
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
    values,
    whole_numbers,
)
from adaecho.datasets.split import Rows, part_in
from adaecho.datasets.storage import (
    check_links,
    files_in,
    holds_records,
    identity_of,
    read_image,
    shard_errors,
    warn_of_unread,
)
from adaecho.errors import DataError, how_they_differ, warn
from adaecho.shards import IndexedTarShards

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_MOST_CLASSES = 1 << 20


class ImageFiles:
    """Map-style: the bytes of each file, as ``image``."""

    thread_safe = True

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"image": read_image(self.files[row])}

    def identity(self, row: int) -> str:
        """What tells an image from others, wherever the folder lies."""
        return identity_of(self.files[row])

    def origin(self, row: int) -> str:
        """What to call an image in a message."""
        return str(self.files[row])


class ImageTables:
    """Iterable: the bytes in the column ``image`` of parquet files, in stored order."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            with opened(file) as table:
                for rows in values(table, file, "image"):
                    for image in rows.to_pylist():
                        yield {"image": image["bytes"] if isinstance(image, dict) else image}


def find_images(path: str) -> ImageFiles | ImageTables:
    """The images under a path.

    Args:
        path: a folder, searched through with all folders inside it, or one file.

    Raises:
        DataError: there are none, or a parquet file has no image column.
    """
    top = Path(path).expanduser()
    if not top.exists():
        raise DataError(f"images={path}: there is no such file or folder")
    found = files_in(top, (*IMAGE_ENDINGS, ".parquet"))
    images = [file for file in found if file.suffix.lower() in IMAGE_ENDINGS]
    if images:
        return ImageFiles(images)
    tables = [file for file in found if file.suffix == ".parquet"]
    if not tables:
        raise DataError(f"images={path}: holds neither images ({', '.join(IMAGE_ENDINGS)}) nor parquet files")
    for file in tables:
        if "image" not in (names := read_schema(file).names):
            raise DataError(f"{file}: needs a column 'image', and has {', '.join(names)}")
    return ImageTables(tables)


Part = Literal["train", "validation"]

_NAMES: dict[Part, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "test", "testing"),
}
_GROUPS_KEPT = 8  # row groups of parquet in memory, 100 images each as the hub writes them
_MOST_KEPT = 1 << 30  # bytes of these


class ClassFolders(ImageFiles):
    """Map-style: the bytes of each file, as ``image``, and its ``label``."""

    def __init__(self, files: list[Path], labels: list[int]) -> None:
        super().__init__(files)
        self._labels = labels

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {**super().__getitem__(row), "label": self._labels[row]}


def _version(file: Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_size, about.st_mtime_ns


class LabelledTables:
    """Map-style: the columns ``image`` and ``label`` of parquet files, read by row group.

    Random access reads a whole row group for an image unless it is among the last that were read: where
    the files are many, ``data.order=shards`` goes through one after another instead. What
    ``datasets.load_dataset`` reads is found much faster, in an Arrow copy of all the data that it would write
    unasked into a cache.

    Attributes:
        shard_lengths: rows of each row group.
        labels: of all rows, int64.
        files: the tables.
        classes: their names, as far as the tables tell; else empty.
    """

    thread_safe = True

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._versions = {file: _version(file) for file in files}
        self.classes = class_names(files, "label")
        self._groups: list[tuple[Path, int]] = []
        lengths, labels = [], []
        for file in files:
            _check_schema(file)
            with opened(file) as table:
                for group in range(table.num_row_groups):
                    self._groups.append((file, group))
                    lengths.append(table.metadata.row_group(group).num_rows)
                column = held(table, file, "label")
            labels.append(whole_numbers(column, str(file)))
        self.labels = np.concatenate(labels)
        self.shard_lengths = np.array(lengths, dtype=np.int64)
        self._first = [0, *np.cumsum(self.shard_lengths).tolist()]
        self._kept: dict[int, Any] = {}  # a plain dict, so that copies of this can be pickled

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        group = bisect_right(self._first, row) - 1
        image = self._images(group)[row - self._first[group]].as_py()
        return {"image": image["bytes"] if isinstance(image, dict) else image, "label": int(self.labels[row])}

    def _images(self, group: int) -> Any:
        """The column of a row group, as Arrow has it: Python's objects of all its rows take as long again."""
        images = self._kept.get(group)
        if images is None:
            file, number = self._groups[group]
            with opened(file) as table:
                images = held(table, file, "image", [number])
            if _version(file) != self._versions[file]:  # its labels were read before
                raise OSError(errno.ESTALE, "it has changed since this command began", str(file))
            kept = list(self._kept.items())[-(_GROUPS_KEPT - 1) :]
            while sum(each.nbytes for _, each in kept) > _MOST_KEPT:
                kept.pop(0)
            # A new dict, so that another thread goes on with the old one.
            self._kept = {**dict(kept), group: images}
        return images

    def identity(self, row: int) -> str:
        """What tells an image from others, wherever the tables lie."""
        group = bisect_right(self._first, row) - 1
        file, number = self._groups[group]
        at = row - self._first[group]
        return f"{identity_of(file)} {number} {at} {self.labels[row]}"

    def origin(self, row: int) -> str:
        """What to call an image in a message."""
        group = bisect_right(self._first, row) - 1
        file, number = self._groups[group]
        return f"{file}, row {row - self._first[group]} of row group {number}"


@dataclass(frozen=True)
class LabelledImages:
    """One split.

    Attributes:
        source: map-style; tar shards give their files as they are named.
        num_classes: None where the data doesn't say (tar shards).
        classes: their names; empty where the data doesn't say.
    """

    source: Any
    num_classes: int | None
    classes: tuple[str, ...] = ()


def find_labelled(path: str, part: Part, key: str = "data.path") -> LabelledImages | None:
    """One split under a path; None where there is none of that part.

    Args:
        path: a folder with ``train-*.parquet`` and ``validation-*.parquet`` (in it or in ``data/``), with
            ``train/<class>/`` and ``val/<class>/`` (Train, Training or Test as well), with ``train*.tar`` and
            ``val*.tar``, or with folders of classes alone (which are "train"); tar shards, by path, url or
            pattern ("train" too); or a hub id.
        part: "train" or "validation".
        key: of the config, that names the path.

    Raises:
        DataError: there is no such data, a class folder is empty, or a file is not in its schema.
    """
    top = Path(path).expanduser()
    if ".tar" in path.partition("?")[0].rpartition("/")[2]:
        return _tar([path], key) if part == "train" else None
    if not top.exists():
        if "://" in path or path.count("/") != 1:
            raise DataError(f"{key}={path}: there is no such folder, and urls must be of tar shards (*.tar)")
        return _from_hub(path, part)
    if not top.is_dir():
        raise DataError(f"{key}={path}: is a file; name the folder that holds it")
    inside = {folder.name.lower(): folder for folder in _folders_in(top)}
    if part == "train":
        read = {shard for names in _NAMES.values() for name in names for shard in top.glob(f"{name}*.tar")}
        warn_of_unread(top, {*top.iterdir()} - read)
    for name in _NAMES[part]:
        tables, inner = (sorted(top.glob(f"{folder}{name}-*.parquet")) for folder in ("", "data/"))
        if tables and inner:
            raise DataError(
                f"{inner[0]}: lies beside {tables[0]}, as of another download; move one of them away"
            )
        if tables or inner:
            return _tables(tables or inner)
        shards = sorted(top.glob(f"{name}*.tar"))
        if shards:
            check_parts(shards)
            return _tar([str(shard) for shard in shards], key)
        if name in inside:
            warn_of_unread(inside[name], inside[name].iterdir())
            return _folders(inside[name])
    has_parts = any(name in inside for names in _NAMES.values() for name in names)
    return _folders(top) if part == "train" and not has_parts else None


def find_both(path: str, validation_path: str | None = None) -> tuple[LabelledImages, LabelledImages | None]:
    """The training split under a path and, where there is one, the validation split, of the same classes.

    Args:
        path: see ``find_labelled``.
        validation_path: another path, of a validation split or of training images alone; null: the same one.

    Raises:
        DataError: see ``find_labelled``; or there is one class, or the splits name other classes.
    """
    train = find_labelled(path, "train")
    if train is None:
        raise DataError(
            f"data.path={path}: has a validation split and no training images, as its folders or files are "
            f"named ({', '.join(_NAMES['validation'])}); rename a class of that name"
        )
    if train.num_classes == 1:
        name = next(iter(train.classes), "")
        inside = Path(path).expanduser() / name
        is_above = bool(name) and inside.is_dir() and any(one.is_dir() for one in inside.iterdir())
        raise DataError(
            f"data.path={path}: one class{name and ': '}{name}; "
            + (f"did you mean data.path={inside}?" if is_above else "a classifier tells two or more apart")
        )
    if validation_path is None:
        validation = find_labelled(path, "validation")
        if validation is None:
            _warn_beside(Path(path).expanduser())
    else:
        key = "task.validation_path"
        validation = find_labelled(validation_path, "validation", key)
        validation = validation or find_labelled(validation_path, "train", key)
    if validation is not None:
        _check_classes(path, train, validation)
    return train, validation


def _warn_beside(top: Path) -> None:
    """Warn of what is left out beside the training split, where none is named as for validation."""
    inside = [folder.name for folder in _folders_in(top)] if top.is_dir() else []
    others = [name for name in inside if name.lower() not in _NAMES["train"]]
    left_out = others if len(others) < len(inside) else []
    found = (one for kind in ("*.parquet", "data/*.parquet", "*.tar") for one in sorted(top.glob(kind)))
    left_out += [one.name for one in found if part_in(one.name.lower()) not in ("", "train")]
    if left_out:
        warn(
            f"data.path={top}: beside the training images {len(left_out)} are left out "
            f"({', '.join(left_out[:3])}), as none is named {', '.join(_NAMES['validation'])}; to hold out "
            "one, rename it so"
        )


def _check_classes(path: str, train: LabelledImages, validation: LabelledImages) -> None:
    """Raises DataError where the splits' labels mean other classes, as far as the data tells."""
    if bool(validation.classes) != bool(train.classes):
        if isinstance(train.source, LabelledTables) and isinstance(validation.source, LabelledTables):
            return  # both number them, and not every writer tells the names
        named, numbered = ("training", "validation") if train.classes else ("validation", "training")
        raise DataError(
            f"data.path={path}: its {named} split names its classes, its {numbered} split numbers them, so "
            "it can't be told which is which; store both in one form"
        )
    if validation.classes != train.classes:
        raise DataError(
            f"data.path={path}: its training and validation splits name other classes: "
            f"{how_they_differ(train.classes, validation.classes)}"
        )


def files_of(source: Any) -> list[Path] | list[str]:
    """What a source that ``find_labelled`` has found is read from: files, or urls of shards."""
    source = source.dataset if isinstance(source, Rows) else source
    if isinstance(source, IndexedTarShards):
        return source.urls
    return source.files if isinstance(source, ClassFolders | LabelledTables) else hub.files_of(source)


def _folders_in(top: Path) -> list[Path]:
    """The folders in one that are no records, in order."""
    inside = sorted(path for path in top.iterdir() if path.name[0] != ".")
    dotted = any(path.suffix and path.is_dir() for path in inside)  # else a file's name ends in one
    check_links(path for path in inside if dotted or not path.suffix)
    return [path for path in inside if path.is_dir() and not holds_records(os.listdir(path))]


def _folders(top: Path) -> LabelledImages:
    classes = [folder.name for folder in _folders_in(top)]
    files: list[Path] = []
    labels: list[int] = []
    others: Counter[str] = Counter()  # by their endings
    deeper: list[Path] = []
    for label, name in enumerate(classes):
        inside = files_in(top / name, IMAGE_ENDINGS)
        found = [file for file in inside if file.suffix.lower() in IMAGE_ENDINGS]
        others.update(file.suffix.lower() for file in inside if file.suffix.lower() not in IMAGE_ENDINGS)
        if not found:
            raise DataError(
                f"{top / name}: this class folder holds no image ({', '.join(IMAGE_ENDINGS)}); "
                "fill it, or move it elsewhere"
            )
        deeper += [file for file in found if file.parent != top / name]
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(
            f"{top}: holds no folders of classes, no train-*.parquet and no train*.tar (shards are read "
            "plain: gunzip those that end in .gz)"
        )
    _warn_of_folders(top, classes, len(files), deeper, others)
    return LabelledImages(ClassFolders(files, labels), len(classes), tuple(classes))


def _warn_of_folders(
    top: Path, classes: list[str], number: int, deeper: list[Path], others: Counter[str]
) -> None:
    """Tell what may be meant otherwise than it is read.

    Args:
        number: of images.
        deeper: those that don't lie in their class's folder itself.
        others: how many files are left out, by their endings.
    """
    parts = {part: name for name in classes if (part := part_in(name.lower()))}
    if len(parts) > 1 and "train" in parts:
        warn(
            f"{top}: {' and '.join(parts.values())} are taken for classes; if they are parts, name the one "
            "folder train and the other val or test"
        )
    if deeper:
        first = deeper[0].relative_to(top)
        warn(
            f"{top}: {len(deeper)} of its {number} images lie deeper than in the folder of their class, "
            f"which is the first below it: {first} is of {first.parts[0]}"
        )
    if others:
        kinds = ", ".join(
            f"{count} {ending or 'without an ending'}" for ending, count in sorted(others.items())
        )
        warn(
            f"{top}: {others.total()} files in its class folders are left out, as images end in "
            f"{', '.join(IMAGE_ENDINGS)}: {kinds}"
        )


def _tables(files: list[Path]) -> LabelledImages:
    check_parts(files)
    source = LabelledTables(files)
    if not len(source):
        raise DataError(f"{files[0]}: holds no rows")
    if source.labels.min() < 0:
        row = int(source.labels.argmin())
        raise DataError(
            f"{source.origin(row)}: its label is {source.labels[row]}; this split is not labelled"
        )
    if source.labels.max() >= _MOST_CLASSES:
        row = int(source.labels.argmax())
        raise DataError(
            f"{source.origin(row)}: its label is {source.labels[row]}; labels number the classes from 0, at "
            f"most {_MOST_CLASSES:,} of them"
        )
    return LabelledImages(source, int(source.labels.max()) + 1, source.classes)


def _tar(shards: list[str], key: str) -> LabelledImages:
    with shard_errors(key):
        source = IndexedTarShards(shards)
    if not len(source):
        raise DataError(f"{key}={shards[0]}: the tar shards hold no examples")
    return LabelledImages(source, None)


def _from_hub(name: str, part: Part) -> LabelledImages | None:
    splits = hub.load(name)
    stored = next((splits[one] for one in _NAMES[part] if one in splits), None)
    if stored is None:
        if part == "train":
            raise DataError(f"data.path={name}: has no split train but {', '.join(splits)}")
        return None
    from datasets import ClassLabel, Image

    label = stored.features.get("label")
    if not isinstance(stored.features.get("image"), Image) or not isinstance(label, ClassLabel):
        raise DataError(
            f"data.path={name}: needs the columns image (images) and label (named classes), and has "
            f"{', '.join(stored.features)}"
        )
    encoded = stored.cast_column("image", Image(decode=False))
    return LabelledImages(encoded, label.num_classes, tuple(label.names))


def _check_schema(file: Path) -> None:
    from pyarrow import types

    schema = read_schema(file)
    has_both = {"image", "label"} <= set(schema.names)
    if not has_both or not types.is_integer(schema.field("label").type):
        raise DataError(f"{file}: needs the columns image and label (integers), and has {describe(schema)}")
