"""The reproduction stops at its budget, goes on where it stopped, and collects what has ended."""

import sys
from pathlib import Path

import pytest

from tests.scripts.load import SCRIPTS, load

TINY = ["search.trials=1", "search.repeats=1", "search.workers=1", "max_fresh_examples=320", "tracking=none"]


def test_a_budget_cuts_it_short_and_the_next_call_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reproduce = load("reproduce", monkeypatch)
    monkeypatch.setattr(reproduce, "CELLS", (("fig3", "digits", ""),))
    places = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    for budget_s, said in (("0", "left: "), ("400", "done: "), ("0", "done: ")):
        monkeypatch.setattr(sys, "argv", ["reproduce", *places, "--budget-s", budget_s, *TINY])
        reproduce.main()
        out = capsys.readouterr().out
        assert f"{said}python -m adaecho.run -m experiment=fig3 task=digits search.trials=1" in out
    assert (tmp_path / "results" / "fig3" / "digits" / "outcome.json").exists()


def test_every_cell_is_an_experiment_and_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    reproduce, conf = load("reproduce", monkeypatch), SCRIPTS.parent / "conf"
    for experiment, task, _ in (*reproduce.CELLS, *reproduce.OF_CIFAR10):
        assert (conf / "experiment" / f"{experiment}.yaml").exists()
        assert (conf / "task" / f"{task}.yaml").exists()
