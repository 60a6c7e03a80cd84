"""Tiny data of the workloads that read files, and short runs on it, for the campaign."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from adaecho.config.schema import from_plain, to_plain
from adaecho.run import CONF
from tests.datasets import coco_files, text_files
from tests.tasks.test_changed_data import DATA, LABELS
from tests.tasks.test_detection_tasks import TINY_COCO
from tests.tasks.test_text import TINY as TINY_TEXT

RUN = ("tracking=none", "device=cpu", "target.value=null", "precision=float32", "checkpoint_every_s=0")


def _coco(folder: Path) -> None:
    coco_files.write(folder, "train", coco_files.content(12))
    coco_files.write(folder, "val", coco_files.content(4, first=20))


def _lm1b(folder: Path) -> None:
    text_files.write_parquet(folder / "train-0.parquet", list(text_files.lines()[:600]))
    text_files.write_parquet(folder / "test-0.parquet", list(text_files.lines()[600:700]))


# What writes the data, and the overrides of a run of some ten steps.
WORKLOADS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    **{
        name: (lambda folder, write=write: write(folder, LABELS), overrides)  # type: ignore[misc]
        for name, (write, overrides, _) in DATA.items()
    },
    "coco": (_coco, TINY_COCO),
    "lm1b": (_lm1b, ("task=lm1b", *TINY_TEXT)),
}


@cache
def config_of(name: str, folder: Path) -> dict[str, Any]:
    """The plain config of a run of a workload, whose data is written into ``folder`` if it isn't there."""
    write, overrides = WORKLOADS[name]
    if not folder.exists():
        folder.mkdir(parents=True)
        write(folder)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        composed = compose("config", overrides=[*overrides, *RUN, f"data.path={folder}"])
        return to_plain(from_plain(to_plain(composed)))


def change(choose: random.Random, folder: Path) -> Path:
    """Flip one bit of one file; which."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = choose.choice(files)
    data = bytearray(path.read_bytes())
    data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    path.write_bytes(data)
    return path
