"""Read encoded images with one class label each, from class folders, parquet tables, the hub or tar shards.

ImageNet (O. Russakovsky et al., "Large Scale Visual Recognition Challenge", 2015) is an example of such data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tarfile import TarError
from typing import Any

from adaecho.datasets.storage import load_tables, visible_files
from adaecho.errors import DataError, how_they_differ, redact_urls
from adaecho.shards import TarShards
from adaecho.shards.tar_shards import shard_urls

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_VALIDATION = ("validation", "val", "valid", "test")


class ImageFiles:
    """A map-style dataset of image files. An example is ``{"image": bytes of the file, "label": int}``."""

    thread_safe = True

    def __init__(self, files: list[Path], labels: list[int]) -> None:
        self.files, self.labels = files, labels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"image": self.files[row].read_bytes(), "label": self.labels[row]}

    def origin(self, row: int) -> str:
        """Return the name of an image, for messages."""
        return str(self.files[row])


class ImageTable:
    """A map-style dataset of the rows of a Hugging Face table, with images as bytes."""

    thread_safe = True  # the rows are memory-mapped Arrow data, which no code writes to

    def __init__(self, split: Any, name: str) -> None:
        self._split, self._name = split, name

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, row: int) -> dict[str, Any]:
        example: dict[str, Any] = self._split[row]
        image = example["image"]
        # Some builders store only the paths of image files, for example inside a zip archive.
        if isinstance(image, dict):
            image = image["bytes"] or Path(image["path"]).read_bytes()
        return {**example, "image": image}

    def origin(self, row: int) -> str:
        """Return the name of an image, for messages."""
        return f"{self._name}, row {row}"


@dataclass(frozen=True)
class LabeledImages:
    """One split of a dataset of labeled images.

    Attributes:
        source: a map-style dataset, or ``TarShards``.
        files: paths of files, or urls of shards.
        classes: names of the classes in the order of their labels; empty if the data has no names.
    """

    source: Any
    files: Sequence[Path | str]
    classes: Sequence[str] = ()


def find_both(path: str, validation_path: str | None = None) -> tuple[LabeledImages, LabeledImages | None]:
    """Find the training images and, if present, the validation images of a dataset.

    Args:
        path: where the images are, as one of these:

            * tar shards, given by path, URL or pattern;
            * the id of a dataset on the Hugging Face Hub;
            * a folder with ``train/<class>/`` and optionally ``val/<class>/`` (or validation, valid, test);
            * a folder of class folders, without splits;
            * a folder with ``train*.tar`` and optionally ``val*.tar``;
            * a folder of parquet files.

        validation_path: the validation images in one of these forms; None if they are under ``path``.

    Raises:
        DataError: there are no such images, there is only one class, or the splits have different classes.
    """
    splits = _splits(path, "data.path")
    if "train" not in splits:
        raise DataError(f"data.path={path}: has no training images (splits: {', '.join(splits) or 'none'})")
    train, validation = splits["train"], _validation_of(splits)
    if validation_path is not None:
        named = _splits(validation_path, "task.validation_path")
        validation = _validation_of(named) or named["train"]
    if len(train.classes) == 1:
        raise DataError(
            f"data.path={path}: has one class ({train.classes[0]}), but a classifier needs two or more; set "
            "the folder that contains the class folders"
        )
    others = () if validation is None else validation.classes
    if train.classes and others and train.classes != others:
        raise DataError(
            f"data.path={path}: the training and validation splits have different classes: "
            f"{how_they_differ(train.classes, others)}"
        )
    return train, validation


def _validation_of(splits: dict[str, LabeledImages]) -> LabeledImages | None:
    return next((splits[name] for name in _VALIDATION if name in splits), None)


def _splits(path: str, key: str) -> dict[str, LabeledImages]:
    top = Path(path).expanduser()
    shards = {name: sorted(map(str, top.glob(f"{name}*.tar"))) for name in ("train", "val", "test")}
    if ".tar" in path.partition("?")[0].rpartition("/")[2]:
        shards = {"train": [path]}
    if shards["train"]:
        sources = {name: open_shards(urls, key) for name, urls in shards.items() if urls}
        return {name: LabeledImages(source, source.urls) for name, source in sources.items()}
    if not top.is_dir() or any(top.glob("*.parquet")) or any(top.glob("*/*.parquet")):
        tables = load_tables(path, ("image", "label"), key)
        images = {name: ImageTable(split, f"{path} ({name})") for name, split in tables.splits.items()}
        classes = {n: getattr(s.features["label"], "names", ()) for n, s in tables.splits.items()}
        return {name: LabeledImages(images[name], tables.files, classes[name]) for name in images}
    inside = {name: top / name for name in ("train", *_VALIDATION) if (top / name).is_dir()}
    return {name: _class_folders(folder) for name, folder in (inside or {"train": top}).items()}


def open_shards(urls: list[str], key: str, **settings: int) -> TarShards:
    """Return ``TarShards(urls, **settings)``. If this fails, the error names the config key."""
    try:
        return TarShards(urls, **settings)  # type: ignore[arg-type]
    except ValueError as error:
        raise DataError(f"{key}: {error}") from error


def read_shards(urls: list[str], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all examples of tar shards in stored order, as pairs (name, example)."""
    example = None
    try:
        for url in shard_urls(urls):
            for example in TarShards(url, shuffle=False):
                yield f"{example['__key__']} of {redact_urls(url)}", example
    except (ValueError, OSError, ImportError, TarError) as error:
        raise DataError(f"{key}: {error}") from error
    if example is None:
        raise DataError(f"{key}: {redact_urls(urls[0])}: the tar shards contain no examples")


def _class_folders(top: Path) -> LabeledImages:
    """Use each folder in ``top`` as a class, sorted by name as in torchvision's ``ImageFolder``."""
    classes = sorted(folder.name for folder in top.iterdir() if folder.is_dir() and folder.name[0] != ".")
    files, labels = list[Path](), list[int]()
    for label, name in enumerate(classes):
        found = sorted(f for f in visible_files(top / name) if f.name.lower().endswith(IMAGE_ENDINGS))
        if not found:
            raise DataError(
                f"{top / name}: this class folder contains no image ({', '.join(IMAGE_ENDINGS)}); add images "
                "or remove the folder"
            )
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(f"{top}: contains no class folders, no parquet files and no train*.tar")
    return LabeledImages(ImageFiles(files, labels), files, classes)
