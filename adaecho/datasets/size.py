"""How much data a path holds, from names and tables alone: nothing is decoded, and no torch is loaded."""

import sys
from pathlib import Path

from adaecho.config.tasks import Size
from adaecho.datasets.coco import has_split, read_coco
from adaecho.datasets.documents import find_documents
from adaecho.datasets.labelled_images import find_labelled
from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import DataError

_BYTES_PER_TOKEN = 3  # of English with a vocabulary of some thousand; only the scale matters


def size_of_photographs(path: str, validation_path: str | None) -> Size:
    """The photographs of task imagenet; raises DataError where there are none to train on."""
    train = find_labelled(path, "train")
    if train is None:
        raise DataError(f"data.path={path}: has a validation split and no training images")
    own = validation_path is not None or find_labelled(path, "validation") is not None
    return Size(len(train.source), len(train.source), own)


def size_of_boxes(path: str, *, keep_without: bool) -> Size:
    """The images of task coco, those without boxes too if they are kept."""
    images = read_coco(path, "train", SkippedExamples(sys.maxsize))
    usable = images if keep_without else images.with_boxes()
    return Size(len(usable), len(images), has_split(Path(path).expanduser(), "val"))


def size_of_text(path: str, *, column: str, lines: bool, block: int) -> Size:
    """The blocks of documents, by their bytes; raises DataError where none could be held out."""
    files = find_documents(path, column=column, lines=lines)
    documents = sum(files.count(file) for file in files.parts["train"])
    characters = sum(file.stat().st_size for file in files.parts["train"])
    own = not {"validation", "test"}.isdisjoint(files.parts)
    if documents < 2 and not own:
        raise DataError(
            f"data.path={path}: holds one document, so none could be held out; give several files, or "
            "task.lines=true to take each line as one"
        )
    return Size(max(characters // _BYTES_PER_TOKEN // block, 1), documents, own, "blocks")
