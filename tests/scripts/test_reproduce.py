"""The reproduction stops at its budget, goes on where it stopped, and collects what has ended."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import OmegaConf

from tests.scripts.load import SCRIPTS, load

TINY = ["search.trials=1", "search.repeats=1", "search.workers=1", "max_fresh_examples=320", "tracking=none"]
FIG3 = "python -m adaecho.run -m experiment=fig3 task=digits"


@pytest.fixture
def reproduce(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("reproduce", monkeypatch)


def test_a_budget_cuts_it_short_and_the_next_call_finishes(
    reproduce: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = (reproduce.Cell("fig3", "digits"),)
    places = (tmp_path / "runs", tmp_path / "results")
    reproduce.reproduce(cells, *places, 0.0, TINY)
    assert capsys.readouterr().out == f"left: {FIG3}: all\n"
    reproduce.reproduce(cells, *places, 400.0, TINY)
    assert f"done: {FIG3}, collected in" in capsys.readouterr().out
    assert (tmp_path / "results" / "fig3" / "digits" / "outcome.json").exists()
    assert reproduce.standing(tmp_path / "runs" / "fig3" / "digits") == (4, 0)
    reproduce.reproduce(cells, *places, 0.0, TINY)
    assert capsys.readouterr().out == f"done: {FIG3}\n"


class Ended:
    """A sweep whose wait is cut short by ``end``, and that has gone with ``code`` when it is told to end."""

    end: BaseException = subprocess.TimeoutExpired("sweep", 1.0)
    code = 0
    pid = 2**30

    def __init__(self, *_: object, **__: object) -> None:
        self.waits = 0

    def wait(self, timeout: float) -> int:  # noqa: ARG002
        self.waits += 1
        if self.waits == 1:
            raise self.end
        return self.code


@pytest.mark.parametrize(("code", "has_ended"), [(0, True), (130, False)])
def test_a_sweep_that_ends_at_the_moment_when_its_budget_does_has_ended(
    reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, has_ended: bool
) -> None:
    monkeypatch.setattr(reproduce.subprocess, "Popen", Ended)
    monkeypatch.setattr(Ended, "code", code)
    assert reproduce.run(reproduce.Cell("fig3", "digits"), tmp_path, 1.0, []) == has_ended


def test_ctrl_c_begins_no_other_sweep(
    reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reproduce.subprocess, "Popen", Ended)
    monkeypatch.setattr(Ended, "end", KeyboardInterrupt())
    monkeypatch.setattr(sys, "argv", ["reproduce", "--runs", str(tmp_path), "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        reproduce.main()
    assert end.value.code == 130
    assert capsys.readouterr() == ("", "interrupted; the same command continues\n")


def test_every_cell_is_an_experiment_and_a_task(reproduce: ModuleType) -> None:
    conf = SCRIPTS.parent / "conf"
    for cell in (*reproduce.CELLS, *reproduce.OF_CIFAR10):
        assert (conf / "experiment" / f"{cell.experiment}.yaml").exists()
        task = OmegaConf.load(conf / "task" / f"{cell.task}.yaml")
        assert cell.folder() == Path(cell.experiment) / task.task.name


def test_cells_of_cifar10_come_with_its_folder_and_are_recorded_without_it(
    reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--runs", str(tmp_path), "--results", str(tmp_path), "--budget-s", "0"]
    monkeypatch.setattr(sys, "argv", ["reproduce", *places])
    reproduce.main()
    without = capsys.readouterr().out.splitlines()
    monkeypatch.setattr(sys, "argv", ["reproduce", *places, "--cifar10", "my folder"])
    reproduce.main()
    added = capsys.readouterr().out.splitlines()[len(without) :]
    assert len(without) == len(reproduce.CELLS) + len(reproduce.PROGRAMS)
    assert len(added) == len(reproduce.OF_CIFAR10)
    assert all("data.path=DATA: all" in line for line in added)
    cell = reproduce.replace(reproduce.OF_CIFAR10[0], data="my folder")
    assert cell.arguments(cell.data)[-1] == "data.path=my folder"


def test_a_program_gets_its_folders_and_no_overrides_of_sweeps(
    reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Begun(Ended):
        def __init__(self, command: list[str], **_: object) -> None:
            super().__init__()
            self.waits = 1  # it ends by itself
            begun.extend(command)

    begun: list[str] = []
    monkeypatch.setattr(reproduce.subprocess, "Popen", Begun)
    program = reproduce.PROGRAMS[0]
    reproduce.reproduce((program,), tmp_path / "runs", tmp_path / "results", 1.0, ["search.workers=1"])
    folders = [str(tmp_path / kind / program.folder()) for kind in ("runs", "results")]
    module = "experiments.repeat_value.measure"
    assert begun[1:] == ["-m", module, "--runs", folders[0], "--results", folders[1]]
    assert capsys.readouterr().out.startswith(f"done: python -m {module}, collected in ")
