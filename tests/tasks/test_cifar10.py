"""The CIFAR-10 task: all forms of storage give the same arrays; the test split is read at the end."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaecho.datasets import cifar10
from adaecho.datasets.storage import BadExampleBudget
from adaecho.tasks import build_task
from adaecho.tasks.base import Task
from adaecho.tasks.cifar10 import decode
from adaecho.tasks.images import Images
from tests.conftest import Compose
from tests.datasets.files import encode, random_images, write_images, write_pickles

IMAGES, LABELS = random_images(10), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
TEST_IMAGES, TEST_LABELS = random_images(4, seed=1), [0, 1, 2, 3]


def _parquet(folder: Path) -> Path:
    encoded = [
        encode(image, kind, lossless=True) for image, kind in zip(IMAGES, ["PNG", "WEBP"] * 5, strict=True)
    ]
    write_images(folder / "train-00000-of-00002.parquet", encoded[:6], LABELS[:6], "img")
    write_images(folder / "train-00001-of-00002.parquet", encoded[6:], LABELS[6:], "img")
    tests = [encode(image) for image in TEST_IMAGES]
    write_images(folder / "test-00000-of-00001.parquet", tests, TEST_LABELS, "img")
    return folder


def _pickles(folder: Path) -> Path:
    return write_pickles(
        folder / "cifar-10-batches-py", np.concatenate([IMAGES, TEST_IMAGES]), LABELS + TEST_LABELS, tests=4
    )


FORMS = {"parquet": _parquet, "pickles": _pickles}


@pytest.fixture(autouse=True)
def _of_the_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept small batches in place of the archive's."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, _: Path(path).exists())


def _assert_holds(examples: Images, images: Any, labels: Any) -> None:
    np.testing.assert_array_equal(examples["image"], images)
    np.testing.assert_array_equal(examples["label"], labels)


@pytest.mark.parametrize(
    ("form", "inner", "path"),
    [
        ("parquet", "", "."),
        ("parquet", "plain_text", "."),
        ("pickles", "", "."),
        ("pickles", "", "cifar-10-batches-py"),
    ],
)
def test_every_form_gives_the_stored_pixels_and_labels(
    tmp_path: Path, form: str, inner: str, path: str
) -> None:
    FORMS[form](tmp_path / inner)
    stored = cifar10.find(str(tmp_path / path), decode)
    for part, images, labels in (("train", IMAGES, LABELS), ("test", TEST_IMAGES, TEST_LABELS)):
        examples = stored.read(part, BadExampleBudget(0))
        _assert_holds(examples, images, labels)
        assert examples["image"].dtype == np.uint8
        assert examples["image"].flags.c_contiguous
        assert examples["label"].dtype == np.int64


def _build(compose_config: Compose, folder: Path, *overrides: str) -> Task:
    common = ("task=cifar10", f"data.path={folder}", "data.validation_examples=4")
    return build_task(compose_config(*common, *overrides))


def test_the_split_is_a_permutation_fixed_by_its_seed(compose_config: Compose, tmp_path: Path) -> None:
    task = _build(compose_config, _parquet(tmp_path), "data.split_seed=7")
    rows = np.random.default_rng(7).permutation(10)[:6]
    _assert_holds(task.source, IMAGES[rows], np.array(LABELS)[rows])


@pytest.mark.parametrize("form", FORMS)
def test_test_files_are_read_when_the_test_split_is_evaluated(
    compose_config: Compose, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FORMS[form](tmp_path)
    parts: list[str] = []
    find = cifar10.find

    def watched(*given: Any) -> Any:
        stored = find(*given)
        return stored._replace(read=lambda part, bad: parts.append(part) or stored.read(part, bad))

    monkeypatch.setattr(cifar10, "find", watched)
    task = _build(compose_config, tmp_path)
    model = task.build_model().eval()
    with torch.inference_mode():
        task.evaluate(model, "validation", device=torch.device("cpu"))
        assert parts == ["train"]
        metrics = task.evaluate(model, "test", device=torch.device("cpu"))
        predicted = model(torch.from_numpy(TEST_IMAGES)).argmax(1).numpy()
    assert parts == ["train", "test"]
    assert metrics["accuracy"] == pytest.approx((predicted == TEST_LABELS).mean())


def test_without_test_files_there_is_no_test_split(compose_config: Compose, tmp_path: Path) -> None:
    (_parquet(tmp_path) / "test-00000-of-00001.parquet").unlink()
    assert not _build(compose_config, tmp_path).has_test_split
