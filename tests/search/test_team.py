"""A worker of two ranks, the tasks of a Slurm job, started here with the variables that Slurm sets."""

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from adaecho.config.schema import from_plain
from adaecho.errors import RankError
from adaecho.records.folder import RunFolder
from adaecho.search import worker
from adaecho.search.design import Design, TrialId, record_design
from adaecho.search.worker import ATTEMPTS, Worker
from adaecho.training import trainer
from tests.forks import FORKS
from tests.helpers import metrics, summary
from tests.needs import first_form
from tests.ports import free_port
from tests.search.conftest import BuildArms
from tests.training.several_ranks import run_on

TRIALS = (
    "task=digits_mlp", "echo=batch", "echo.factor=1.5", "batch_size=16", "precision=float32", "device=cpu",
    "target.value=null", "max_steps=12", "evaluate.every_fresh_examples=64", "evaluate.max_examples=40",
    "optimizer.learning_rate=tag(log,interval(0.01,0.1))", "optimizer.momentum=0.9", "checkpoint_every_s=0",
)  # fmt: skip
END_S = 120
Before = Callable[[int], None]


def slurm_sets(rank: int, ranks: int, job: int) -> dict[str, str]:
    return {
        "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": str(job), "SLURM_NTASKS": str(ranks),
        "SLURM_JOB_NUM_NODES": "1", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        "SLURM_JOB_NODELIST": "127.0.0.1",
    }  # fmt: skip


def _task(folder: str, variables: dict[str, str], before: Before | None) -> None:
    os.environ |= variables
    if before is not None:
        before(int(variables["SLURM_PROCID"]))
    try:
        sys.exit(Worker(folder, ranks=2)())
    except RankError:
        sys.exit(3)


def _work(folder: Path, before: Before | None = None) -> list[int | None]:
    """Exit codes of a worker's two ranks."""
    job = free_port()  # so that tests side by side take different ports
    given = [(str(folder), slurm_sets(rank, 2, job), before) for rank in (0, 1)]
    tasks = [FORKS.Process(target=_task, args=one) for one in given]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(END_S)
        if task.is_alive():
            task.kill()
    return [task.exitcode for task in tasks]


@pytest.fixture
def sweep(arms_of: BuildArms, tmp_path: Path) -> tuple[Design, Path]:
    """Two trials of one arm, and the folder they will run in."""
    design = Design(arms_of(*TRIALS), seed=0, trials=2, repeats=1, max_diverged=0)
    folder = tmp_path / "sweep"
    folder.mkdir()
    record_design(design, folder)
    return design, folder


def _trial(sweep: tuple[Design, Path], index: int) -> Path:
    return sweep[1] / sweep[0].arms[0].name / "0" / str(index)


def _dies(rank: int, *, victim: int) -> None:
    if rank == victim:
        trainer.Trainer._step = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]


def _another_is_faster(_: int) -> None:
    """Another worker takes the trial after this worker has claimed it."""
    worker._claim = lambda state, trial, given_up, real=worker._claim: (
        real(state, trial, given_up) or (trial.index == 0 and not given_up.add(trial))
    )
    worker._PATIENCE_S = 0.05


def test_ranks_train_each_trial_as_torchrun_would(sweep: tuple[Design, Path]) -> None:
    assert _work(sweep[1]) == [0, 0]
    for folder in (_trial(sweep, 0), _trial(sweep, 1)):
        assert (summary(folder)["status"], summary(folder)["ranks"]) == ("budget_spent", 2)
    config = from_plain(sweep[0].trial(TrialId(sweep[0].arms[0].name, 0, 1))[0])
    assert run_on(2, config, "alone") == [(0, "budget_spent")] * 2
    assert metrics(_trial(sweep, 1)) == metrics("alone"), "it knows nothing of the trial before"


@pytest.mark.parametrize("victim", first_form(1, also=[0]))
def test_a_rank_that_dies_ends_the_worker_and_the_next_worker_continues(
    sweep: tuple[Design, Path], victim: int
) -> None:
    codes = _work(sweep[1], functools.partial(_dies, victim=victim))
    assert (codes[victim], codes[1 - victim]) == (-signal.SIGKILL, 3)
    assert (_trial(sweep, 0) / ATTEMPTS).read_text() == "begun\n"
    assert _work(sweep[1]) == [0, 0]
    assert [summary(_trial(sweep, index))["status"] for index in (0, 1)] == ["budget_spent"] * 2


def test_a_trial_that_another_worker_takes_first_is_left_by_all_ranks(sweep: tuple[Design, Path]) -> None:
    with RunFolder(_trial(sweep, 0)).lock():
        assert _work(sweep[1], _another_is_faster) == [0, 0]
    assert not (_trial(sweep, 0) / "summary.json").exists()
    assert summary(_trial(sweep, 1))["status"] == "budget_spent"
