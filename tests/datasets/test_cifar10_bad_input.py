"""What users can get wrong, or storage can lose: one message each, that says what and where."""

import os
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from adaecho.datasets import cifar10
from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import DataError, told
from adaecho.tasks import build_task
from adaecho.tasks.cifar10 import decode
from adaecho.tasks.images import Images
from tests.conftest import Compose
from tests.datasets.cifar10_files import encode, random_images, write_parquet, write_pickles

TRAIN = "train-00000-of-00001.parquet"
GOOD = [encode(image) for image in random_images(8)]


def _read(folder: Path, budget: int = 0) -> Images:
    return cifar10.find(str(folder)).read("train", decode, SkippedExamples(budget))


def _seven_pictures(folder: Path) -> None:
    for number in range(7):
        (folder / f"{number}.jpg").touch()


def _table(folder: Path) -> None:
    write_parquet(folder / TRAIN, GOOD, [0] * 8)


NO_FOLDER: dict[str, tuple[Callable[[Path], object], str | None, tuple[str, ...]]] = {
    "no path": (_table, None, ("data.path=null", "a folder or a hub id")),
    **{
        missing: (_table, missing, (f"data.path={missing}", "there is no such folder"))
        for missing in ("/no/such/folder", "./here", "no_folder_either")
    },
    "a file": (_table, TRAIN, ("give the folder",)),
    "empty": (Path.exists, ".", ("train-*.parquet", "data_batch_1", "it is empty")),
    "other things": (_seven_pictures, ".", ("it holds 0.jpg, 1.jpg, 2.jpg, 3.jpg, 4.jpg and 2 more",)),
}


@pytest.mark.parametrize(("write", "path", "parts"), NO_FOLDER.values(), ids=NO_FOLDER)
def test_what_is_no_folder_of_it_is_refused(
    write: Callable[[Path], object], path: str | None, parts: tuple[str, ...]
) -> None:
    write(Path())
    with pytest.raises(DataError) as caught:
        cifar10.find(path)
    assert all(part in str(caught.value) for part in ("data.path=", *parts)), caught.value


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ({"image": ["a"], "label": [1]}, "image (string), label (int64)"),
        ({"img": [{"bytes": b"a", "path": ""}]}, "img (struct<bytes: binary, path: string>)"),
        ({"img": ["a.png"], "label": [1]}, "img (string), label (int64)"),
        ({"img": [{"bytes": b"a", "path": ""}], "label": ["cat"]}, "label (string)"),
    ],
)
def test_other_columns(tmp_path: Path, table: dict[str, list[object]], found: str) -> None:
    parquet.write_table(pa.table(table), tmp_path / TRAIN)
    needs = f"{tmp_path / TRAIN}: needs the columns img (a struct with a field bytes) and label"
    with pytest.raises(DataError, match=rf"{re.escape(needs)}.*{re.escape(found)}"):
        _read(tmp_path)


@pytest.mark.parametrize("damage", [0, 10, 0.5, 0.99, "within"])
def test_a_damaged_file(tmp_path: Path, damage: Any) -> None:
    file = write_parquet(tmp_path / TRAIN, GOOD, [0] * 8)
    whole = file.read_bytes()
    if damage == "within":  # the first pages; the footer stays whole
        file.write_bytes(whole[:4] + bytes(1996) + whole[2000:])
    else:
        file.write_bytes(whole[: damage if damage in (0, 10) else int(damage * len(whole))])
    with pytest.raises(DataError, match=rf"{TRAIN}: not readable as parquet .* Fetch it again"):
        _read(tmp_path)


BAD_ROWS: dict[str, tuple[bytes | None, int | None, str]] = {
    "corrupt": (b"not an image", 1, "corrupt or truncated"),
    "truncated": (GOOD[0][:-300], 1, "corrupt or truncated"),
    "no bytes": (None, 1, "holds no image bytes"),
    "empty": (b"", 1, "holds no image bytes"),
    "shape": (encode(random_images(1, side=28)[0]), 1, "28x28 pixels, 32x32 are needed"),
    "label too large": (GOOD[0], 10, "label 10 is not one of 0 to 9"),
    "label too small": (GOOD[0], -2, "label -2 is not one of 0 to 9"),
    "no label": (GOOD[0], None, "label -1 is not one of 0 to 9"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_stops_the_run_and_is_named(tmp_path: Path, case: str) -> None:
    encoded, label, reason = BAD_ROWS[case]
    file = write_parquet(tmp_path / TRAIN, [*GOOD[:5], encoded], [0, 1, 2, 3, 4, label])
    with pytest.raises(DataError) as caught:
        _read(tmp_path)
    assert all(part in str(caught.value) for part in (f"{file}, row 5: ", reason, "data.max_bad_examples=0"))


def test_bad_rows_within_the_budget_are_skipped_and_listed(
    compose_config: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoded = [GOOD[0], b"?", *GOOD[2:5], b"?", *GOOD[6:]]
    file = write_parquet(tmp_path / TRAIN, encoded, [0, 1, 2, 3, 99, 5, 6, 7])
    examples = _read(tmp_path, budget=3)
    np.testing.assert_array_equal(examples["label"], [0, 2, 3, 6, 7])
    np.testing.assert_array_equal(examples["image"], random_images(8)[[0, 2, 3, 6, 7]])

    config = ("task=cifar10", f"data.path={tmp_path}", "data.validation_examples=2")
    task = build_task(compose_config(*config, "data.max_bad_examples=3"))
    assert task.skipped_examples == 3
    assert len(task.source["label"]) == 3
    listed = capsys.readouterr().err
    assert all(f"warning: bad example skipped: {file}, row {row}: " in listed for row in (1, 4, 5))

    with pytest.raises(DataError, match=r"(?s)data.max_bad_examples=2 .*row 1.*row 4.*row 5"):
        build_task(compose_config(*config, "data.max_bad_examples=2"))


@pytest.mark.parametrize("at_most", [1, 3])
def test_too_few_threads_to_decode_are_told_in_a_line_or_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], at_most: int
) -> None:
    begin, started = threading.Thread.start, 0

    def start(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        if started > at_most:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    write_parquet(tmp_path / TRAIN, [GOOD[0]] * 700, [0] * 700)
    if at_most >= 2:
        assert _read(tmp_path)["image"].shape == (700, 32, 32, 3)
        return
    with pytest.raises(SystemExit), told():
        _read(tmp_path)
    assert "error: can't start new thread: too little memory" in capsys.readouterr().err


def test_a_hub_that_can_not_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    stored = cifar10.find("owner/name")
    message = r"data\.path=owner/name: .*no such file or folder.*Couldn't reach.*local copy"
    with pytest.raises(DataError, match=message):
        stored.read("train", decode, SkippedExamples(0))


class _Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, bytes]]:
        return Path.write_bytes, (self.marker, b"")  # type: ignore[return-value]


def test_batches_that_are_not_the_archives_are_refused_and_not_unpickled(tmp_path: Path) -> None:
    folder = write_pickles(tmp_path / "data", random_images(12), [0] * 12, tests=2)
    marker = tmp_path / "executed"
    (folder / "data_batch_3").write_bytes(pickle.dumps({"data": _Attack(marker)}))
    with pytest.raises(DataError, match="by their checksums not the files of cifar-10-python"):
        _read(folder)
    assert not marker.exists()
