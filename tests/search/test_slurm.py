"""Sweeps on Slurm with fake sbatch and squeue: the work of a job, and the submitted parameters."""

import functools
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from adaecho.errors import ConfigError
from adaecho.records.folder import RunFolder
from adaecho.search import launch, sweeper
from adaecho.search.design import Design, TrialId, record_design
from adaecho.search.launch import WorkerError
from adaecho.search.report import Progress
from adaecho.search.state import SweepState
from adaecho.search.worker import Worker
from hydra_plugins.adaecho_quasirandom import SlurmLauncher
from tests.search.conftest import Command
from tests.search.stub import run_trial

ON_SLURM = ("hydra/launcher=slurm",)


def _worker(folder: Path, **changes: Any) -> Worker:
    return Worker(str(folder), **{"runner": run_trial, **changes})


@pytest.fixture
def recorded(design: Design, tmp_path: Path) -> Design:
    """A design of one search, in the folder where workers find it."""
    one = replace(design, arms=design.arms[:1], repeats=1, trials=8, _cache={})
    record_design(one, tmp_path)
    return one


def _statuses(design: Design, folder: Path) -> dict[int, str]:
    search = SweepState(design, folder).searches[design.arms[0].name, 0]
    return {index: summary["status"] for index, summary in sorted(search.summaries.items())}


def test_a_worker_skips_a_trial_that_another_worker_runs(
    recorded: Design, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaecho.search.worker._PATIENCE_S", 0.05)
    with RunFolder(tmp_path / str(TrialId(recorded.arms[0].name, 0, 0))).lock():
        _worker(tmp_path)()
        assert 0 not in _statuses(recorded, tmp_path)
        assert len(_statuses(recorded, tmp_path)) >= 7
    _worker(tmp_path)()
    assert 0 in _statuses(recorded, tmp_path)


# Submission, with fake commands.


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with fake Slurm commands, first in PATH; sbatch stores its scripts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    commands = {
        "sbatch": f'cd {folder}; cp "$1" given-$(ls | wc -l).sh; echo Submitted batch job $(ls | wc -l)',
        "squeue": f"cat {folder}/queued 2>/dev/null || true",
        "srun": "true",
    }
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def submit(run_sweep: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Submit a sweep of stub trials without waiting."""
    monkeypatch.setattr(sweeper, "Worker", functools.partial(Worker, runner=run_trial))
    return functools.partial(run_sweep, *ON_SLURM, "hydra.launcher.wait=false")


def _given(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("given-*.sh"))]


def test_number_of_jobs(stand_in: Path, submit: Command) -> None:
    submit("echo=none,batch", "search.trials=10", "hydra.launcher.trials_per_job=2")
    submit("search.trials=9", "hydra.launcher.array_parallelism=2", "restart=true")
    arrays = re.findall(r"--array=0-(\d+)%(\d+)", "\n".join(_given(stand_in)))
    assert arrays == [("9", "10"), ("1", "2")]


def test_the_defaults_work_on_any_cluster(stand_in: Path, submit: Command) -> None:
    submit("search.trials=1")
    (text,) = _given(stand_in)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, flags=re.MULTILINE))
    assert asked.keys().isdisjoint({"partition", "account", "qos", "gres", "gpus-per-node", "constraint"})
    assert (asked["cpus-per-task"], asked["mem"], asked["time"]) == ("1", "2GB", "60")
    assert "ntasks-per-node" not in asked
    assert asked["signal"] == "USR2@120"
    assert "requeue" in asked


def test_settings_reach_sbatch(stand_in: Path, submit: Command) -> None:
    keys = ("partition=gpu", "nodes=2", "tasks_per_node=4", "cpus_per_task=3", "gpus_per_node=4")
    submit(
        "search.trials=2", *(f"hydra.launcher.{key}" for key in keys),
        "hydra.launcher.setup=['module load cuda']",
        "+hydra.launcher.additional_parameters.reservation=friday",
    )  # fmt: skip
    (text,) = _given(stand_in)
    passed_on = ("partition=gpu", "nodes=2", "ntasks-per-node=4", "cpus-per-task=3", "gpus-per-node=4")
    for line in (*passed_on, "reservation=friday"):
        assert f"#SBATCH --{line}\n" in text
    assert "\nmodule load cuda\n" in text
    assert re.search(r"^srun .*--kill-on-bad-exit=0 --wait=60 --cpus-per-task=3 ", text, flags=re.MULTILINE)
    assert "--array=0-1%" in text


def _watched(state: SweepState, monkeypatch: pytest.MonkeyPatch, *answers: int | WorkerError) -> int:
    """Return how often the watch of a complete sweep calls squeue. The last answer repeats."""
    live_jobs = Mock(side_effect=[*answers, *answers[-1:] * 1000])
    monkeypatch.setattr(launch, "live_jobs", live_jobs)
    monkeypatch.setattr(launch, "POLL_S", 0.0)
    launch.watch(state.folder, Progress(state))
    return live_jobs.call_count


def test_a_watch_continues_when_squeue_fails(
    recorded: Design, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _worker(tmp_path)()
    state, silence = (
        SweepState(recorded, tmp_path),
        WorkerError("squeue failed: Unable to contact controller"),
    )
    assert _watched(state, monkeypatch, 1, silence, silence, 1, 0) == 5


def test_queued_jobs_are_not_submitted_again(stand_in: Path, submit: Command) -> None:
    submit("search.trials=3")
    (stand_in / "queued").write_text("1_0\n1_1")
    submit("search.trials=3")
    first, second = _given(stand_in)
    assert "--array=0-2%" in first
    assert "--array" not in second
    (stand_in / "queued").write_text("1_0\n1_1\n2")
    submit("search.trials=3")
    assert len(_given(stand_in)) == 2


def test_trials_that_jobs_left_are_reported(
    stand_in: Path, run_sweep: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "POLL_S", 0.01)
    with pytest.raises(SystemExit) as exit_code:
        run_sweep(*ON_SLURM, "search.trials=1")
    assert exit_code.value.code == 1
    assert len(_given(stand_in)) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "incomplete: 1 trial left; run the same -m command to continue" in shown


def test_errors_of_sbatch_and_a_missing_slurm_are_shown(
    stand_in: Path, submit: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (stand_in / "sbatch").write_text("#!/bin/sh\necho 'invalid account' >&2\nexit 1\n")
    with pytest.raises(WorkerError, match=r"sbatch failed: .*invalid account"):
        submit("search.trials=1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkerError, match=r"squeue failed.*is this a Slurm host"):
        submit("search.trials=1")


def test_other_sweepers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs hydra/sweeper=quasirandom"):
        SlurmLauncher().launch([], 0)
