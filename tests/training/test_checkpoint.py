import os
from pathlib import Path
from typing import Any

import pytest
import torch

from adaecho.errors import FolderError
from adaecho.training import checkpoint


def test_nothing_written_is_nothing_loaded(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None


def test_the_last_one_written_is_loaded(tmp_path: Path) -> None:
    for step in range(3):
        checkpoint.save(tmp_path, {"step": step, "weights": torch.full((2,), float(step))})
    state = checkpoint.load(tmp_path)
    assert state is not None
    assert state["step"] == 2
    assert torch.equal(state["weights"], torch.full((2,), 2.0))


@pytest.mark.parametrize("keep_bytes", [0, 10, 500])
def test_a_truncated_last_one_gives_way_to_the_one_before(tmp_path: Path, keep_bytes: int) -> None:
    for step in range(2):
        checkpoint.save(tmp_path, {"step": step})
    last = tmp_path / checkpoint.LAST
    last.write_bytes(last.read_bytes()[:keep_bytes])
    state = checkpoint.load(tmp_path)
    assert state is not None
    assert state["step"] == 0


def test_none_that_can_be_read_is_an_error_and_not_a_new_start(tmp_path: Path) -> None:
    (tmp_path / checkpoint.LAST).write_bytes(b"no checkpoint")
    with pytest.raises(FolderError, match="fresh=true"):
        checkpoint.load(tmp_path)


class _Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_pickled_code_is_never_executed(tmp_path: Path) -> None:
    torch.save({"step": _Payload()}, tmp_path / checkpoint.LAST)
    with pytest.raises(FolderError):
        checkpoint.load(tmp_path)
    assert not Path("executed").exists()


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, {"step": 0})

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(FolderError, match="the disk is full"):
        checkpoint.save(tmp_path, {"step": 1})
    assert checkpoint.load(tmp_path) == {"step": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.LAST]
