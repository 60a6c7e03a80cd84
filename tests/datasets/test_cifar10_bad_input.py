"""What users can get wrong, or storage can lose: one message each, that says what and where."""

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from adaecho.datasets import cifar10
from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import DataError
from adaecho.tasks import build_task
from adaecho.tasks.cifar10 import decode
from adaecho.tasks.images import Images
from tests.conftest import Compose
from tests.datasets.cifar10_files import encode, random_images, write_parquet, write_pickles

TRAIN = "train-00000-of-00001.parquet"
GOOD = [encode(image) for image in random_images(8)]


def _read(folder: Path, budget: int = 0) -> Images:
    return cifar10.find(str(folder), decode).read("train", SkippedExamples(budget))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "data.path=null: cifar10 needs a folder or a hub id"),
        ("/no/such/folder", "data.path=/no/such/folder: there is no such file or folder"),
        ("no_folder_either", "data.path=no_folder_either: there is no such file or folder"),
        (".", r"data\.path=\.: can't be loaded"),
    ],
)
def test_what_is_no_folder_of_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        cifar10.find(path, decode)


def test_other_columns(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"image": ["a"], "label": [1]}), tmp_path / TRAIN)
    with pytest.raises(DataError, match="needs the columns img, label, and has image, label"):
        _read(tmp_path)


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_damaged_file(tmp_path: Path, share: float) -> None:
    whole = write_parquet(tmp_path / TRAIN, GOOD, [0] * 8).read_bytes()
    (tmp_path / TRAIN).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DataError, match=r"can't be loaded .*Check files"):
        _read(tmp_path)


BAD_ROWS: dict[str, tuple[bytes | None, int | None, str]] = {
    "corrupt": (b"not an image", 1, "corrupt or truncated"),
    "truncated": (GOOD[0][:-300], 1, "corrupt or truncated"),
    "no bytes": (None, 1, "an encoded image is bytes"),
    "empty": (b"", 1, "holds no image bytes"),
    "shape": (encode(random_images(1, side=28)[0]), 1, "28x28 pixels, 32x32 are needed"),
    "label too large": (GOOD[0], 10, "label 10 is not one of 0 to 9"),
    "label too small": (GOOD[0], -2, "label -2 is not one of 0 to 9"),
    "no label": (GOOD[0], None, "label None is not one of 0 to 9"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_stops_the_run_and_is_named(tmp_path: Path, case: str) -> None:
    encoded, label, reason = BAD_ROWS[case]
    write_parquet(tmp_path / TRAIN, [*GOOD[:5], encoded], [0, 1, 2, 3, 4, label])
    with pytest.raises(DataError) as caught:
        _read(tmp_path)
    assert all(part in str(caught.value) for part in ("(train), row 5: ", reason, "data.max_bad_examples=0"))


def test_bad_rows_within_the_budget_are_skipped_and_listed(
    compose_config: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoded = [GOOD[0], b"?", *GOOD[2:5], b"?", *GOOD[6:]]
    write_parquet(tmp_path / TRAIN, encoded, [0, 1, 2, 3, 99, 5, 6, 7])
    examples = _read(tmp_path, budget=3)
    np.testing.assert_array_equal(examples["label"], [0, 2, 3, 6, 7])
    np.testing.assert_array_equal(examples["image"], random_images(8)[[0, 2, 3, 6, 7]])

    config = ("task=cifar10", f"data.path={tmp_path}", "data.validation_examples=2")
    task = build_task(compose_config(*config, "data.max_bad_examples=3"))
    assert task.skipped_examples == 3
    assert len(task.source["label"]) == 3
    listed = capsys.readouterr().err
    assert all(f"(train), row {row}: " in listed for row in (1, 4, 5))

    with pytest.raises(DataError, match=r"(?s)data.max_bad_examples=2 .*row 1.*row 4.*row 5"):
        build_task(compose_config(*config, "data.max_bad_examples=2"))


class _Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, bytes]]:
        return Path.write_bytes, (self.marker, b"")  # type: ignore[return-value]


def test_batches_that_are_not_the_archives_are_refused_and_not_unpickled(tmp_path: Path) -> None:
    folder = write_pickles(tmp_path / "cifar-10-batches-py", random_images(12), [0] * 12, tests=2)
    marker = tmp_path / "executed"
    (folder / "data_batch_3").write_bytes(pickle.dumps({"data": _Attack(marker)}))
    with pytest.raises(DataError, match="by their checksums not the files of cifar-10-python"):
        _read(folder)
    assert not marker.exists()
