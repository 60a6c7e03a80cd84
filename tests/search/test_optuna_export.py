"""The Optuna export is complete and usable, and its errors are warnings."""

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from adaecho.search.design import read_design
from adaecho.search.report import JOURNAL, export, trial_rows
from adaecho.search.state import SweepState
from tests.search.conftest import Command


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished sweep, which no test changes for good."""
    return tmp_path_factory.mktemp("study") / "sweep"


@pytest.fixture
def sweep(swept: Path, run_sweep: Command) -> Path:
    if not swept.exists():
        run_sweep("search.trials=4", "search.repeats=2", folder=str(swept))
    return swept


def _state(folder: Path) -> SweepState:
    return SweepState(read_design(folder), folder)


def _export(state: SweepState) -> None:
    export(state.folder, state.design, trial_rows(state))


def _studies(folder: Path) -> dict[str, optuna.Study]:
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    names = [study.study_name for study in storage.get_all_studies()]
    return {name: optuna.load_study(study_name=name, storage=storage) for name in names}


def _trials(folder: Path) -> list[tuple[str, int, TrialState, dict[str, Any], float | None]]:
    return [
        (name, trial.number, trial.state, trial.params, trial.value)
        for name, study in _studies(folder).items()
        for trial in study.trials
    ]


def test_every_trial_is_exported_under_its_index(sweep: Path) -> None:
    studies = _studies(sweep)
    assert sorted(studies) == ["none/0", "none/1"]
    for row in json.loads((sweep / "trials.json").read_text()):
        trial = studies[f"none/{row['repeat']}"].trials[row["index"]]
        assert trial.params == row["hyperparameters"]
        assert trial.user_attrs["status"] == row["status"]
        assert trial.state == (TrialState.FAIL if row["status"] == "diverged" else TrialState.COMPLETE)
        assert trial.value == row["to_target_fresh_examples"]


def test_each_export_is_complete_and_open_trials_wait(sweep: Path) -> None:
    before = _trials(sweep)
    (sweep / JOURNAL).write_bytes(b"torn")
    state = _state(sweep)
    _export(state)
    assert _trials(sweep) == before
    state.searches["none", 1].summaries.clear()
    _export(state)
    waiting = [(name, state) for name, _, state, *_ in _trials(sweep) if state == TrialState.WAITING]
    assert waiting == [("none/1", TrialState.WAITING)] * 4
    (study,) = [study for name, study in _studies(sweep).items() if name == "none/1"]
    (arm,) = state.design.arms
    ranges = {x.key: FloatDistribution(x.low, x.high, log=x.scale == "log") for x in arm.axes}
    assert study.ask(ranges).params == state.design.point(arm, 1, 0), "the points are Optuna's queue"
    _export(_state(sweep))
    assert _trials(sweep) == before


def test_an_export_that_cant_be_written_is_a_warning(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sweep / JOURNAL).rename(sweep / "elsewhere")
    (sweep / JOURNAL).mkdir()
    _export(_state(sweep))
    assert "warning: " in capsys.readouterr().err
    (sweep / JOURNAL).rmdir()
    (sweep / "elsewhere").rename(sweep / JOURNAL)
