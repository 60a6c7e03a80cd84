"""What a worker meets where another one is at the same trial at the same moment."""

from pathlib import Path

import pytest

from adaecho.records.folder import RunFolder
from adaecho.records.lock import FolderInUseError
from adaecho.search import worker
from adaecho.search.worker import Attempts
from tests.search.conftest import Command


def test_attempts_that_are_forgotten_while_they_are_counted_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = Attempts(tmp_path, "launch")
    attempts.begin()
    assert attempts.count() == 1
    Attempts(tmp_path, "launch").forget()  # by the worker that has just ended the trial,
    monkeypatch.setattr(Path, "exists", lambda _: True)  # after this one has seen that there are some
    assert attempts.count() == 0


def test_a_damaged_folder_is_set_aside_once_and_never_under_the_worker_that_is_at_it(
    run_sweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = run_sweep("echo=none", "search.trials=1")
    folder = sweep / "none" / "0" / "0"
    (folder / "summary.json").write_text("")
    with RunFolder(folder).lock(), pytest.raises(FolderInUseError):
        worker._set_damaged_aside(folder)
    assert folder.exists()
    found = iter([worker._damage(RunFolder(folder)), None])
    with monkeypatch.context() as patch:  # another worker has seen to it between two looks
        patch.setattr(worker, "_damage", lambda _: next(found))
        worker._set_damaged_aside(folder)
    assert not folder.with_name("0.old-1").exists()
    worker._set_damaged_aside(folder)
    assert (folder.with_name("0.old-1") / "summary.json").read_text() == ""
