"""A worker under signals, lost locks and changed designs, and its memory between trials."""

import gc
import json
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaecho.config.schema import Config
from adaecho.search import worker
from adaecho.search.design import Design, read_design, record_design
from adaecho.search.worker import ATTEMPTS, Worker
from tests.echo.sources import soon
from tests.search import stub
from tests.search.stub import run_trial as stub_trial


def _search_of_three(design: Design, folder: Path, **misbehavior: Any) -> Path:
    """One search in ``folder`` whose second trial has faults; returns the folder of the search."""
    one = replace(design, arms=design.arms[:1], repeats=1, _cache={})
    record_design(one, folder)
    control = {key: {f"{one.arms[0].name}/0/1": value} for key, value in misbehavior.items()}
    (folder / "control.json").write_text(json.dumps(control))
    return folder / one.arms[0].name / "0"


@pytest.mark.parametrize("when", ["signalled", "waits_in_vain"])
def test_no_trial_begins_after_a_signal(design: Design, tmp_path: Path, when: str) -> None:
    """The signal arrives in the last evaluation of a trial, or while the trial waits for data."""
    search = _search_of_three(design, tmp_path, **{when: "SIGTERM"})
    with pytest.raises(SystemExit) as end:
        Worker(str(tmp_path), runner=stub_trial)()
    assert end.value.code == 143
    assert sorted(path.parent.name for path in search.glob("*/begun.log")) == ["0", "1"]
    assert (search / "1" / "summary.json").exists() == (when == "signalled")
    assert not (search / "1" / ATTEMPTS).exists()
    (tmp_path / "control.json").unlink()
    assert Worker(str(tmp_path), runner=stub_trial)() is None
    assert len(list(search.glob("*/summary.json"))) >= 3


def test_a_lost_lock_does_not_stop_the_worker(
    design: Design, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_PATIENCE_S", 0.05)
    search = _search_of_three(design, tmp_path, loses_its_lock=True)
    assert Worker(str(tmp_path), runner=stub_trial)() is None
    assert not (search / "1" / "summary.json").exists()
    assert all((search / index / "summary.json").exists() for index in ("0", "2"))


def run_and_extend(
    config: Config, folder: Path, overrides: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    sweep = folder.parents[2]
    summary = stub.run_trial(config, folder, overrides, **more)
    record_design(replace(read_design(sweep), _cache={}, trials=4), sweep)
    return summary


def test_a_worker_continues_with_a_changed_design(design: Design, tmp_path: Path) -> None:
    search = _search_of_three(design, tmp_path)
    assert Worker(str(tmp_path), runner=run_and_extend)() is None
    statuses = [json.loads(path.read_text())["status"] for path in search.glob("*/summary.json")]
    assert len([status for status in statuses if status == "reached"]) == 4


_left: list["weakref.ref[_DataSet]"] = []
_alive: list[int] = []  # number of earlier data sets that are alive when a trial begins


class _DataSet:
    """Part of a reference cycle, like a trainer with its callbacks."""

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
    assert soon(_collects)  # a collection in another thread makes a call do nothing
    try:
        Worker(str(tmp_path), runner=run_trial)()
    finally:
        gc.enable()
    assert len(_alive) >= 3
    assert not any(_alive)
