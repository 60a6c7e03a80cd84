"""``hydra/launcher=slurm``: the workers of a sweep as arrays of Slurm jobs, through submitit.

Every job is a worker like those on one machine, and leaves everything in the run folders. Whether the command
that submitted them watches or has ended makes no difference to what is computed.
"""

import getpass
import hashlib
import re
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from adaecho.config.slurm import SlurmSettings
from adaecho.errors import UserError
from adaecho.records.environment import code_digest
from adaecho.records.files import folder_errors
from adaecho.records.lock import FolderInUseError
from adaecho.records.status import Status
from adaecho.search.design import TrialId
from adaecho.search.progress import SweepProgress
from adaecho.search.state import SweepState, read_refusal, record_failure
from adaecho.search.worker import MAX_ATTEMPTS, Attempts, Worker

POLL_S = (1.0, 10.0)  # at first and in the long run: squeue asks a controller that serves all users
_SILENT_POLLS = 60
LAST_TASKS_S = 60  # for a job's other tasks to end after the first has


class SlurmError(UserError):
    """Slurm refuses or doesn't answer; says what it said."""


class SlurmWorkers:
    """Workers of a sweep as Slurm jobs: one array of the same command.

    Args:
        state: of the sweep.
        settings: of the jobs.
        runner: ``module:function`` that runs a trial.
    """

    def __init__(
        self,
        state: SweepState,
        settings: SlurmSettings,
        runner: str = "",
    ) -> None:
        self._state, self._settings = state, settings
        self._name = job_name(state.folder)
        self._worker = Worker(
            str(state.folder.resolve()),
            code=code_digest(),
            runner=runner,
            ranks=settings.ranks,
            typed=tuple(state.design.named()),
        )
        self._in_vain, self._left = 0, -1

    def submit(self) -> int:
        """Submit as many workers as there is work for and none is queued or running; how many that were.

        Raises:
            SlurmError: sbatch or squeue fails.
        """
        left = self._still_to_run()
        self._in_vain = self._in_vain + 1 if len(left) == self._left else 0
        self._left = len(left)
        if self._in_vain >= MAX_ATTEMPTS:
            return 0
        settings = self._settings
        wanted = min(settings.array_parallelism, -(-len(left) // settings.trials_per_job))
        lacking = max(0, wanted - live_jobs(self._name))
        if lacking:
            self._submit_arrays(
                [replace(self._worker, number=n, num_workers=lacking) for n in range(lacking)]
            )
        return lacking

    def watch(self, progress: SweepProgress) -> None:
        """Wait until nothing is queued and nothing is missing that could be submitted once more.

        Raises:
            UserError: a trial met what only the user can mend.
            SlurmError: squeue did not answer for ``_SILENT_POLLS`` times in a row; the jobs go on.
        """
        started, silent = time.monotonic(), 0
        while True:
            # Before the folders: a job that ends in between has left its records.
            try:
                live, silent = live_jobs(self._name), 0
            except SlurmError:  # a controller that starts again, or is busy: not the end of a watch of days
                live, silent = 1, silent + 1
                if silent > _SILENT_POLLS:
                    raise
            progress.update(at_once=not live)
            if not live:
                if (refusal := read_refusal(self._state.folder, self._worker.launch)) is not None:
                    raise UserError(refusal)
                if not self.submit():
                    self._give_up()
                    return
            waited_s = time.monotonic() - started
            time.sleep(min(max(POLL_S[0], waited_s / 20), POLL_S[1]))

    def _still_to_run(self) -> list[TrialId]:
        """What is missing; without what this launch has tried as often as is worth while."""
        begun = self._left >= 0
        return [x for x in self._state.missing() if not (begun and self._has_failed(x))]

    def _has_failed(self, trial: TrialId) -> bool:
        """Whether it was tried as often as is worth while; where a rank died, less often till now."""
        attempts = Attempts(self._state.trial_folder(trial), self._worker.launch)
        return self._state.status(trial) == Status.FAILED and not 0 < attempts.count() < MAX_ATTEMPTS

    def _give_up(self) -> None:
        """Record why trials are missing whose jobs ended without a word, e.g. for want of memory."""
        for trial in self._still_to_run():
            why = f"its job ended without a result; see {self._state.folder / 'slurm'}"
            with suppress(FolderInUseError):  # another host died in it: the lock frees itself
                record_failure(self._state, trial, why)
            self._state.reread(trial)

    def _submit_arrays(self, workers: list[Worker]) -> None:
        executor, size = self._executor(), max_array_size()
        for first in range(0, len(workers), size):
            try:
                with executor.batch():
                    for worker in workers[first : first + size]:
                        executor.submit(worker)
            except (subprocess.CalledProcessError, RuntimeError, OSError) as error:
                raise SlurmError(
                    f"hydra/launcher=slurm: sbatch refuses: {_said(error)}; --cfg hydra shows what was asked"
                ) from error

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
        if settings.ranks > 1:
            optional |= _several_tasks(settings)
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


def _several_tasks(settings: SlurmSettings) -> dict[str, Any]:
    """What submitit is told of a job whose tasks are ranks.

    A task that ends may not take the others along at once, as some clusters have it: the first one may still
    have to ask for the requeue. One that hangs is ended ``LAST_TASKS_S`` after the first that ended. Since
    Slurm 22.05 srun does not take the CPUs per task over from sbatch.
    """
    return {
        "nodes": settings.nodes,
        "tasks_per_node": settings.tasks_per_node,
        "slurm_srun_args": [
            "--kill-on-bad-exit=0", f"--wait={LAST_TASKS_S}", f"--cpus-per-task={settings.cpus_per_task}",
        ],
    }  # fmt: skip


def job_name(folder: Path) -> str:
    """The name of all jobs of a sweep, and of no others': how squeue is asked for them."""
    return f"adaecho-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:10]}"


def live_jobs(name: str) -> int:
    """How many jobs with this name are queued or run."""
    command = [
        "squeue",
        "--noheader",
        "--array",
        f"--user={getpass.getuser()}",
        f"--name={name}",
        "--format=%i",
    ]
    return len(_ask(command).split())


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
