"""One worker of a sweep: it takes the next missing trial whose lock is free, until none is left.

::

    python -m adaecho.search.worker SWEEP_FOLDER [--task MODULE] [--callback MODULE]

The folder is the truth: ``design.json`` says what the trials are, the run folders how far each has come, and
their locks who is at work. So workers need not know of each other. Any number may run, on every host that
shares the folder; one that is killed leaves a trial that another continues.
"""

import argparse
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaecho.config.launched import importing
from adaecho.errors import ConfigError, FolderError, RankError, UserError, say, told, warn
from adaecho.masking import presentable
from adaecho.records.environment import code_digest
from adaecho.records.files import append, read_bytes, write_json
from adaecho.records.folder import RunFolder, move_aside
from adaecho.records.lock import STALE_AFTER_S, FolderInUseError, is_held
from adaecho.records.status import FINISHED
from adaecho.search.design import TrialId, check_unchanged, read_design
from adaecho.search.state import REFUSAL, SweepState, record_failure
from adaecho.search.team import Order, PreemptedError, Team, check_signal, load_runner, ranks_of_job
from adaecho.training.interrupt import WaitEndedError

MAX_ATTEMPTS = 3  # a failed trial is tried again twice
BEGUN = ": begun"  # a worker's log says so of each trial
# A trial whose host died looks alive until its lock is stale; meanwhile there may be nothing else to do.
_PATIENCE_S = STALE_AFTER_S + 30
_POLL_S = (0.1, 10.0)
_LOOKS_PER_S = 4  # of all idle workers together: the folder may lie on a network file system


@dataclass
class Worker:
    """A callable that submitit can pickle; it holds where the work is, and never how far it got.

    Attributes:
        folder: of the sweep.
        number: of this worker among ``num_workers``, from 0: each begins at another trial, so that hundreds
            of them don't contend for the first one.
        launch: names the command that started it; trials are tried ``MAX_ATTEMPTS`` times in each.
        code: digest of the code at submission; None runs with whatever is there.
        runner: ``module:function`` that runs a trial.
        ranks: how many tasks of its job train each trial together; all are such a worker, and the first one
            chooses the trials.
        typed: tasks and callbacks that the user has named: of modules that aren't ours or installed, the
            design can mean only these.
    """

    folder: str
    number: int = 0
    num_workers: int = 1
    launch: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    code: str | None = None
    runner: str = ""
    ranks: int = 1
    typed: tuple[str, ...] = ()

    def __call__(self) -> None:
        """Work until nothing is missing that this launch could still run.

        Raises:
            ConfigError: the code changed since submission.
            RankError: another rank failed; it counts as an attempt, and the next submission goes on.
            UserError: a trial met what only the user can mend; it is also in the sweep's ``refusal.json``.
        """
        try:
            self._check_code()
            preempted = self._work_together()
        except RankError:
            raise  # the rank that failed tells the user, if there is something to mend
        except UserError as error:
            with suppress(FolderError):  # e.g. of the full disk that is being reported
                write_json(Path(self.folder) / REFUSAL, {"launch": self.launch, "error": str(error)})
            raise
        except Exception:  # submitit keeps what it says
            text = traceback.format_exc()
            if presentable(text) == text:
                raise
            raise RuntimeError(presentable(text)) from None
        if preempted is not None:
            _leave(preempted.signal)

    def checkpoint(self) -> Any:
        """What submitit submits again at a time-out or preemption: the same worker."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _check_code(self) -> None:
        now = code_digest()
        if self.code not in (None, now):
            raise ConfigError(
                f"the code has changed since this job was submitted (was {self.code}, is {now}); cancel "
                "what is still queued and run the same -m command again: it goes on with the code as it is"
            )

    def _work_together(self) -> PreemptedError | None:
        """Work with all ranks; why it ended, where that was a signal."""
        folder = Path(self.folder)
        design = read_design(folder)
        configs = [design.trial_config(arm, 0, 0) for arm in design.arms] if self.ranks > 1 else []
        with ranks_of_job(self.ranks, configs, self.typed) as ranks:
            team = Team(self.runner, self.typed, ranks)
            try:
                if team.is_first:
                    self._work(SweepState(design, folder), team)
                    team.tell(None)
                else:
                    team.follow()
            except PreemptedError as preempted:  # all ranks part in peace before the job asks to be requeued
                return preempted
        return None

    def _work(self, state: SweepState, team: Team) -> None:
        given_up: set[TrialId] = set()
        idle_since: float | None = None
        while left := [trial for trial in self._in_my_order(state) if trial not in given_up]:
            if any(self._take(state, trial, given_up, team) for trial in left):
                idle_since = None
                continue
            # All that is left is in other hands. It may yet diverge and call for more, or be abandoned.
            idle_s = time.monotonic() - (idle_since := idle_since or time.monotonic())
            if idle_s > _PATIENCE_S:
                return
            team.pause(self._pause_s(idle_s))

    def _pause_s(self, idle_s: float) -> float:
        """Seconds until the next look: few workers soon see that all is done, hundreds don't crowd."""
        shortest, longest = _POLL_S
        return min(max(shortest, idle_s / 5), max(shortest, self.num_workers / _LOOKS_PER_S), longest)

    def _in_my_order(self, state: SweepState) -> list[TrialId]:
        """What is missing: first every ``num_workers``-th, then the next worker's share, and so on."""
        arms = {arm.name: number for number, arm in enumerate(state.design.arms)}

        def distance(trial: TrialId) -> int:
            number = (trial.repeat * state.design.trials + trial.index) * len(arms) + arms[trial.arm]
            return (number - self.number) % self.num_workers

        return sorted(state.missing(), key=distance)

    def _take(self, state: SweepState, trial: TrialId, given_up: set[TrialId], team: Team) -> bool:
        """Run a trial unless another worker is at it; whether the state has changed."""
        folder = state.trial_folder(trial)
        if is_held(folder):
            return False
        if state.reread(trial).get("status") in FINISHED:
            return True
        attempts = Attempts(folder, self.launch)
        try:
            if attempts.count() < MAX_ATTEMPTS:
                self._run(state, trial, attempts, team)
            if attempts.count() >= MAX_ATTEMPTS:
                given_up.add(trial)
                logs = state.folder / ("slurm" if "SLURM_JOB_ID" in os.environ else "workers")
                record_failure(state, trial, f"its process died (often for want of memory); see {logs}")
        except FolderInUseError:
            return False
        state.reread(trial)
        return True

    def _run(self, state: SweepState, trial: TrialId, attempts: "Attempts", team: Team) -> None:
        arm = next(arm for arm in state.design.arms if arm.name == trial.arm)
        folder = state.trial_folder(trial)
        check_unchanged(state.design, state.folder)
        _set_damaged_aside(folder)
        config = state.design.trial_config(arm, trial.repeat, trial.index)
        overrides = state.design.trial_overrides(arm, trial.repeat, trial.index)
        attempts.begin()
        if attempts.count() > MAX_ATTEMPTS:  # another worker has begun its last one at the same moment
            attempts.take_back()
            return
        say(f"{trial}{BEGUN}")
        try:
            summary = team.train(Order(str(trial), config, folder, overrides))
        except FolderInUseError:
            attempts.take_back()
            say(f"{trial}: another worker was faster")
            raise
        except WaitEndedError as error:  # its last checkpoint holds: the rest is no failure of the trial's
            attempts.take_back()
            raise PreemptedError(error.signal) from error
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, RankError):
                attempts.take_back()
                raise UserError(f"trial {trial}: {error}") from error
            if attempts.count() >= MAX_ATTEMPTS:
                record_failure(state, trial, f"{type(error).__name__}: {error}")
            if team.ends_at_failure:
                raise
            print(presentable(traceback.format_exc()), file=sys.stderr)
            return
        attempts.forget()
        say(f"{trial}: {summary['status']}")
        check_signal(summary)


class Attempts:
    """How often a trial was begun in a launch and neither ended nor was interrupted.

    A line per begin in the trial's folder, written before the trial's process can be killed.
    """

    def __init__(self, folder: Path, launch: str) -> None:
        self._path, self._launch = folder / "attempts.log", launch

    def count(self) -> int:
        try:
            lines = read_bytes(self._path).decode(errors="replace").splitlines()
        except FileNotFoundError:  # also where the worker at the trial forgets them at this moment
            return 0
        return lines.count(self._launch) - lines.count(f"-{self._launch}")

    def begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append(self._path, f"{self._launch}\n")

    def take_back(self) -> None:
        """Count the last attempt as none."""
        with suppress(FolderError):  # of a full disk
            append(self._path, f"-{self._launch}\n")

    def forget(self) -> None:
        """The trial has ended, or goes on later."""
        self._path.unlink(missing_ok=True)


def _set_damaged_aside(folder: Path) -> None:
    """Move a trial's folder aside whose config or summary a power cut left empty: the trial starts anew.

    Raises:
        FolderInUseError: another worker is at it.
    """
    run = RunFolder(folder)
    if _damage(run) is None:
        return
    with run.lock():
        error = _damage(run)  # another worker may have seen to it meanwhile
        if error is not None:
            warn(f"{error}\nkept as {move_aside(folder)}; the trial starts anew")


def _damage(run: RunFolder) -> FolderError | None:
    try:
        run.read_config()
        run.read_summary()
    except FolderError as error:
        return error
    return None


def _leave(name: str | None) -> None:
    """End after the trial has written a checkpoint.

    At a time-out (USR2) submitit's own handler, which the trial had set aside, asks for the requeue. TERM
    comes from scancel, or from a requeue that is under way already: asking for one would revive a
    cancelled job.
    """
    if name == "SIGUSR2":
        os.kill(os.getpid(), signal.SIGUSR2)
    sys.exit(128 + signal.Signals[name or "SIGTERM"])


def _end_with(launcher: int) -> None:
    """Take this process and its children along when the launcher is gone, in mid-trial if need be.

    A run folder is safe to kill at any instant, and a trial left behind would hold its lock.
    """
    while os.getppid() == launcher:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _choose_gpu(number: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m adaecho.search.worker", description=__doc__)
    parser.add_argument("folder", help="of the sweep, which a -m command has begun")
    parser.add_argument("--number", type=int, default=0, help="of this worker, from 0")
    parser.add_argument("--num-workers", type=int, default=1, help="how many there are")
    for flag in ("task", "callback"):
        text = f"one of its {flag}s that is a module of your own"
        parser.add_argument(f"--{flag}", action="append", default=[], help=text)
    parser.add_argument("--launch", default=uuid.uuid4().hex[:8], help=argparse.SUPPRESS)
    parser.add_argument("--launcher", type=int, help=argparse.SUPPRESS)  # process to end with
    parser.add_argument("--runner", default="", help=argparse.SUPPRESS)
    typed = parser.parse_args(arguments)
    launcher = typed.launcher
    if launcher is not None:
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    with told():
        with importing():
            load_runner(typed.runner)
        _choose_gpu(typed.number)
        names = (*typed.task, *typed.callback)
        place = (typed.number, typed.num_workers)
        Worker(typed.folder, *place, launch=typed.launch, runner=typed.runner, typed=names)()


if __name__ == "__main__":
    main()
