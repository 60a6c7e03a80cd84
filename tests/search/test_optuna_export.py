"""The Optuna export: complete, usable, and of no consequence."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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


DAMAGES: dict[str, Callable[[Path], object]] = {
    "none": lambda _: None,
    "removed": Path.unlink,
    "torn in mid-line": lambda journal: journal.write_bytes(journal.read_bytes()[:-20]),
    "garbage in front": lambda journal: journal.write_bytes(b"no journal\n" * 3 + journal.read_bytes()),
    "empty": lambda journal: journal.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_whatever_its_damage_it_is_made_whole_and_repeats_nothing(
    sweep: Path, damage: Callable[[Path], object]
) -> None:
    before = _trials(sweep)
    assert len(before) == len(json.loads((sweep / "trials.json").read_text()))
    damage(sweep / JOURNAL)
    _export(_state(sweep))
    assert _trials(sweep) == before
    assert [path.name for path in sweep.glob("*optuna*")] == [JOURNAL]


def test_another_sweeps_journal_is_written_anew(sweep: Path) -> None:
    ours, other = _trials(sweep), _state(sweep)
    other.design = replace(other.design, seed=1, _cache={})
    _export(other)
    assert [params for *_, params, _ in _trials(sweep)] != [params for *_, params, _ in ours]
    _export(_state(sweep))
    assert _trials(sweep) == ours


def test_an_export_that_cant_be_written_is_a_warning(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sweep / JOURNAL).rename(sweep / "elsewhere")
    (sweep / JOURNAL).mkdir()
    _export(_state(sweep))
    assert "warning: " in capsys.readouterr().err
    (sweep / JOURNAL).rmdir()
    (sweep / "elsewhere").rename(sweep / JOURNAL)
