"""What a cluster's job runs: some trials of one search, and points in place of those that diverged.

The pickle of a job holds where its trials are and what they must compute, never how far they got: a requeued
job starts from it again and finds that in the run folders.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from adaecho.errors import ConfigError, FolderError, UserError
from adaecho.records.folder import RunFolder
from adaecho.records.lock import STALE_AFTER_S
from adaecho.search.design import Design, TrialId
from adaecho.search.execute import MAX_ATTEMPTS, code_digest, execute
from adaecho.search.state import Search, SweepState
from adaecho.search.sweep import record_failure
from adaecho.search.worker import RUN_TRIAL

_LOCK_POLL_S = 5.0


@dataclass
class TrialsJob:
    """The callable that submitit pickles.

    Attributes:
        folder: of the sweep, absolute.
        design: with the one arm of this job.
        repeat: which search of the arm.
        indices: the trials to run, one after the other.
        group: the tracker's name for the sweep.
        code: the code at submission; None runs with whatever is there.
        runner: ``module:function`` that runs a trial.
    """

    folder: str
    design: Design
    repeat: int
    indices: tuple[int, ...]
    group: str
    code: str | None
    runner: str = RUN_TRIAL

    def __call__(self) -> None:
        """Run the trials, then replace diverged ones of this search for as long as it asks for more.

        Raises:
            ConfigError: the code changed since submission.
            UserError: a trial met what only the user can mend.
        """
        try:
            self._check_code()
            for index in self.indices:
                self._run(index)
        except UserError as error:
            self._record_refusal(error)
            raise
        tried: set[int] = set()
        while (further := next(self._replacements(tried), None)) is not None:
            tried.add(further)
            self._run(further, wait_s=0.0)

    def checkpoint(self) -> Any:
        """What submitit resubmits at a time-out or preemption: the same job."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def trials(self) -> list[TrialId]:
        """The trials it was submitted for."""
        return [TrialId(self.design.arms[0].name, self.repeat, index) for index in self.indices]

    def _record_refusal(self, error: UserError) -> None:
        for trial in self.trials():
            with suppress(FolderError):
                record_failure(Path(self.folder) / str(trial), str(error))

    def _check_code(self) -> None:
        now = code_digest()
        if self.code not in (None, now):
            raise ConfigError(
                f"the code has changed since this job was submitted (was {self.code}, is {now}); cancel "
                "it and submit again, or submit with search.allow_changed_code=true"
            )

    def _replacements(self, tried: set[int]) -> Iterator[int]:
        """Points beyond those that were submitted, which the search needs since some diverged."""
        search = self._search()
        beyond = (index for index in search.missing() if index >= search.trials)
        return (index for index in beyond if index not in tried and search.status(index) != "failed")

    def _search(self) -> Search:
        return SweepState(self.design, Path(self.folder)).searches[self.design.arms[0].name, self.repeat]

    def _run(self, index: int, wait_s: float = STALE_AFTER_S + 30) -> None:
        arm, trial = self.design.arms[0], TrialId(self.design.arms[0].name, self.repeat, index)
        folder = Path(self.folder) / str(trial)
        if not _is_free(folder, wait_s):
            print(f"{trial}: another job is at it", flush=True)
            return
        module, _, function = self.runner.partition(":")
        run_trial = getattr(import_module(module), function)
        config = self.design.trial_config(arm, self.repeat, index)
        overrides = self.design.trial_overrides(arm, self.repeat, index)
        for _ in range(MAX_ATTEMPTS):
            try:
                summary = execute(run_trial, config, folder, overrides, self.group)
            except UserError:
                raise
            except Exception:
                traceback.print_exc()
                continue
            if summary["status"] == "preempted":
                _leave(summary.get("signal"))
            print(f"{trial}: {summary['status']}", flush=True)
            return


def _is_free(folder: Path, wait_s: float) -> bool:
    """Whether nobody is at the trial; a job that died on another host seems alive until its lock is stale."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            with RunFolder(folder).lock():
                return True
        except FolderError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_S)


def _leave(name: str | None) -> None:
    """End the job after its trial has written a checkpoint.

    At a time-out (USR2) submitit's own handler, which the trial had set aside, asks for the requeue. TERM
    comes from scancel, or from a requeue that is under way already: asking for one would revive a
    cancelled job.
    """
    if name == "SIGUSR2":
        os.kill(os.getpid(), signal.SIGUSR2)
    sys.exit(128 + signal.Signals[name or "SIGTERM"])
