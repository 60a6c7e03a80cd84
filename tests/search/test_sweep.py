"""Complete sweeps with worker processes and stub trials."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from adaecho.errors import FolderError, UserError
from adaecho.records.files import write_json
from adaecho.search import sweeper
from adaecho.search.launch import WorkerError
from adaecho.search.worker import Worker
from tests.forks import typed
from tests.search.conftest import ONE_ARM, Command
from tests.search.stub import DIVERGES_ABOVE, TASK, run_trial


def _summaries(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        str(path.parent.relative_to(folder)): json.loads(path.read_text())
        for path in sorted(folder.glob("*/*/*/summary.json"))
        if path.parent.name.isdigit()
    }


def _begun(folder: Path) -> dict[str, int]:
    """Number of starts of each trial."""
    return {
        str(path.parent.relative_to(folder)): len(path.read_text().splitlines())
        for path in folder.glob("*/*/*/begun.log")
    }


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _misbehaving(**control: Any) -> Path:
    """Create ``./sweep`` with these faults; returns the file that lists them."""
    Path("sweep").mkdir()
    write_json(Path("sweep/control.json"), control)
    return Path("sweep/control.json")


def test_a_sweep_replaces_diverged_trials_and_leaves_its_records(run_sweep: Command) -> None:
    folder = run_sweep(*ONE_ARM, "search.repeats=2", "echo=none,batch", drawn=True)
    summaries = _summaries(folder)
    diverged = [name for name, summary in summaries.items() if summary["status"] == "diverged"]
    assert diverged, "the seed must make some trial diverge, or this test shows nothing"
    assert len(summaries) == 16 + len(diverged)
    for name, summary in summaries.items():
        rate = summary["hyperparameters"]["optimizer.learning_rate"]
        assert (rate > DIVERGES_ABOVE) == (name in diverged)
    rows = json.loads((folder / "trials.json").read_text())
    assert len(rows) == len(summaries)
    assert sum(row["counted"] for row in rows) == 16
    outcome = json.loads((folder / "outcome.json").read_text())
    assert [arm["arm"] for arm in outcome] == ["echo-none", "echo-batch"]
    assert (folder / "fig3.png").stat().st_size > 0
    design = json.loads((folder / "design.json").read_text())
    trial = summaries["echo-batch/1/2"]["hyperparameters"]
    point = design["arms"]["echo-batch"]["points"][1][2]
    assert point == [trial["optimizer.learning_rate"], trial["optimizer.momentum"]]


def test_the_same_command_runs_only_missing_trials(run_sweep: Command, finished: Path) -> None:
    before = _summaries(finished)
    for name, status in (("none/0/0", "running"), ("none/0/2", "preempted")):
        write_json(finished / name / "summary.json", {**before[name], "status": status})
    (finished / "none/0/1/summary.json").unlink()
    run_sweep(*ONE_ARM)
    assert _summaries(finished) == before
    begun = _begun(finished)
    assert {name for name, times in begun.items() if times == 2} == {"none/0/0", "none/0/1", "none/0/2"}
    run_sweep(*ONE_ARM)
    assert _begun(finished) == begun


def test_a_sweep_can_grow(run_sweep: Command, finished: Path) -> None:
    before = _summaries(finished)
    run_sweep("search.trials=6", "search.repeats=2")
    after = _summaries(finished)
    assert {name: after[name] for name in before} == before
    assert len([name for name in after if name.startswith("none/1/")]) >= 6


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("search.seed=1", "search.seed: 0 in the folder, 1 now"),
        ("search.trials=3", "trials: 4 in the folder, 3 now (a budget can only grow)"),
        ("optimizer.learning_rate=interval(0.1,0.2)",
         "axes.optimizer.learning_rate.low: 0.01 in the folder, 0.1"),
        ("target.value=0.9", "none.config.target.value: 0.97 in the folder, 0.9 now"),
        ("echo=batch", "arms: ['none'] in the folder, ['batch_e2'] now"),
    ],
)  # fmt: skip
def test_another_design_in_the_folder_is_refused_with_a_diff(
    run_sweep: Command, finished: Path, override: str, line: str
) -> None:
    before = _summaries(finished)
    with pytest.raises(FolderError, match=re.escape(line)) as refusal:
        run_sweep(*ONE_ARM, override)
    assert _summaries(finished) == before
    assert "restart=true" in str(refusal.value)


def test_restart_renames_the_old_sweep(run_sweep: Command, finished: Path) -> None:
    run_sweep(*ONE_ARM, "search.seed=1", "restart=true")
    assert json.loads((finished / "design.json").read_text())["search"]["seed"] == 1
    assert len(_summaries(Path("sweep.old-1"))) >= 4


def test_failed_trials_are_tried_three_times_then_the_search_is_incomplete(
    run_sweep: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    fails, dies = {"none/0/0": 2, "none/0/1": 9}, {"none/0/2": 1, "none/0/3": 9}
    control, folder = _misbehaving(fails=fails, dies=dies), Path("sweep")
    with pytest.raises(SystemExit) as exit_code:
        run_sweep(*ONE_ARM)
    assert exit_code.value.code == 1
    found, begun = _summaries(folder), _begun(folder)
    assert {found[name]["status"] for name in ("none/0/0", "none/0/2")} <= {"reached", "diverged"}
    assert found["none/0/1"]["status"] == found["none/0/3"]["status"] == "failed"
    more_than_once = {name: times for name, times in begun.items() if times > 1}
    assert more_than_once == {"none/0/0": 3, "none/0/1": 3, "none/0/2": 2, "none/0/3": 3}
    shown, warned = capsys.readouterr()
    killed = "a worker died (exit code -9; -9 often means lack of memory); see"
    assert warned.count(killed) == 4  # once of one trial, three times of another
    assert "search none/0 is incomplete: 2 trials failed" in shown
    assert "its process was killed, often for lack of memory" in found["none/0/3"]["error"]
    control.unlink()
    run_sweep(*ONE_ARM)
    assert "failed" not in {summary["status"] for summary in _summaries(folder).values()}


@pytest.mark.parametrize(
    ("fault", "says"),
    [("users_error", "none/0/2: no such data"), ("disk_full", ".*: No space left")],
)
def test_an_error_for_the_user_stops_the_sweep_and_loses_nothing(
    run_sweep: Command, fault: str, says: str
) -> None:
    control, folder = _misbehaving(**{fault: ["none/0/2"]}), Path("sweep")
    with pytest.raises(UserError, match=f"trial none/0/2: {says}"):
        run_sweep(*ONE_ARM, "search.workers=1")
    before = _summaries(folder)
    assert sorted(before) == ["none/0/0", "none/0/1"]
    assert _begun(folder)["none/0/2"] == 1
    control.unlink()
    after = _summaries(run_sweep(*ONE_ARM))
    assert {name: after[name] for name in before} == before
    assert {"none/0/2", "none/0/3"} <= after.keys()


class Early:
    """A runner that kills its process while it is unpickled, as often as ``early.json`` says."""

    def __reduce__(self) -> Any:
        return _run_trial_or_die, ()


def _run_trial_or_die() -> Any:
    for number in range(json.loads(Path("early.json").read_text())["deaths"]):
        with suppress(FileExistsError):
            Path(f"death-{number}").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    return run_trial


def test_a_worker_that_dies_early_is_replaced_a_few_times(
    run_sweep: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A temporary lack of memory does not end a sweep."""
    monkeypatch.setattr(sweeper, "Worker", functools.partial(Worker, runner=Early()))
    write_json(Path("early.json"), {"deaths": 100})
    with pytest.raises(WorkerError, match=r"a worker died \(exit code -9"):
        run_sweep(*ONE_ARM)
    assert len(list(Path().glob("death-*"))) <= 8  # of two workers
    assert "warning: search.workers: a worker died" in capsys.readouterr().err
    write_json(Path("early.json"), {"deaths": 10})
    assert len(_summaries(run_sweep(*ONE_ARM))) >= 4


@pytest.fixture
def launch() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``launch(*overrides)``: start the sweep as another process, which the end of the test kills."""
    code = "import sys\nfrom tests.search.conftest import launch\nlaunch(sys.argv[1:])\n"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launched = []

    def start(*overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *overrides]
        launched.append(subprocess.Popen(command, **pipes, start_new_session=True))
        return launched[-1]

    yield start
    for one in launched:
        one.kill()
        one.communicate()


def _wait(until: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 240
    while not (found := until()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def _wait_for_trials(number: int) -> list[int]:
    """Wait until so many trials of ``./sweep`` have begun; returns the pids of their workers."""

    def workers() -> list[int]:
        logs = [path.read_text() for path in Path("sweep").glob("*/*/*/begun.log")]
        begun = len(logs) >= number and all(logs)
        return sorted({int(log.split()[0]) for log in logs}) if begun else []

    return list(_wait(workers))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_after_ctrl_c_or_a_kill_no_worker_is_left_and_the_sweep_continues(
    run_sweep: Command, launch: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    control = _misbehaving(hangs_s={"none/0/2": 600, "none/0/3": 600})
    launcher = launch(*ONE_ARM)
    workers = _wait_for_trials(4)
    os.kill(launcher.pid, number)
    launcher.communicate(timeout=240)
    _wait(lambda: not any(map(_alive, workers)))
    control.unlink()
    folder = run_sweep(*ONE_ARM)
    assert {summary["status"] for summary in _summaries(folder).values()} <= {"reached", "diverged"}
    assert _begun(folder)["none/0/0"] == 1


def test_a_second_launcher_is_refused_and_a_worker_may_join(
    run_sweep: Command, finished: Path, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    expected = _summaries(finished)
    finished.rename("alone")
    control, folder = _misbehaving(hangs_s={"none/0/0": 600}), Path("sweep")
    one_worker = ("search.trials=4", "search.workers=1")
    launcher = launch(*one_worker)
    (worker,) = _wait_for_trials(1)
    control.unlink()
    with pytest.raises(FolderError, match=f"process {launcher.pid}"):
        run_sweep(*one_worker)
    code = "from tests.search.stub import run_trial as run\nfrom adaecho.search.worker import Worker\n"
    by_hand = subprocess.Popen([sys.executable, "-c", f"{code}Worker('sweep', runner=run)(1)"])
    _wait(lambda: len(_summaries(folder)) >= len(expected) - 1)
    assert "none/0/0" not in _summaries(folder)
    os.kill(worker, signal.SIGKILL)  # the trial it was at is continued by the other, or by its successor
    launcher.communicate(timeout=240)
    assert launcher.returncode == 0
    assert by_hand.wait(240) == 0
    assert _summaries(folder) == expected
    assert _begun(folder) == dict.fromkeys(expected, 1) | {"none/0/0": 2}


def test_workers_log_each_trial_once(finished: Path) -> None:
    logs = [path.read_text() for path in sorted((finished / "workers").glob("worker-?.log"))]
    # As a set: two workers may reach for one trial at the same moment, and one finds it taken or finished.
    said = {
        line.removesuffix(": started") for log in logs for line in log.splitlines() if ": started" in line
    }
    begun = _begun(finished)
    assert said == set(begun)
    assert set(begun.values()) == {1}


def test_an_ad_hoc_sweep_has_a_folder_per_design(run_sweep: Command) -> None:
    for overrides in (
        ["search.trials=1"],
        ["search.trials=1", "echo=none,batch"],
        ["search.trials=1", "batch_size=16"],
        ["search.trials=2", "search.workers=1"],  # continues the first
    ):
        run_sweep(*overrides, folder=None)
    folders = list((Path("runs/sweep") / TASK).iterdir())
    assert len(folders) == 3
    trials = [json.loads((folder / "trials.json").read_text()) for folder in folders]
    assert sorted(sum(row["counted"] for row in rows) for rows in trials) == [1, 2, 2]


def test_a_plain_sweep_runs_each_config_in_its_own_folder() -> None:
    """``hydra/sweeper=basic``; ``-m`` may come after overrides."""
    plain = ("-m", "hydra/sweeper=basic", "tracking=none", "device=cpu")
    assert typed("adaecho.run", "device=cpu", *plain, "seed=1,2", "max_fresh_examples=320").code == 0
    summaries = Path("runs/sweep/digits").glob("*/summary.json")
    assert sorted(json.loads(path.read_text())["seed"] for path in summaries) == [1, 2]
