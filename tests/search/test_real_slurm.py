"""Sweeps on a real Slurm: undisturbed, disturbed, out of time, and with two ranks per trial."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from adaecho.config.schema import from_plain
from adaecho.records.files import read_json
from adaecho.records.folder import is_held
from adaecho.search.design import TrialId, read_design
from adaecho.search.launch import job_name, live_jobs
from tests import paced
from tests.helpers import metrics, summary
from tests.needs import needs
from tests.training.several_ranks import run_on

STATE = Path("/var/lib/adaecho-slurm")  # of scripts/local_slurm.sh
ON_SLURM = ("hydra/launcher=slurm",)
TIMEOUT_S = 900  # a sweep on a machine that may be busy


def _nodes() -> list[str]:
    """Nodes of the installed Slurm."""
    if shutil.which("sinfo") is None:
        return []
    return _output("sinfo", "--noheader", "--Node", "--format=%N").split()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


NODES = _nodes()
on_slurm = needs("slurm", present=bool(NODES), remedy="as root: scripts/local_slurm.sh up")
on_two_nodes = needs(
    "two-slurm-nodes", present=len(NODES) > 1, remedy="as root: scripts/local_slurm.sh down, then up"
)
# Three arms x two trials of a second or two, while no gate is closed, by three jobs; nothing stops early, so
# that all can be compared.
SWEEP = (
    f"task.name={paced.NAME}", "echo=none,example_before_augmentation,example_after_augmentation",
    "optimizer.learning_rate=tag(log,interval(0.01,0.1))", "search.trials=2", "target.value=null",
    "max_fresh_examples=3200", "evaluate.every_fresh_examples=160", "checkpoint_every_s=0.2",
    "tracking=none", "device=cpu", *ON_SLURM, "hydra.launcher.trials_per_job=2",
)  # fmt: skip


# Two trials by a job of two ranks.
TWO_RANKS_EACH = ("echo=batch", *(each for each in SWEEP if not each.startswith("echo=")))
ON_TWO_RANKS = (*TWO_RANKS_EACH, "hydra.launcher.tasks_per_node=2")
ON_TWO_NODES = (*TWO_RANKS_EACH, "hydra.launcher.nodes=2")


Begin = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """``begin(sweep, gate)`` starts a sweep in ``./sweep``; the end of the test stops it and its jobs."""
    launchers = []

    def start(sweep: tuple[str, ...] = SWEEP, gate: Path | None = None) -> subprocess.Popen[bytes]:
        launchers.append(_command(tmp_path / "sweep", sweep, gate))
        return launchers[-1]

    yield start
    for launcher in launchers:
        with launcher:
            launcher.kill()
    _cancel_jobs(tmp_path / "sweep")


def _cancel_jobs(folder: Path) -> None:
    """Cancel the jobs of one sweep; other tests may use the same Slurm."""
    subprocess.run(["scancel", f"--name={job_name(folder)}", "--quiet"], check=False)


def _command(
    folder: Path, sweep: tuple[str, ...] = SWEEP, gate: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a sweep. With a gate, its trials wait for that file before they end."""
    command = [sys.executable, "-m", "adaecho.run", "-m", *sweep, f"hydra.sweep.dir={folder}"]
    environment = os.environ if gate is None else {**os.environ, paced.GATE: str(gate)}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def _finish(launcher: "subprocess.Popen[bytes]") -> None:
    with launcher:
        try:
            _, errors = launcher.communicate(timeout=TIMEOUT_S)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, errors.decode()


def _wait_until(what: Callable[[], Any], folder: Path, timeout_s: float = 300.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.1)
    raise AssertionError(f"timed out after {timeout_s} s; see the logs in {folder / 'slurm'}")


def _without_clocks(record: dict[str, Any]) -> dict[str, Any]:
    """A record without timers and ``reread_examples``, which depend on resumes."""
    return {
        key: _without_clocks(value) if isinstance(value, dict) else value
        for key, value in record.items()
        if key not in ("R", "reread_examples") and not key.endswith(("_s", "_s_per_batch", "_s_per_step"))
    }


def _outcomes(folder: Path) -> dict[str, Any]:
    """Summaries and metrics of a sweep without timers."""
    found = {}
    for path in sorted(folder.glob("*/*/*/summary.json")):
        lines = (path.parent / "metrics.jsonl").read_text().splitlines()
        found[str(path.parent.relative_to(folder))] = {
            "summary": _without_clocks(json.loads(path.read_text())),
            "metrics": [_without_clocks(json.loads(line)) for line in lines],
        }
    return found


def _metrics(outcomes: dict[str, Any]) -> dict[str, Any]:
    return {name: trial["metrics"] for name, trial in outcomes.items()}


def _swept(folder: Path, sweep: tuple[str, ...]) -> Path:
    """The folder of a sweep without disturbance."""
    try:
        _finish(_command(folder, sweep))
    finally:
        _cancel_jobs(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _outcomes(_swept(tmp_path_factory.mktemp("slurm") / "sweep", SWEEP))


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _swept(tmp_path_factory.mktemp("ranks") / "sweep", ON_TWO_RANKS)


@on_slurm
@pytest.mark.timeout(TIMEOUT_S)
def test_a_sweep_runs_on_slurm(undisturbed: dict[str, Any]) -> None:
    assert len({name.partition("/")[0] for name in undisturbed}) == 3
    assert len(undisturbed) >= 6
    assert {trial["summary"]["status"] for trial in undisturbed.values()} <= {"budget_spent", "diverged"}


@on_slurm
@pytest.mark.timeout(TIMEOUT_S)
def test_a_disturbed_sweep_computes_the_same(
    undisturbed: dict[str, Any], begin: Begin, tmp_path: Path
) -> None:
    folder, gate = tmp_path / "sweep", tmp_path / "gate"
    launcher = begin(gate=gate)

    # submitit gives jobs their work a moment after Slurm has them: killed before, the launcher leaves none.
    _wait_until(lambda: len(_submitted(folder)) == live_jobs(folder) == 3, folder)
    launcher.kill()
    launcher.communicate()
    requeued = _wait_until(lambda: _at_work(folder), folder)
    subprocess.run(["scontrol", "requeue", requeued], check=True)
    cancelled = _wait_until(lambda: _at_work(folder, but=requeued), folder)
    subprocess.run(["scancel", cancelled], check=True)
    for pid_file in STATE.glob("slurmd.*.pid"):
        os.kill(int(pid_file.read_text()), signal.SIGTERM)
        _wait_until(lambda pid_file=pid_file: not pid_file.exists(), folder)
        node = pid_file.name.removeprefix("slurmd.").removesuffix(".pid")
        subprocess.run(["slurmd", "-N", node], check=True)
    _start_again(requeued, folder)
    gate.touch()
    _finish(begin())
    assert _outcomes(folder) == undisturbed
    rows = json.loads((folder / "trials.json").read_text())
    assert len({(row["arm"], row["repeat"], row["index"]) for row in rows}) == len(rows) == len(undisturbed)
    assert len(_submitted(folder)) <= 4, "no more than the cancelled job was submitted again"


def _submitted(folder: Path) -> list[Path]:
    """submitit's files of the submitted jobs."""
    return list((folder / "slurm").glob("*_submitted.pkl"))


def _at_work(folder: Path, but: str | None = None) -> str | None:
    """A job, other than ``but``, in the middle of a trial that has been checkpointed."""
    return next((job for job in _jobs_at_work(folder) if job != but), None)


def _jobs_at_work(folder: Path) -> Iterator[str]:
    for path in folder.glob("*/*/*/summary.json"):
        summary, where = read_json(path), read_json(path.parent / "environment.json")["slurm"]
        if summary["status"] == "running" and summary["steps"] > 0 and is_held(path.parent):
            # One worker alone is no array.
            array = where.get("array_job_id")
            yield f"{array}_{where['array_task_id']}" if array else where["job_id"]


def _start_again(job: str, folder: Path) -> None:
    """Start a requeued job, which Slurm would hold back for two minutes.

    Slurm revokes the job's credentials within the second of the requeue and kills a job that starts earlier.
    """
    _wait_until(lambda: _restarts(job) > 0 and _state_of(job).strip() in ("PENDING", "RUNNING"), folder)
    time.sleep(3)
    # It fails if Slurm has started the job already.
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True, check=False)


def _time_is_up(folder: Path) -> str:
    """Send the time-out signal to a running job; returns the job after it was requeued."""
    job = _wait_until(lambda: _at_work(folder), folder)
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    _wait_until(lambda: _restarts(job), folder)
    found = [read_json(path) for path in folder.glob("*/*/*/summary.json")]
    assert [one["signal"] for one in found if one["status"] == "preempted"] == ["SIGUSR2"]
    return str(job)


def _state_of(job: str) -> str:
    return _output("squeue", "--noheader", f"--job={job}", "--format=%T")


def _restarts(job: str) -> int:
    found = re.search(r"Restarts=(\d+)", _output("scontrol", "show", "job", job))
    return int(found[1]) if found else 0


@on_slurm
@pytest.mark.timeout(TIMEOUT_S)
def test_the_tasks_of_a_job_train_each_trial_together(on_two_ranks: Path, tmp_path: Path) -> None:
    design = read_design(on_two_ranks)
    (arm,) = design.arms
    for index in (0, 1):
        folder = on_two_ranks / arm.name / "0" / str(index)
        assert summary(folder)["ranks"] == 2
        here = tmp_path / str(index)
        assert (
            run_on(2, from_plain(design.trial(TrialId(arm.name, 0, index))[0]), here)
            == [(0, "budget_spent")] * 2
        )
        assert metrics(folder) == metrics(here)


@on_two_nodes
@pytest.mark.timeout(TIMEOUT_S)
def test_the_ranks_of_a_job_may_be_on_two_nodes(on_two_ranks: Path, begin: Begin, tmp_path: Path) -> None:
    _finish(begin(ON_TWO_NODES))
    (folder,) = (tmp_path / "sweep").glob("*/0/0")
    assert summary(folder)["ranks"] == 2
    nodes = read_json(folder / "environment.json")["slurm"]["nodelist"]
    assert len(_output("scontrol", "show", "hostnames", nodes).split()) == 2
    assert metrics(folder) == metrics(on_two_ranks / folder.relative_to(tmp_path / "sweep"))


@on_slurm
@pytest.mark.timeout(TIMEOUT_S)
def test_a_job_of_two_ranks_is_requeued_at_its_time_out_and_its_trial_survives_a_rank_that_dies(
    on_two_ranks: Path, begin: Begin, tmp_path: Path
) -> None:
    folder, gate = tmp_path / "sweep", tmp_path / "gate"
    launcher = begin(ON_TWO_RANKS, gate)
    job = _time_is_up(folder)
    _start_again(job, folder)
    _wait_until(lambda: job in _jobs_at_work(folder), folder)
    os.kill(_process_of(job, rank=1), signal.SIGKILL)
    _wait_until(lambda: not _state_of(job), folder)
    assert list(folder.glob("*/*/*/attempts.log"))
    gate.touch()
    launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 1, "its only job is gone"
    _finish(begin(ON_TWO_RANKS))
    ended = _outcomes(folder)
    assert {trial["summary"]["status"] for trial in ended.values()} == {"budget_spent"}
    assert _metrics(ended) == _metrics(_outcomes(on_two_ranks))


def _process_of(job: str, rank: int) -> int:
    """Process number of a job's task."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            content = environment.read_bytes().split(b"\0")
            variables = dict(line.decode(errors="replace").partition("=")[::2] for line in content)
            task = f"{variables.get('SLURM_ARRAY_JOB_ID')}_{variables.get('SLURM_ARRAY_TASK_ID')}"
            is_task = job in (task, variables.get("SLURM_JOB_ID")) and "RANK" not in variables
            if is_task and variables.get("SLURM_PROCID") == str(rank):
                return int(environment.parent.name)
    raise AssertionError(f"{job} has no task {rank}")
