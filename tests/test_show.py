"""python -m adaecho.show draws predictions of a run."""

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from adaecho import show
from adaecho.datasets.split import train_validation_split
from adaecho.tasks import build_task
from adaecho.tasks.digits import read_digits
from adaecho.training.trial import run_trial
from tests.conftest import Compose, Refused
from tests.needs import first_form

SHORT = ("max_steps=2", "target.value=null", "echo.shuffle_buffer=1")
SCENES = (
    "task=scenes", "task.training_scenes=32", "data.validation_examples=8", "batch_size=16",
    "precision=float32", *SHORT,
)  # fmt: skip


@pytest.fixture(scope="module")
def digits(compose_config: Compose, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("digits") / "run"
    run_trial(compose_config("task=digits", *SHORT), run)
    return run


@pytest.mark.parametrize("what", first_form("mistakes", also=["boxes"]))
def test_it_writes_a_picture_of_a_run(
    compose_config: Compose, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    run = digits
    if what == "boxes":
        run = tmp_path / "run"
        run_trial(compose_config(*SCENES), run)
    capsys.readouterr()
    show.main([str(run), "--number", "3"])
    file = Path(capsys.readouterr().out.strip())
    assert file.parent == run / "pictures"
    picture = cv2.imread(str(file))
    assert picture is not None
    assert picture.std() > 10
    show.main([str(run), "--out", str(tmp_path / "b.svg")])
    assert "<svg" in (tmp_path / "b.svg").read_text()
    show.main([str(run), "--out", str(tmp_path / "c.jpg")])
    assert (tmp_path / "c.jpg").read_bytes().startswith(b"\xff\xd8")


class _Perfect(nn.Module):
    """Predicts the given labels, except the third one."""

    def __init__(self, labels: torch.Tensor) -> None:
        super().__init__()
        self.labels, self.at = labels, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        labels = self.labels[self.at : self.at + len(images)].clone()
        if self.at == 0:
            labels[2] = (labels[2] + 1) % 10
        self.at += len(images)
        return nn.functional.one_hot(labels, 10).float()


def test_only_mistakes_of_a_classifier_are_shown(compose_config: Compose) -> None:
    task = build_task(compose_config("task=digits"))
    assert task.pictures is not None
    _, held_out = train_validation_split(read_digits(), 360, seed=0)
    labels = torch.from_numpy(held_out["label"])
    (only,) = task.pictures(_Perfect(labels), 5, torch.device("cpu"))
    right = int(labels[2])
    assert only.title == f"{(right + 1) % 10}, true {right}"
    assert only.image.dtype == np.uint8


def test_an_ordinary_mistake_gets_one_message(digits: Path, tmp_path: Path, refused: Refused) -> None:
    out = tmp_path / "a folder.png"
    out.mkdir()
    said = refused(show.main, digits, "--out", out)
    assert f"error: {out}: Is a directory; free space, make it writable" in said
    assert "no config.yaml" in refused(show.main, tmp_path / "absent")
    without = shutil.copytree(digits, tmp_path / "run")
    for file in [without / "checkpoint" / "last.pt", *(without / "model").iterdir()]:
        file.unlink()
    assert "neither weights nor a checkpoint" in refused(show.main, without)
