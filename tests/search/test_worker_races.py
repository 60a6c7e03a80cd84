"""What a worker meets where another one or a signal comes at the wrong moment, and what a trial leaves it."""

import gc
import json
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaecho.config.schema import Config
from adaecho.errors import FolderError
from adaecho.records.folder import RunFolder
from adaecho.records.lock import FolderInUseError
from adaecho.search import worker
from adaecho.search.design import Design, read_design, record_design
from adaecho.search.state import read_refusal
from adaecho.search.worker import Attempts, Worker
from tests.echo.sources import soon
from tests.search import stub
from tests.search.conftest import Command
from tests.search.stub import RUNNER, TASK


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
    (folder / "summary.json").write_text("{")
    with RunFolder(folder).lock(), pytest.raises(FolderInUseError):
        worker._set_damaged_aside(folder)
    assert folder.exists()
    found = iter([worker._damage(RunFolder(folder)), None])
    with monkeypatch.context() as patch:  # another worker has seen to it between two looks
        patch.setattr(worker, "_damage", lambda _: next(found))
        worker._set_damaged_aside(folder)
    assert not folder.with_name("0.old-1").exists()
    worker._set_damaged_aside(folder)
    assert (folder.with_name("0.old-1") / "summary.json").read_text() == "{"


def _search_of_three(design: Design, folder: Path, **misbehaviour: Any) -> Path:
    """One search in ``folder``, its second trial misbehaving; the folder of that search."""
    one = replace(design, arms=design.arms[:1], repeats=1, _cache={})
    record_design(one, folder)
    control = {key: {f"{one.arms[0].name}/0/1": value} for key, value in misbehaviour.items()}
    (folder / "control.json").write_text(json.dumps(control))
    return folder / one.arms[0].name / "0"


@pytest.mark.parametrize("when", ["signalled", "waits_in_vain"])
def test_no_trial_begins_after_a_signal(design: Design, tmp_path: Path, when: str) -> None:
    """One that comes in a trial's last evaluation, or while it waits for data, is heard by the worker."""
    search = _search_of_three(design, tmp_path, **{when: "SIGTERM"})
    with pytest.raises(SystemExit) as end:
        Worker(str(tmp_path), runner=RUNNER, typed=(TASK,))()
    assert end.value.code == 143
    assert sorted(path.parent.name for path in search.glob("*/begun.log")) == ["0", "1"]
    assert (search / "1" / "summary.json").exists() == (when == "signalled")
    launch = Worker(str(tmp_path), runner=RUNNER, typed=(TASK,))
    assert Attempts(search / "1", launch.launch).count() == 0
    (tmp_path / "control.json").unlink()
    launch()
    assert len(list(search.glob("*/summary.json"))) >= 3


def test_a_trial_that_was_taken_over_while_its_host_slept_does_not_stop_the_worker(
    design: Design, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_PATIENCE_S", 0.05)
    search = _search_of_three(design, tmp_path, loses_its_lock=True)
    Worker(str(tmp_path), launch="this", runner=RUNNER, typed=(TASK,))()
    assert read_refusal(tmp_path, "this") is None
    assert not (search / "1" / "summary.json").exists()
    assert Attempts(search / "1", "this").count() == 0
    assert all((search / index / "summary.json").exists() for index in ("0", "2"))


def run_and_exchange_the_design(
    config: Config, folder: Path, overrides: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    sweep = folder.parents[2]
    summary = stub.run_trial(config, folder, overrides, **more)
    change = json.loads((sweep / "change.json").read_text())
    record_design(replace(read_design(sweep), _cache={}, **change), sweep)
    return summary


@pytest.mark.parametrize(("change", "trials"), [({"seed": 1}, 1), ({"trials": 4}, 4)], ids=str)
def test_a_worker_whose_folder_has_another_design_by_now_runs_nothing_of_its_own_there(
    design: Design, tmp_path: Path, change: dict[str, int], trials: int
) -> None:
    """More trials of the same sweep are no other one."""
    search = _search_of_three(design, tmp_path)
    (tmp_path / "change.json").write_text(json.dumps(change))
    old = Worker(str(tmp_path), runner=f"{__name__}:run_and_exchange_the_design", typed=(TASK,))
    with pytest.raises(FolderError, match="another sweep has begun there") if trials == 1 else nullcontext():
        old()
    assert len(list(search.glob("*/summary.json"))) == trials, "of the first three one diverges"


_left: list["weakref.ref[_DataSet]"] = []
_alive: list[int] = []  # of the trials before, at the begin of each


class _DataSet:
    """Part of a circle, as a trainer is with its callbacks."""

    def __init__(self) -> None:
        self.user = self


def run_trial(config: Config, folder: Path, overrides: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    _alive.append(sum(each() is not None for each in _left))
    _left.append(weakref.ref(_DataSet()))
    return stub.run_trial(config, folder, overrides, **more)


def _collects() -> bool:
    left = weakref.ref(_DataSet())
    gc.collect()
    return left() is None


def test_data_of_a_trial_is_gone_from_memory_when_the_next_begins(design: Design, tmp_path: Path) -> None:
    _search_of_three(design, tmp_path)
    gc.disable()
    assert soon(
        _collects
    )  # a thread that an earlier test left may be at it, and then another call does nothing
    try:
        Worker(str(tmp_path), runner=f"{__name__}:run_trial", typed=(TASK,))()
    finally:
        gc.enable()
    assert len(_alive) >= 3
    assert not any(_alive)
