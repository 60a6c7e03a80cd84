"""python -m adaecho.show: a picture of what a run predicts."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from adaecho import show
from adaecho.datasets.split import hold_out
from adaecho.tasks import build_task
from adaecho.tasks.digits import read_digits
from adaecho.training.trial import run_trial
from tests.conftest import Compose, Refused

SCENES = (
    "task=scenes", "task.training_scenes=32", "data.validation_examples=8", "batch_size=16",
    "echo.shuffle_buffer=1", "precision=float32", "max_steps=2", "target.value=null",
)  # fmt: skip
DIGITS = ("task=digits", "max_steps=2", "target.value=null", "echo.shuffle_buffer=1")


@pytest.mark.parametrize("task", [SCENES, DIGITS], ids=["boxes", "mistakes"])
def test_it_writes_a_picture_of_a_run(
    compose_config: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: tuple[str, ...]
) -> None:
    run_trial(compose_config(*task), tmp_path / "run")
    capsys.readouterr()
    show.main([str(tmp_path / "run"), "--number", "3"])
    file = Path(capsys.readouterr().out.strip())
    assert file.parent == tmp_path / "run" / "pictures"
    picture = cv2.imread(str(file))
    assert picture is not None
    assert picture.std() > 10
    show.main([str(tmp_path / "run"), "--out", str(tmp_path / "b.svg")])
    assert "<svg" in (tmp_path / "b.svg").read_text()
    show.main([str(tmp_path / "run"), "--out", str(tmp_path / "c.jpg")])
    assert (tmp_path / "c.jpg").read_bytes().startswith(b"\xff\xd8")


class _Perfect(nn.Module):
    """Answers from the labels it is given, except the third."""

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
    config = compose_config(*DIGITS)
    task = build_task(config)
    assert task.pictures is not None
    _, held_out = hold_out(read_digits(), 360, seed=0)
    labels = torch.from_numpy(held_out["label"])
    (only,) = task.pictures(_Perfect(labels), 5, torch.device("cpu"))
    right = int(labels[2])
    assert only.title == f"{(right + 1) % 10}, true {right}"
    assert only.image.dtype == np.uint8


def test_a_file_that_can_not_be_written_is_refused_by_name(
    compose_config: Compose, tmp_path: Path, refused: Refused
) -> None:
    run_trial(compose_config(*DIGITS), tmp_path / "run")
    out = tmp_path / "a folder.png"
    out.mkdir()
    said = refused(show.main, tmp_path / "run", "--out", out)
    assert f"error: {out}: can't be written (Is a directory)" in said


@pytest.mark.parametrize("what", ["no run", "no checkpoint"])
def test_a_folder_without_a_model_is_refused(
    compose_config: Compose, tmp_path: Path, refused: Refused, what: str
) -> None:
    if what == "no checkpoint":
        run_trial(compose_config(*DIGITS), tmp_path / "run")
        for file in (tmp_path / "run" / "checkpoint").iterdir():
            file.unlink()
    said = refused(show.main, tmp_path / "run")
    assert ("no config.yaml" if what == "no run" else "no checkpoint") in said
