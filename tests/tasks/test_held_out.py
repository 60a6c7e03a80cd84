"""What tells the examples held out: the same wherever the data lies, another once they are others."""

import json
import random
import shutil
from pathlib import Path

import pytest

from adaecho.tasks import build_task
from tests.conftest import Compose
from tests.datasets import test_labelled_images
from tests.datasets.coco_files import content, write
from tests.datasets.test_labelled_images import folders, shard, table
from tests.tasks.test_imagenet import TINY
from tests.transforms.pictures import encoded

BOXES = ("task=coco", "task.ghost_size=null", "task.image_size=96")


def _held_out(compose_config: Compose, *typed: str) -> str:
    return str(build_task(compose_config(*typed)).facts["held_out_sha256"])


def _make(layout: str, top: Path) -> list[str]:
    if layout == "coco":
        write(top, "train", content(10))
        return [*BOXES, "data.validation_examples=4"]
    if layout == "folders":
        folders(top, {".": range(9)})
    else:
        for part in range(2):
            rows = range(5) if part == 0 else range(5, 9)
            (shard if layout == "tar" else table)(top / f"train-{part}.{layout}", rows)
    return [*TINY, "data.validation_examples=3", *(["task.num_classes=3"] if layout == "tar" else [])]


def _change(layout: str, top: Path) -> None:
    """The same images in another order."""
    if layout == "coco":
        file = next(top.rglob("*.json"))
        listed = json.loads(file.read_text())
        random.Random(0).shuffle(listed["images"])
        file.write_text(json.dumps(listed))
        return
    if layout == "folders":
        for folder in top.iterdir():
            first, *_, last = sorted(folder.iterdir())
            first.rename(folder / "new")
            last.rename(first)
            (folder / "new").rename(last)
        return
    for part in range(2):
        rows = range(8, 3, -1) if part == 0 else range(3, -1, -1)
        (shard if layout == "tar" else table)(top / f"train-{part}.{layout}", rows)


@pytest.mark.parametrize("layout", ["coco", "folders", "parquet", "tar"])
def test_it_is_the_same_elsewhere_and_another_of_another_order(
    compose_config: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(test_labelled_images, "encoded", lambda row: encoded(row) + bytes(600 * row))
    typed = _make(layout, tmp_path / "data")
    before = _held_out(compose_config, *typed, f"data.path={tmp_path / 'data'}")
    elsewhere = shutil.move(tmp_path / "data", tmp_path / "else where")
    moved = f"data.path='{elsewhere}'"
    assert _held_out(compose_config, *typed, moved) == before
    assert _held_out(compose_config, *typed, moved, "evaluate.max_examples=1") == before
    _change(layout, Path(elsewhere))
    assert _held_out(compose_config, *typed, moved) != before
