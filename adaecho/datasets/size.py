"""How much data a path holds, from names and tables alone: nothing is decoded, and no torch is loaded."""

import sys
from pathlib import Path
from typing import Any

from adaecho.config.size import Size
from adaecho.datasets.coco import has_split, read_coco
from adaecho.datasets.documents import find_documents
from adaecho.datasets.labelled_images import find_labelled
from adaecho.datasets.skipped_examples import SkippedExamples
from adaecho.errors import ConfigError, DataError

_BYTES_PER_TOKEN = 3  # of English with a vocabulary of some thousand; only the scale matters


def size_of(path: str, task: dict[str, Any]) -> Size:
    """The size of the data in ``data.path`` for a task, given by its plain keys ``task.*``.

    Raises:
        ConfigError: the task's data has no such measure.
        DataError: there is no such data.
    """
    name = task["name"]
    if name == "imagenet":
        return _of_photographs(path, task["validation_path"])
    if name == "coco":
        return _of_boxes(path, keep_without=task["keep_images_without_boxes"])
    if name in ("small_text", "lm1b"):
        return _of_text(path, task)
    raise ConfigError(f"scale: is of tasks imagenet, coco and small_text, not of {name}; drop scale=")


def _of_photographs(path: str, validation_path: str | None) -> Size:
    train = find_labelled(path, "train")
    if train is None:
        raise DataError(f"data.path={path}: has a validation split and no training images")
    own = validation_path is not None or find_labelled(path, "validation") is not None
    return Size(len(train.source), len(train.source), own)


def _of_boxes(path: str, *, keep_without: bool) -> Size:
    images = read_coco(path, "train", SkippedExamples(sys.maxsize))
    usable = images if keep_without else images.with_boxes()
    return Size(len(usable), len(images), has_split(Path(path).expanduser(), "val"))


def _of_text(path: str, task: dict[str, Any]) -> Size:
    files = find_documents(path, column=task["column"], lines=task["lines"])
    documents = sum(files.count(file) for file in files.parts["train"])
    characters = sum(file.stat().st_size for file in files.parts["train"])
    own = not {"validation", "test"}.isdisjoint(files.parts)
    if documents < 2 and not own:
        raise DataError(
            f"data.path={path}: holds one document, so none could be held out; give several files, or "
            "task.lines=true to take each line as one"
        )
    return Size(max(characters // _BYTES_PER_TOKEN // task["block"], 1), documents, own, "blocks")
