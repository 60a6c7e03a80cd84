"""Checkpoints: sealed, checked, one before kept; what is damaged is never resumed."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adaecho.config.schema import to_plain
from adaecho.errors import FolderError
from adaecho.records.checkpoints import LAST, PREVIOUS
from adaecho.records.folder import RunFolder
from adaecho.training import checkpoint
from tests.conftest import Compose


@pytest.fixture
def run(compose_config: Compose, tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "run")
    with folder.lock():
        folder.start(to_plain(compose_config()))
        yield folder


def _states(run: RunFolder) -> list[dict[str, Any]]:
    return [checkpoint.load(run, path) for path in run.checkpoints()]


def _save(run: RunFolder, steps: int, **more: Any) -> None:
    for step in range(steps):
        checkpoint.save(run, {"progress": {"steps": step}, **more})


def test_the_last_two_are_kept_the_last_one_first(run: RunFolder) -> None:
    assert run.checkpoints() == []
    for step in range(3):
        checkpoint.save(run, {"progress": step, "weights": torch.full((2,), float(step))})
    assert [state["progress"] for state in _states(run)] == [2, 1]
    assert torch.equal(_states(run)[0]["weights"], torch.full((2,), 2.0))
    assert sorted(path.name for path in run.checkpoint_dir.iterdir()) == [LAST, PREVIOUS]
    # The seal is the comment of an archive that torch reads without us.
    assert torch.load(run.checkpoint_dir / LAST, weights_only=True)["progress"] == 2


def test_every_flipped_bit_is_found(run: RunFolder) -> None:
    _save(run, 1, weights=torch.arange(40.0))
    path = run.checkpoint_dir / LAST
    whole = path.read_bytes()
    for position in range(0, len(whole) * 8, 13):  # each of the eight bits of a byte has its turn
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(FolderError, match=r"last\.pt: (damaged|of another run)"):
            checkpoint.load(run, path)
    path.write_bytes(whole)
    assert checkpoint.load(run, path)["progress"] == {"steps": 0}


def test_every_zeroed_sector_and_every_cut_is_found(run: RunFolder) -> None:
    _save(run, 1, weights=torch.arange(2000.0))
    path = run.checkpoint_dir / LAST
    whole = path.read_bytes()
    assert len(whole) > 8000
    for start in range(0, len(whole), 512):
        sector = whole[start : start + 512]
        for damaged in (whole[:start] + bytes(len(sector)) + whole[start + 512 :], whole[:start]):
            if damaged == whole:  # a sector of zeros
                continue
            path.write_bytes(damaged)
            with pytest.raises(FolderError, match=r"last\.pt: damaged"):
                checkpoint.load(run, path)


def test_garbage_and_a_checkpoint_of_another_run_are_named(run: RunFolder, compose_config: Compose) -> None:
    _save(run, 1)
    other = RunFolder(run.path.with_name("other"))
    with other.lock():
        other.start(to_plain(compose_config("seed=1")))
    theirs = (run.checkpoint_dir / LAST).read_bytes()
    path = other.checkpoint_dir / LAST
    for garbage in (b"no checkpoint", b"PK\3\4" + bytes(100), b"\x80\2}q\0.", bytes(4096), theirs):
        path.write_bytes(garbage)
        says = "of another run" if garbage == theirs else "damaged"
        with pytest.raises(FolderError, match=rf"last\.pt: {says}"):
            checkpoint.load(other, path)


def test_a_full_disk_leaves_the_earlier_checkpoint(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(run, {"progress": 0})

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(FolderError, match="the disk is full"):
        checkpoint.save(run, {"progress": 1})
    assert [state["progress"] for state in _states(run)] == [0]
    assert [path.name for path in run.checkpoint_dir.iterdir()] == [LAST]
