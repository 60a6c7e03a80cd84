"""``hydra/launcher=slurm``: a sweep as arrays of Slurm jobs, through submitit.

Every job is independent: it runs its trials, replaces diverged ones of its search, and leaves everything
in the run folders. Whoever watches, or nobody, makes no difference to what is computed.
"""

import getpass
import hashlib
import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from adaecho.errors import ConfigError, FolderError, UserError
from adaecho.records.environment import environment
from adaecho.records.files import append, folder_errors, whole_lines, write_text
from adaecho.records.folder import RunFolder
from adaecho.search.design import TrialId
from adaecho.search.execute import MAX_ATTEMPTS, code_digest
from adaecho.search.job import TrialsJob
from adaecho.search.optuna_export import OptunaExporter
from adaecho.search.progress import Progress
from adaecho.search.state import FINISHED, SweepState
from adaecho.search.sweep import record_failure
from adaecho.search.worker import RUN_TRIAL

POLL_S = (1.0, 10.0)  # at first and in the long run: squeue asks a controller that serves all users
_JOBS = "slurm/jobs.jsonl"


class SlurmError(UserError):
    """Slurm refuses or doesn't answer; says what it said."""


@dataclass
class SlurmSettings:
    """How to ask for jobs; the fields of ``conf``'s ``hydra.launcher``, whose comments say what they mean."""

    partition: str | None
    account: str | None
    qos: str | None
    timeout_min: int
    cpus_per_task: int
    mem_gb: float
    gpus_per_node: int | None
    trials_per_job: int
    array_parallelism: int
    max_num_timeout: int
    signal_delay_s: int
    setup: list[str]
    additional_parameters: dict[str, Any]
    wait: bool

    def __post_init__(self) -> None:
        for name in ("timeout_min", "cpus_per_task", "trials_per_job", "array_parallelism"):
            if getattr(self, name) < 1:
                raise ConfigError(f"hydra.launcher.{name}={getattr(self, name)}: must be at least 1")
        for name in ("max_num_timeout", "signal_delay_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"hydra.launcher.{name}={getattr(self, name)}: must not be negative")
        if not self.mem_gb > 0:
            raise ConfigError(f"hydra.launcher.mem_gb={self.mem_gb}: must be positive")


class SlurmSweep:
    """Submits what is missing of a sweep and not already queued, and watches it.

    Args:
        state: of the sweep.
        settings: of the jobs.
        group: the tracker's name for the sweep.
        allow_changed_code: let jobs run although the code changed while they were queued.
        runner: ``module:function`` that runs a trial.
    """

    def __init__(
        self,
        state: SweepState,
        settings: SlurmSettings,
        group: str,
        allow_changed_code: bool = False,
        runner: str = RUN_TRIAL,
    ) -> None:
        self._state, self._settings, self._group, self._runner = state, settings, group, runner
        self._code = None if allow_changed_code else code_digest()
        self._submissions: Counter[TrialId] = Counter()
        self._name = job_name(state.folder)

    def submit(self) -> int:
        """Submit the missing trials that no live job has; how many jobs that made.

        Raises:
            SlurmError: sbatch or squeue fails.
        """
        waiting = self._not_queued(live_jobs(self._name))
        jobs = list(self._jobs(waiting))
        if jobs:
            self._submissions.update(trial for job in jobs for trial in job.trials())
            self._write_configs(jobs)
            self._submit_arrays(jobs)
        return len(jobs)

    def watch(self, progress: Progress) -> None:
        """Until nothing is queued and nothing is missing that could be submitted once more."""
        exporter = OptunaExporter(self._state)
        started = time.monotonic()
        known = {trial for trial in self._all() if self._status(trial) in FINISHED}
        while True:
            live = live_jobs(
                self._name
            )  # before the folders: a job that ends in between has left its records
            self._state.refresh()
            for trial in self._all():
                if self._status(trial) in FINISHED and trial not in known:
                    known.add(trial)
                    summary = self._state.search(trial).summaries[trial.index]
                    progress.ended(trial, summary.get("train_time_s", 0) + summary.get("eval_time_s", 0))
            progress.show(trial for trial in self._all() if self._status(trial) == "running")
            exporter.update()
            if not live and not self.submit():
                self._give_up()
                return
            waited_s = time.monotonic() - started
            time.sleep(min(max(POLL_S[0], waited_s / 20), POLL_S[1]))

    def _give_up(self) -> None:
        """Record why trials are missing whose jobs ended without a word, e.g. for want of memory."""
        for trial in self._state.missing():
            jobs = [job for job, trials in recorded_jobs(self._state.folder) if trial in trials]
            log = self._state.folder / "slurm" / f"{jobs[-1]}_0_log.err" if jobs else "sbatch"
            with suppress(FolderError):  # another host died in it: the lock frees itself
                record_failure(self._state.trial_folder(trial), f"its job ended without a result; see {log}")
            self._state.reread(trial)

    def _all(self) -> list[TrialId]:
        return [
            TrialId(name, repeat, index)
            for (name, repeat), search in self._state.searches.items()
            for index in range(search.num_wanted())
        ]

    def _status(self, trial: TrialId) -> str | None:
        return self._state.search(trial).status(trial.index)

    def _not_queued(self, live: set[str]) -> list[TrialId]:
        queued = {
            trial for job, trials in recorded_jobs(self._state.folder) if job in live for trial in trials
        }
        searches = {(trial.arm, trial.repeat) for trial in queued}
        return [
            trial
            for trial in self._state.missing()
            if trial not in queued
            # A live job of the same search sees to the points that replace diverged ones.
            and not (
                trial.index >= self._state.search(trial).trials and (trial.arm, trial.repeat) in searches
            )
            and self._submissions[trial] < MAX_ATTEMPTS
            # Its job has tried as often as is worth while, and said so.
            and not (self._submissions[trial] and self._status(trial) == "failed")
        ]

    def _jobs(self, waiting: Iterable[TrialId]) -> Iterator[TrialsJob]:
        arms = {arm.name: arm for arm in self._state.design.arms}
        indices: dict[tuple[str, int], list[int]] = {}
        for trial in waiting:
            indices.setdefault((trial.arm, trial.repeat), []).append(trial.index)
        for (name, repeat), left in indices.items():
            design = replace(self._state.design, arms=(arms[name],), _cache={})
            for chunk in _chunks(left, self._settings.trials_per_job):
                folder = str(self._state.folder.resolve())
                yield TrialsJob(folder, design, repeat, tuple(chunk), self._group, self._code, self._runner)

    def _write_configs(self, jobs: list[TrialsJob]) -> None:
        """The resolved config of every trial, now: nothing that is edited later reaches a queued job."""
        where = environment()
        for job in jobs:
            for trial in job.trials():
                run = RunFolder(self._state.trial_folder(trial))
                if (run.path / "config.yaml").exists():
                    continue  # a job that died on another host may still seem to be at it
                arm = job.design.arms[0]
                config = job.design.trial_config(arm, trial.repeat, trial.index)
                with run.lock():
                    run.start(config, job.design.trial_overrides(arm, trial.repeat, trial.index), where)

    def _submit_arrays(self, jobs: list[TrialsJob]) -> None:
        executor = self._executor()
        _end_torn_line(self._state.folder / _JOBS)
        for chunk in _chunks(jobs, max_array_size()):
            try:
                with executor.batch():
                    submitted = [executor.submit(job) for job in chunk]
            except (subprocess.CalledProcessError, RuntimeError, OSError) as error:
                raise SlurmError(
                    f"hydra/launcher=slurm: sbatch refuses: {_said(error)}; --cfg hydra shows what was asked"
                ) from error
            for job, handle in zip(chunk, submitted, strict=True):
                record = {"job": str(handle.job_id), "trials": [str(trial) for trial in job.trials()]}
                append(self._state.folder / _JOBS, json.dumps(record) + "\n")

    def _executor(self) -> Any:
        import submitit

        settings, logs = self._settings, self._state.folder.resolve() / "slurm"
        with folder_errors(logs):
            logs.mkdir(parents=True, exist_ok=True)
        executor = submitit.AutoExecutor(
            folder=logs, cluster="slurm", slurm_max_num_timeout=settings.max_num_timeout
        )
        optional = {
            "slurm_partition": settings.partition,
            "slurm_account": settings.account,
            "slurm_qos": settings.qos,
            "gpus_per_node": settings.gpus_per_node,
            "slurm_setup": list(settings.setup) or None,
        }
        executor.update_parameters(
            name=self._name,
            timeout_min=settings.timeout_min,
            cpus_per_task=settings.cpus_per_task,
            mem_gb=settings.mem_gb,
            slurm_array_parallelism=settings.array_parallelism,
            slurm_signal_delay_s=settings.signal_delay_s,
            slurm_additional_parameters={"requeue": True, **settings.additional_parameters},
            **{key: value for key, value in optional.items() if value is not None},
        )
        return executor


def job_name(folder: Path) -> str:
    """The same for all jobs of a sweep and for no others': how squeue is asked for them."""
    return f"adaecho-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:10]}"


def recorded_jobs(folder: Path) -> list[tuple[str, list[TrialId]]]:
    """Every job that was ever submitted for the sweep, with its trials."""
    path = folder / _JOBS
    records = []
    for line in whole_lines(path):
        record = json.loads(line)
        records.append((record["job"], [TrialId.parse(trial) for trial in record["trials"]]))
    return records


def _end_torn_line(path: Path) -> None:
    """Drop what a launcher had begun to write when it was killed."""
    lines = whole_lines(path)
    if path.exists() and path.stat().st_size > sum(map(len, lines)):
        write_text(path, b"".join(lines).decode())


def live_jobs(name: str) -> set[str]:
    """Ids of the jobs with this name that are queued or run."""
    command = [
        "squeue",
        "--noheader",
        "--array",
        f"--user={getpass.getuser()}",
        f"--name={name}",
        "--format=%i",
    ]
    return set(_ask(command).split())


def max_array_size() -> int:
    """How many tasks one array may have here: MaxArraySize is above the highest task number."""
    found = re.search(r"MaxArraySize\s*=\s*(\d+)", _ask(["scontrol", "show", "config"]))
    return max(1, int(found[1]) - 1) if found else 1000


def _ask(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SlurmError(
            f"hydra/launcher=slurm: {command[0]} fails: {_said(error)}; is this a Slurm host?"
        ) from error


def _said(error: Exception) -> str:
    output = getattr(error, "stderr", None) or str(error)
    return (output.decode(errors="replace") if isinstance(output, bytes) else output).strip()


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
