"""The reproduction stops at its budget, continues at the next call, and collects finished sweeps."""

import sys
from pathlib import Path

import pytest

from scripts import reproduce

TINY = ["search.trials=1", "search.repeats=1", "search.workers=1", "max_fresh_examples=320", "tracking=none"]


def test_a_budget_interrupts_and_the_next_call_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproduce, "CELLS", (("fig3", "digits", ""),))
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    for budget_s, said in (("0", "left: "), ("400", "done: "), ("0", "done: ")):
        monkeypatch.setattr(sys, "argv", ["reproduce", *folders, "--budget-s", budget_s, *TINY])
        reproduce.main()
        out = capsys.readouterr().out
        assert f"{said}python -m adaecho.run -m experiment=fig3 task=digits search.trials=1" in out
    assert (tmp_path / "results" / "fig3" / "digits" / "outcome.json").exists()


def test_every_cell_is_an_experiment_and_a_task() -> None:
    conf = Path(__file__).parents[2] / "conf"
    for experiment, task, _ in (*reproduce.CELLS, *reproduce.OF_CIFAR10):
        assert (conf / "experiment" / f"{experiment}.yaml").exists()
        assert (conf / "task" / f"{task}.yaml").exists()
