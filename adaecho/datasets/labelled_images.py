"""Encoded images with a class each: folders of classes, tables (parquet, the hub), tar shards.

ImageNet (O. Russakovsky et al., "Large Scale Visual Recognition Challenge", 2015) comes in each form.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tarfile import TarError
from typing import Any

from adaecho.datasets.stored import load
from adaecho.errors import DataError, how_they_differ, redact_urls
from adaecho.shards import TarShards
from adaecho.shards.tar_shards import shard_urls

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_VALIDATION = ("validation", "val", "valid", "test")


class ImageFiles:
    """Map-style: the bytes of each file, as ``image``, and its ``label`` where there are labels."""

    thread_safe = True

    def __init__(self, files: list[Path], labels: list[int] | None = None) -> None:
        self.files, self._labels = files, labels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> dict[str, Any]:
        example = {"image": self.files[row].read_bytes()}
        return example if self._labels is None else {**example, "label": self._labels[row]}

    def origin(self, row: int) -> str:
        """What to call an image in a message."""
        return str(self.files[row])


class ImageTable:
    """Map-style: rows of a split of ``datasets``, their images as bytes."""

    thread_safe = True  # rows of memory-mapped Arrow, which nothing writes to

    def __init__(self, split: Any, name: str) -> None:
        self._split, self._name = split, name

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, row: int) -> dict[str, Any]:
        example: dict[str, Any] = self._split[row]
        image = example["image"]
        if isinstance(image, dict):  # of image folders in an archive, say, the builder keeps paths alone
            image = image["bytes"] or Path(image["path"]).read_bytes()
        return {**example, "image": image}

    def origin(self, row: int) -> str:
        """What to call an image in a message."""
        return f"{self._name}, row {row}"


@dataclass(frozen=True)
class LabelledImages:
    """One split.

    Attributes:
        source: map-style, or ``TarShards``, which give their files as they are named.
        files: paths, or urls of shards.
        classes: their names in the order of their labels; empty where the data doesn't say (tar shards).
    """

    source: Any
    files: Sequence[Path | str]
    classes: Sequence[str] = ()


def find_both(path: str, validation_path: str | None = None) -> tuple[LabelledImages, LabelledImages | None]:
    """The training split under a path and, where there is one, the validation split.

    Args:
        path: a folder with ``train/<class>/`` and perhaps ``val/<class>/`` (validation, valid, test), or with
            folders of classes alone; with ``train*.tar`` and ``val*.tar``; or with parquet files; tar shards
            by path, url or pattern; or a hub id. Splits of tables are found by ``datasets``.
        validation_path: where else the validation images lie, in one of these forms; null: there.

    Raises:
        DataError: there are no such images, or fewer than two classes, or the splits name other classes.
    """
    splits = _splits(path, "data.path")
    if "train" not in splits:
        raise DataError(f"data.path={path}: has no training images, but {', '.join(splits) or 'nothing'}")
    train, validation = splits["train"], _validation_of(splits)
    if validation_path is not None:
        named = _splits(validation_path, "task.validation_path")
        validation = _validation_of(named) or named["train"]
    if len(train.classes) == 1:
        raise DataError(
            f"data.path={path}: one class ({train.classes[0]}); a classifier tells two or more apart: "
            "name the folder that holds a folder for each class"
        )
    others = () if validation is None else validation.classes
    if train.classes and others and train.classes != others:
        raise DataError(
            f"data.path={path}: its training and validation splits name other classes: "
            f"{how_they_differ(train.classes, others)}"
        )
    return train, validation


def _validation_of(splits: dict[str, LabelledImages]) -> LabelledImages | None:
    return next((splits[name] for name in _VALIDATION if name in splits), None)


def _splits(path: str, key: str) -> dict[str, LabelledImages]:
    top = Path(path).expanduser()
    if ".tar" in path.partition("?")[0].rpartition("/")[2]:
        return {"train": _tar_shards([path], key)}
    shards = {name: sorted(map(str, top.glob(f"{name}*.tar"))) for name in ("train", "val", "test")}
    if shards["train"]:
        return {name: _tar_shards(urls, key) for name, urls in shards.items() if urls}
    if not top.is_dir() or any(top.glob("*.parquet")) or any(top.glob("*/*.parquet")):
        stored = load(path, ("image", "label"), key)
        return {
            name: LabelledImages(
                ImageTable(split, f"{path} ({name})"),
                stored.files,
                getattr(split.features["label"], "names", ()),
            )
            for name, split in stored.splits.items()
        }
    inside = {name: top / name for name in ("train", *_VALIDATION) if (top / name).is_dir()}
    return {name: _class_folders(folder) for name, folder in (inside or {"train": top}).items()}


def _tar_shards(urls: list[str], key: str) -> LabelledImages:
    try:
        source = TarShards(urls)
    except ValueError as error:
        raise DataError(f"{key}: {error}") from error
    return LabelledImages(source, source.urls)


def read_shards(urls: list[str], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All examples of tar shards in stored order, each with what to call it in a message.

    Raises:
        DataError: there are no such shards, they can't be read, or hold no examples.
    """
    example = None
    try:
        for url in shard_urls(urls):
            for example in TarShards(url, shuffle=False):
                yield f"{example['__key__']} of {redact_urls(url)}", example
    except (ValueError, OSError, ImportError, TarError) as error:
        raise DataError(f"{key}: {error}") from error
    if example is None:
        raise DataError(f"{key}: {redact_urls(urls[0])}: the tar shards hold no examples")


def _class_folders(top: Path) -> LabelledImages:
    """Classes are the folders in one, by name, as torchvision's ``ImageFolder`` has them."""
    classes = sorted(folder.name for folder in top.iterdir() if folder.is_dir() and folder.name[0] != ".")
    files, labels = list[Path](), list[int]()
    for label, name in enumerate(classes):
        found = _images_in(top / name)
        if not found:
            raise DataError(
                f"{top / name}: this class folder holds no image ({', '.join(IMAGE_ENDINGS)}); fill it, or "
                "move it elsewhere"
            )
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(f"{top}: holds no folders of classes, no parquet files and no train*.tar")
    return LabelledImages(ImageFiles(files, labels), files, classes)


def _images_in(top: Path) -> list[Path]:
    """The images in a folder and all below it, in order; what is hidden is left out."""

    def found(folder: Path) -> Iterator[Path]:
        for entry in os.scandir(folder):
            if entry.name[0] == ".":
                continue
            if entry.is_dir():
                yield from found(folder / entry.name)
            elif entry.name.lower().endswith(IMAGE_ENDINGS):
                yield folder / entry.name

    return sorted(found(top)) if top.is_dir() else []
