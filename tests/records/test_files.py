"""Files that are complete or absent, on full and failing disks."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from adaecho.errors import FolderError
from adaecho.records import files
from adaecho.records.folder import RunFolder
from tests.helpers import small_disk


def fill(path):
    """Fill the disk completely."""
    with (path / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    assert shutil.disk_usage(path).free == 0


def test_a_disk_that_fills_leaves_the_old_records_whole_and_starts_no_run(tmp_path):
    with small_disk(disk := tmp_path / "disk", "size=64k"):
        run = RunFolder(disk / "run")
        with run.lock():
            run.append_metrics({"number": 0})
            run.write_summary({"status": "running"})
            fill(disk)
            big = "x" * 100_000
            with pytest.raises(FolderError, match=r"metrics\.jsonl: No space left"):
                run.append_metrics({"big": big})
            with pytest.raises(FolderError, match=r"summary\.json: No space left .*; free space"):
                run.write_summary({"status": "reached", "big": big})
            assert run.read_metrics() == [{"number": 0}]
            assert run.read_summary() == {"status": "running"}
            assert not list(run.path.glob(".*.tmp"))
            (disk / "filler").unlink()
            run.truncate_metrics(1)
            run.append_metrics({"number": 1})
            assert len(run.read_metrics()) == 2


def test_a_path_that_cannot_be_a_folder_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(FolderError, match=r"run: File exists; .*choose another folder"):
        RunFolder(tmp_path / "run").lock().__enter__()
    with small_disk(disk := tmp_path / "disk", "ro"):
        says = "disk/run: Read-only file system; free space, make it writable"
        with pytest.raises(FolderError, match=says):
            RunFolder(disk / "run").lock().__enter__()


def test_a_failing_flush_leaves_the_old_file(tmp_path, monkeypatch):
    """Network disks accept data and fail at the flush."""
    path = tmp_path / "summary.json"
    files.write_json(path, {"status": "running"})

    def refuse(_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(FolderError, match="; free space"):
        files.write_json(path, {"status": "reached"})
    assert files.read_json(path) == {"status": "running"}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "checkpoint.pt"
    files.write_text(path, "good")
    writing = files.atomic_file(path)
    writing.__enter__().write(b"half")
    assert not writing.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None), "the interrupt propagates"
    assert path.read_text() == "good"
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_json_is_strict_and_takes_numbers_of_numpy():
    value = {"a": np.float32(0.5), "b": (np.int64(3), True, None), 2: float("inf"), "path": Path("x/y")}
    assert files.dumps(value) == '{"a": 0.5, "b": [3, true, null], "2": null, "path": "x/y"}'
    with pytest.raises(TypeError):
        files.dumps({"a": object()})
