"""Sweeps on Slurm: what a job does, and what is asked of Slurm, told by stand-ins for its commands."""

import functools
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

from adaecho.errors import ConfigError, FolderError
from adaecho.records.folder import RunFolder
from adaecho.search import slurm, sweeper
from adaecho.search.design import Design, TrialId
from adaecho.search.execute import code_digest
from adaecho.search.job import TrialsJob
from adaecho.search.slurm import SlurmError, SlurmSweep, max_array_size
from adaecho.search.state import SweepState
from hydra_plugins.adaecho_quasirandom import SlurmLauncher
from tests.search.conftest import Command
from tests.search.stub import DIVERGES_ABOVE, RUNNER

ON_SLURM = ("hydra/launcher=slurm",)


def _job(design: Design, folder: Path, indices: tuple[int, ...], **changes: Any) -> TrialsJob:
    one_arm = replace(design, arms=design.arms[:1], _cache={})
    job = TrialsJob(str(folder), one_arm, 0, indices, "group", code_digest(), RUNNER)
    return replace(job, **changes)


def _statuses(design: Design, folder: Path) -> dict[int, str]:
    search = SweepState(replace(design, arms=design.arms[:1]), folder).searches[design.arms[0].name, 0]
    return {index: summary["status"] for index, summary in sorted(search.summaries.items())}


# What a job does, without Slurm.


def _steady(design: Design) -> int:
    """A trial of the first arm that does not diverge."""
    points = [design.point(design.arms[0], 0, index) for index in range(design.trials)]
    return min(range(design.trials), key=lambda index: points[index]["optimizer.learning_rate"])


def test_a_job_runs_its_trials_and_no_others(design: Design, tmp_path: Path) -> None:
    index = _steady(design)
    _job(design, tmp_path, (index,))()
    assert _statuses(design, tmp_path) == {index: "reached"}


def test_jobs_replace_the_diverged_trials_of_their_search(design: Design, tmp_path: Path) -> None:
    big = replace(design, trials=8, _cache={})
    _job(big, tmp_path, tuple(range(4)))()
    _job(big, tmp_path, tuple(range(4, 8)))()
    statuses = _statuses(big, tmp_path)
    rates = [big.point(big.arms[0], 0, index)["optimizer.learning_rate"] for index in statuses]
    diverged = sum(rate > DIVERGES_ABOVE for rate in rates)
    assert diverged > 0, "the seed must make some trial diverge, or this test shows nothing"
    assert list(statuses) == list(range(8 + diverged))


def test_a_job_refuses_to_run_when_the_code_has_changed(design: Design, tmp_path: Path) -> None:
    arm, run = design.arms[0], RunFolder(tmp_path / design.arms[0].name / "0" / "0")
    with run.lock():
        run.start(design.trial_config(arm, 0, 0))
    with pytest.raises(ConfigError, match="the code has changed since this job was submitted"):
        _job(design, tmp_path, (0,), code="0123456789ab")()
    assert _statuses(design, tmp_path) == {0: "failed"}
    _job(design, tmp_path, (_steady(design),), code=None)()
    assert _statuses(design, tmp_path)[_steady(design)] == "reached"


def test_a_job_refuses_to_run_when_its_config_has_changed(design: Design, tmp_path: Path) -> None:
    arm = design.arms[0]
    folder = tmp_path / arm.name / "0" / "1"
    run = RunFolder(folder)
    with run.lock():
        run.start(design.trial_config(arm, 0, 1))
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("batch_size: 32", "batch_size: 64"))
    with pytest.raises(FolderError, match="batch_size: 64 in the folder, 32 now"):
        _job(design, tmp_path, (1,))()


def test_a_job_leaves_a_trial_alone_that_another_one_is_at(
    design: Design, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("adaecho.search.job._LOCK_POLL_S", 0.01)
    job = _job(design, tmp_path, (0, 1))
    with RunFolder(tmp_path / str(TrialId(design.arms[0].name, 0, 0))).lock():
        job._run(0, wait_s=0.05)
        job._run(1, wait_s=0.05)
    assert "0/0: another job is at it" in capsys.readouterr().out
    assert list(_statuses(design, tmp_path)) == [1]


# What is asked of Slurm, told by stand-ins for its commands.


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands ahead of the real ones; what sbatch was given is kept in it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    commands = {
        "sbatch": f'cd {folder}; cp "$1" given-$(ls | wc -l).sh; echo Submitted batch job $(ls | wc -l)',
        "squeue": f"cat {folder}/queued 2>/dev/null || true",
        "scontrol": 'echo "MaxArraySize = 4"',
        "srun": "true",
    }
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def submit(run_sweep: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a sweep on Slurm without waiting for it; trials are stubs."""
    monkeypatch.setattr(sweeper, "SlurmSweep", functools.partial(SlurmSweep, runner=RUNNER))
    return functools.partial(run_sweep, *ON_SLURM, "hydra.launcher.wait=false")


def _given(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("given-*.sh"))]


def test_arrays_stay_below_max_array_size_and_jobs_pack_trials(stand_in: Path, submit: Command) -> None:
    folder = submit("echo=none,batch", "search.trials=9", "hydra.launcher.trials_per_job=2")
    arrays = re.findall(r"--array=0-(\d+)%", "\n".join(_given(stand_in)))
    assert [int(last) + 1 for last in arrays] == [3, 3, 3]  # ten jobs: the tenth alone is no array
    records = [json.loads(line) for line in (folder / "slurm/jobs.jsonl").read_text().splitlines()]
    trials = [trial for record in records for trial in record["trials"]]
    assert len(records) == 10
    assert len(trials) == len(set(trials)) == 18
    assert max(len(record["trials"]) for record in records) == 2


def test_the_defaults_ask_for_nothing_that_a_cluster_may_lack(stand_in: Path, submit: Command) -> None:
    submit("search.trials=1")
    (text,) = _given(stand_in)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, flags=re.MULTILINE))
    assert asked.keys().isdisjoint({"partition", "account", "qos", "gres", "gpus-per-node", "constraint"})
    assert (asked["cpus-per-task"], asked["mem"], asked["time"]) == ("1", "2GB", "60")
    assert asked["signal"] == "USR2@120"
    assert "requeue" in asked


def test_what_is_asked_for_is_passed_on(stand_in: Path, submit: Command) -> None:
    submit(
        "search.trials=1",
        "hydra.launcher.partition=gpu",
        "hydra.launcher.gpus_per_node=1",
        "hydra.launcher.setup=['module load cuda']",
        "+hydra.launcher.additional_parameters.reservation=friday",
    )
    (text,) = _given(stand_in)
    for line in ("--partition=gpu", "--gpus-per-node=1", "--reservation=friday"):
        assert f"#SBATCH {line}" in text
    assert "\nmodule load cuda\n" in text


@pytest.mark.usefixtures("stand_in")
def test_configs_are_written_at_submission(submit: Command) -> None:
    folder = submit("search.trials=2")
    design = json.loads((folder / "design.json").read_text())
    for index in range(2):
        config = RunFolder(folder / "none/0" / str(index)).read_config()
        assert config is not None
        assert config["optimizer"]["learning_rate"] == design["arms"]["none"]["points"][0][index][0]


def test_queued_trials_are_not_submitted_again(stand_in: Path, submit: Command) -> None:
    folder = submit("search.trials=3")
    first = [json.loads(line) for line in (folder / "slurm/jobs.jsonl").read_text().splitlines()]
    (stand_in / "queued").write_text("\n".join(record["job"] for record in first[:2]))
    submit("search.trials=3")
    again = [json.loads(line) for line in (folder / "slurm/jobs.jsonl").read_text().splitlines()][3:]
    assert [record["trials"] for record in again] == [first[2]["trials"]]


def test_a_torn_record_of_jobs_is_mended(stand_in: Path, submit: Command) -> None:
    folder = submit("search.trials=3")
    path = folder / "slurm/jobs.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    first = [json.loads(line) for line in path.read_text().splitlines()[:2]]
    (stand_in / "queued").write_text("\n".join(record["job"] for record in first))
    submit("search.trials=3")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[:2] == first
    assert records[2]["trials"] == ["none/0/2"]


def test_jobs_that_end_without_a_word_are_failures(
    stand_in: Path, run_sweep: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm, "POLL_S", (0.01, 0.01))
    with pytest.raises(SystemExit) as exit_code:
        run_sweep(*ON_SLURM, "search.trials=1")
    assert exit_code.value.code == 1
    assert len(_given(stand_in)) == 3  # tried again twice
    shown = " ".join(capsys.readouterr().out.split())
    assert "search none/0 is incomplete: 1 of its trials failed; its job ended without a result" in shown


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("setting", ["trials_per_job=0", "timeout_min=0", "signal_delay_s=-1", "mem_gb=0"])
def test_settings_that_cannot_be_are_refused_by_name(submit: Command, setting: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"hydra.launcher.{setting.partition('=')[0]}")):
        submit("search.trials=1", f"hydra.launcher.{setting}")


def test_what_sbatch_says_reaches_the_user(stand_in: Path, submit: Command) -> None:
    (stand_in / "sbatch").write_text("#!/bin/sh\necho 'invalid account' >&2\nexit 1\n")
    with pytest.raises(SlurmError, match=r"sbatch refuses: .*invalid account"):
        submit("search.trials=1")


def test_without_slurm_the_error_says_so(
    submit: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match=r"squeue fails.*is this a Slurm host"):
        submit("search.trials=1")


@pytest.mark.usefixtures("stand_in")
def test_max_array_size_is_read_from_slurm() -> None:
    assert max_array_size() == 3


def test_other_sweepers_cannot_use_the_launcher() -> None:
    with pytest.raises(ConfigError, match=r"needs hydra/sweeper=quasirandom"):
        SlurmLauncher().launch([], 0)


def test_other_launchers_are_refused(run_sweep: Command) -> None:
    ConfigStore.instance().store(group="hydra/launcher", name="other", node={"_target_": "nothing"})
    with pytest.raises(ConfigError, match=r"hydra/launcher=other: .* basic or slurm"):
        run_sweep("hydra/launcher=other")
