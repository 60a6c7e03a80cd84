"""The Optuna export: complete, usable, and of no consequence."""

import json
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from adaecho.search.design import read_design
from adaecho.search.report import JOURNAL, export, trial_rows
from adaecho.search.state import SweepState
from tests.search.conftest import Command


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished sweep for all tests here, each of which leaves it as it was."""
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


def test_every_trial_is_exported_under_its_index(sweep: Path) -> None:
    studies = _studies(sweep)
    assert sorted(studies) == ["none/0", "none/1"]
    for row in json.loads((sweep / "trials.json").read_text()):
        trial = studies[f"none/{row['repeat']}"].trials[row["index"]]
        assert trial.params == row["hyperparameters"]
        assert trial.user_attrs["status"] == row["status"]
        assert trial.state == (TrialState.FAIL if row["status"] == "diverged" else TrialState.COMPLETE)
        assert trial.value == row["to_target_fresh_examples"]


def test_it_is_brought_up_to_date_and_not_repeated(sweep: Path) -> None:
    _export(_state(sweep))
    assert sum(len(study.trials) for study in _studies(sweep).values()) == len(
        json.loads((sweep / "trials.json").read_text())
    )


def test_removing_it_loses_nothing(sweep: Path) -> None:
    before = {name: study.trials for name, study in _studies(sweep).items()}
    (sweep / JOURNAL).unlink()
    _export(_state(sweep))
    after = {name: study.trials for name, study in _studies(sweep).items()}
    assert {name: [(t.number, t.params, t.value) for t in trials] for name, trials in after.items()} == {
        name: [(t.number, t.params, t.value) for t in trials] for name, trials in before.items()
    }


def test_a_trial_that_ended_otherwise_when_tried_again_is_exported_anew(sweep: Path) -> None:
    rows = json.loads((sweep / "trials.json").read_text())
    index = next(row["index"] for row in rows if row["repeat"] == 0 and row["status"] == "reached")
    summary = sweep / "none/0" / str(index) / "summary.json"
    before = summary.read_text()
    summary.write_text(before.replace('"reached"', '"failed"'))
    (sweep / JOURNAL).unlink()
    _export(_state(sweep))
    assert _studies(sweep)["none/0"].trials[index].state == TrialState.FAIL
    summary.write_text(before)
    _export(_state(sweep))
    assert _studies(sweep)["none/0"].trials[index].state == TrialState.COMPLETE


@pytest.mark.parametrize("damage", ["torn in mid-line", "garbage in front", "empty"])
def test_a_damaged_journal_is_written_anew(sweep: Path, damage: str) -> None:
    journal = sweep / JOURNAL
    whole = journal.read_bytes()
    damaged = {
        "torn in mid-line": whole[:-20],
        "garbage in front": b"no journal at all\n" * 3 + whole,
        "empty": b"",
    }
    journal.write_bytes(damaged[damage])
    _export(_state(sweep))
    assert sum(len(study.trials) for study in _studies(sweep).values()) == len(
        json.loads((sweep / "trials.json").read_text())
    )
    assert [path.name for path in sweep.glob("*optuna*")] == [JOURNAL]


def test_another_sweeps_journal_is_written_anew(sweep: Path) -> None:
    ours = [trial.params for trial in _studies(sweep)["none/0"].trials]
    other = _state(sweep)
    other.design = replace(other.design, seed=1, _cache={})
    _export(other)
    assert [trial.params for trial in _studies(sweep)["none/0"].trials] != ours
    _export(_state(sweep))
    assert [trial.params for trial in _studies(sweep)["none/0"].trials] == ours


def test_an_export_that_cant_be_written_is_a_warning(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sweep / JOURNAL).rename(sweep / "elsewhere")
    (sweep / JOURNAL).mkdir()
    _export(_state(sweep))
    assert "warning: " in capsys.readouterr().err
    (sweep / JOURNAL).rmdir()
    (sweep / "elsewhere").rename(sweep / JOURNAL)
