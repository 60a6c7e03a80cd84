"""Mistakes in CIFAR-10 data: one message that names the key or file, the fault and the remedy."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from adaecho.datasets import cifar10
from adaecho.datasets.storage import BadExampleBudget
from adaecho.errors import DataError
from adaecho.tasks import build_task
from adaecho.tasks.cifar10 import decode
from adaecho.tasks.images import Images
from tests.conftest import Compose
from tests.datasets.files import encode, random_images, write_images, write_pickles

TRAIN = "train-00000-of-00001.parquet"
GOOD = [encode(image) for image in random_images(8)]


def _read(folder: Path, budget: int = 0) -> Images:
    return cifar10.find(str(folder), decode).read("train", BadExampleBudget(budget))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "data.path=null: cifar10 needs a folder or a Hub ID"),
        ("/no/such/folder", "data.path=/no/such/folder: there is no such file or folder"),
        ("no_folder", "data.path=no_folder: there is no such file or folder"),
        (".", r"data\.path=\.: cannot be loaded"),
    ],
)
def test_a_wrong_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        cifar10.find(path, decode)


def test_other_columns_and_truncated_files_are_refused(tmp_path: Path) -> None:
    file = write_images(tmp_path / TRAIN, GOOD, [0] * 8)
    with pytest.raises(DataError, match="needs the columns img, label, but has image, label"):
        _read(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"cannot be loaded .*Check files"):
        _read(tmp_path)


BAD_ROWS: dict[str, tuple[bytes | None, int | None, str]] = {
    "corrupt": (b"not an image", 1, "corrupt or truncated"),
    "no bytes": (None, 1, "an encoded image must be bytes"),
    "shape": (encode(random_images(1, side=28)[0]), 1, "28x28 pixels, expected 32x32"),
    "label too large": (GOOD[0], 10, "label 10 is not between 0 and 9"),
    "no label": (GOOD[0], None, "label None is not between 0 and 9"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_stops_the_run_and_is_named(tmp_path: Path, case: str) -> None:
    image, label, reason = BAD_ROWS[case]
    write_images(tmp_path / TRAIN, [*GOOD[:5], image], [0, 1, 2, 3, 4, label], "img")
    with pytest.raises(DataError) as caught:
        _read(tmp_path)
    assert all(part in str(caught.value) for part in ("(train), row 5: ", reason, "data.max_bad_examples=0"))


def test_bad_rows_within_the_budget_are_skipped_and_listed(
    compose_config: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    images = [GOOD[0], b"?", *GOOD[2:5], b"?", *GOOD[6:]]
    write_images(tmp_path / TRAIN, images, [0, 1, 2, 3, 99, 5, 6, 7], "img")
    examples = _read(tmp_path, budget=3)
    np.testing.assert_array_equal(examples["label"], [0, 2, 3, 6, 7])
    np.testing.assert_array_equal(examples["image"], random_images(8)[[0, 2, 3, 6, 7]])

    config = ("task=cifar10", f"data.path={tmp_path}", "data.validation_examples=2")
    task = build_task(compose_config(*config, "data.max_bad_examples=3"))
    assert task.skipped_examples == 3
    assert len(task.source["label"]) == 3
    printed = capfd.readouterr().err
    assert all(f"(train), row {row}: " in printed for row in (1, 4, 5))
    assert "Generating" not in printed, "datasets shows no progress bars"

    with pytest.raises(DataError, match=r"(?s)data.max_bad_examples=0 .*row 1.*row 4.*row 5"):
        build_task(compose_config(*config))


class _Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, bytes]]:
        return Path.write_bytes, (self.marker, b"")  # type: ignore[return-value]


def test_batches_with_other_checksums_are_refused_and_not_unpickled(tmp_path: Path) -> None:
    folder = write_pickles(tmp_path / "cifar-10-batches-py", random_images(12), [0] * 12, tests=2)
    marker = tmp_path / "executed"
    (folder / "data_batch_3").write_bytes(pickle.dumps({"data": _Attack(marker)}))
    with pytest.raises(DataError, match="are missing or have wrong checksums; unpack"):
        _read(folder)
    assert not marker.exists()
