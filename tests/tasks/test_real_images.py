"""A classifier learns from real photographs, those that scikit-learn brings along."""

from pathlib import Path

import cv2
import numpy as np
from sklearn.datasets import load_sample_images

from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.helpers import metrics


def photographs(top: Path) -> Path:
    """Parts of 96 x 72 pixels of a temple and of a flower; those of a split come from its half of each."""
    rng = np.random.default_rng(0)
    for name, photograph in zip(("temple", "flower"), load_sample_images().images, strict=True):
        for split, number, begin, end in (("train", 24, 0, 320), ("val", 16, 320, 640)):
            for row in range(number):
                x, y = rng.integers(begin, end - 96), rng.integers(0, photograph.shape[0] - 72)
                file = top / split / name / f"{row}.jpg"
                file.parent.mkdir(parents=True, exist_ok=True)
                assert cv2.imwrite(str(file), photograph[y : y + 72, x : x + 96, ::-1])
    return top


def test_imagenet_tells_two_photographs_apart(compose_config: Compose, tmp_path: Path) -> None:
    config = compose_config(
        "task=imagenet", f"data.path={photographs(tmp_path / 'data')}", "precision=float32",
        "target.value=null", "channels_last=false", "data.num_workers=1",
        "task.model=resnet18", "task.image_size=32", "task.ghost_size=4", "batch_size=8",
        "echo.shuffle_buffer=16", "optimizer.learning_rate=0.003", "evaluate.batch_size=32",
        "task.min_crop_area=0.5", "task.colour_distortion=0.1",
        "evaluate.every_fresh_examples=96", "max_fresh_examples=288",
    )  # fmt: skip
    summary = run_trial(config, tmp_path / "run")
    assert metrics(tmp_path / "run")[-1]["train_loss"] < 0.65  # guessing has ln 2 = 0.69
    assert summary["best"]["value"] >= 0.75  # guessing has 0.5
