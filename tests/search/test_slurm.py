"""Sweeps on Slurm: what is asked of it, told by stand-ins; what becomes of jobs, by the real thing."""

import functools
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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

STATE = Path("/var/lib/adaecho-slurm")  # of scripts/local_slurm.sh
ON_SLURM = ("hydra/launcher=slurm",)
TIMEOUT_S = 900  # a sweep of 16 trials on a machine that may be busy


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
    with pytest.raises(ConfigError, match="the code has changed since this job was submitted"):
        _job(design, tmp_path, (0,), code="0123456789ab")()
    assert _statuses(design, tmp_path) == {}
    _job(design, tmp_path, (_steady(design),), code=None)()
    assert len(_statuses(design, tmp_path)) == 1


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


# The real thing.


def _slurm_runs() -> bool:
    if shutil.which("sinfo") is None:
        return False
    return subprocess.run(["sinfo", "--noheader"], capture_output=True, check=False).returncode == 0


on_slurm = pytest.mark.skipif(
    not _slurm_runs(), reason="no Slurm answers here; as root: scripts/local_slurm.sh up"
)
# Four arms x four trials of a second or two; nothing stops early, so that all can be compared.
SWEEP = (
    "echo=none,batch,example_before_augmentation,example_after_augmentation",
    "optimizer.learning_rate=tag(log,interval(0.01,0.1))",
    "search.trials=4",
    "target.value=null",
    "max_fresh_examples=3200",
    "evaluate.every_fresh_examples=160",
    "checkpoint_every_s=0.2",
    "tracking=none",
    "device=cpu",
    *ON_SLURM,
    "hydra.launcher.trials_per_job=4",
)


@pytest.fixture
def _no_jobs_left() -> Iterator[None]:
    yield
    subprocess.run(["scancel", f"--user={getpass.getuser()}", "--quiet"], check=False)


def _command(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "adaecho.run", "-m", *SWEEP, f"hydra.sweep.dir={folder}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _finish(launcher: "subprocess.Popen[bytes]") -> None:
    _, errors = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 0, errors.decode()


def _wait_until(what: Callable[[], Any], timeout_s: float = 300.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.1)
    raise AssertionError(f"waited {timeout_s} s in vain")


def _without_clocks(record: dict[str, Any]) -> dict[str, Any]:
    """A record without clocks, and without what tells that a run was resumed: its buffer was read again."""
    return {
        key: _without_clocks(value) if isinstance(value, dict) else value
        for key, value in record.items()
        if key not in ("R", "reread_examples") and not key.endswith(("_s", "_s_per_batch", "_s_per_step"))
    }


def _outcomes(folder: Path) -> dict[str, Any]:
    """All that a sweep computed, clocks aside."""
    found = {}
    for path in sorted(folder.glob("*/*/*/summary.json")):
        lines = (path.parent / "metrics.jsonl").read_text().splitlines()
        found[str(path.parent.relative_to(folder))] = {
            "summary": _without_clocks(json.loads(path.read_text())),
            "metrics": [_without_clocks(json.loads(line)) for line in lines],
        }
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcomes of a sweep that nobody disturbed."""
    folder = tmp_path_factory.mktemp("slurm") / "sweep"
    _finish(_command(folder))
    return _outcomes(folder)


@on_slurm
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.usefixtures("_no_jobs_left")
def test_a_sweep_runs_on_slurm(undisturbed: dict[str, Any]) -> None:
    arms = {name.partition("/")[0] for name in undisturbed}
    assert len(arms) == 4
    assert len(undisturbed) >= 16
    assert {trial["summary"]["status"] for trial in undisturbed.values()} <= {"budget_spent", "diverged"}


@on_slurm
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.usefixtures("_no_jobs_left")
def test_a_disturbed_sweep_computes_the_same(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    launcher = _command(folder)

    _wait_until(lambda: len(slurm.recorded_jobs(folder)) == 4)
    launcher.kill()
    launcher.communicate()
    requeued = _wait_until(lambda: _at_work(folder, but=None))
    subprocess.run(["scontrol", "requeue", requeued], check=True)
    cancelled = _wait_until(lambda: _at_work(folder, but=requeued))
    subprocess.run(["scancel", cancelled], check=True)
    if (STATE / "slurmd.pid").exists():
        os.kill(int((STATE / "slurmd.pid").read_text()), signal.SIGTERM)
        _wait_until(lambda: not (STATE / "slurmd.pid").exists())
        subprocess.run(["slurmd"], check=True)
    # Slurm holds a requeued job back for two minutes.
    _wait_until(lambda: "PENDING" in _state_of(requeued))
    subprocess.run(["scontrol", "update", f"JobId={requeued}", "StartTime=now"], check=True)
    _finish(_command(folder))
    assert _outcomes(folder) == undisturbed
    rows = json.loads((folder / "trials.json").read_text())
    assert len({(row["arm"], row["repeat"], row["index"]) for row in rows}) == len(rows) == len(undisturbed)
    assert len(slurm.recorded_jobs(folder)) == 5, "the cancelled job alone was submitted again"


def _at_work(folder: Path, but: str | None) -> str | None:
    """A job, other than ``but``, in the middle of a trial that has been checkpointed."""
    for job, trials in slurm.recorded_jobs(folder):
        for trial in trials:
            run = RunFolder(folder / str(trial))
            summary = run.read_summary()
            if job != but and summary and summary["status"] == "running" and summary["steps"] > 0:
                return job
    return None


def _state_of(job: str) -> str:
    command = ["squeue", "--noheader", f"--job={job}", "--format=%T"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@on_slurm
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.usefixtures("_no_jobs_left")
def test_a_job_whose_time_is_up_writes_a_checkpoint_and_asks_to_be_requeued(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    launcher = _command(folder)

    job = _wait_until(lambda: _at_work(folder, but=None))
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    _wait_until(lambda: "PENDING" in _state_of(job))
    preempted = [
        summary
        for path in folder.glob("*/*/*/summary.json")
        if (summary := json.loads(path.read_text()))["status"] == "preempted"
    ]
    assert [summary["signal"] for summary in preempted] == ["SIGUSR2"]
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)
    _finish(launcher)
    assert {name: trial["metrics"] for name, trial in _outcomes(folder).items()} == {
        name: trial["metrics"] for name, trial in undisturbed.items()
    }


@on_slurm
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.usefixtures("_no_jobs_left")
def test_32_jobs_at_once_on_one_study(run_sweep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "SlurmSweep", functools.partial(SlurmSweep, runner=RUNNER))
    folder = run_sweep(*ON_SLURM, "search.trials=32")
    begun = {
        str(path.parent.relative_to(folder)): len(path.read_text().splitlines())
        for path in folder.glob("*/*/*/begun.log")
    }
    rows = json.loads((folder / "trials.json").read_text())
    assert set(begun.values()) == {1}
    assert len(rows) == len(begun) == 32 + sum(row["status"] == "diverged" for row in rows)
    assert sum(row["counted"] for row in rows) == 32
    assert len({tuple(row["hyperparameters"].values()) for row in rows}) == len(rows)
