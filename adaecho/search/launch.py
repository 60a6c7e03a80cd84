"""Start the workers of a sweep, either as processes on this machine or as an array of Slurm jobs (submitit).

Slurm jobs keep running if the command that submitted them ends.
"""

import getpass
import hashlib
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from adaecho.config.slurm import SlurmSettings
from adaecho.errors import UserError, warn
from adaecho.search.worker import MAX_ATTEMPTS, Worker

CONTEXT: Any = multiprocessing.get_context("spawn")
POLL_S = 10.0  # time between calls of squeue, which should be rare because they burden Slurm's controller
_GRACE_S = 10.0  # time for a trial to finish its step and write a checkpoint
_LOOK_EVERY_S = 0.5
_LOG_TAIL = 2000
_LAST_TASKS_S = 60  # time for the other tasks of a job to end after the first one has ended


class WorkerError(UserError):
    """Workers cannot be started, or they die repeatedly."""


def run_here(worker: Worker, number: int, threads: int, look: Callable[[], int]) -> None:
    """Run worker processes on this machine until no trials are left, and restart workers that die.

    Args:
        number: the number of processes.
        threads: the number of threads that each process may use for linear algebra.
        look: a function that is called about twice per second and returns the number of ended trials.

    Raises:
        UserError: a trial has an error that only the user can fix. Other trials write a checkpoint and stop.
        WorkerError: workers died repeatedly without ending a trial.
        KeyboardInterrupt: a worker received a signal.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)  # workers inherit the variables, which libraries read at import
    (Path(worker.folder) / "workers").mkdir(exist_ok=True)
    running: dict[int, tuple[Any, Connection]] = {}
    waiting, ended, deaths = list(range(number)), 0, 0
    try:
        while running or waiting:
            for index in waiting:
                running[index] = _start(worker, index)
            waiting = []
            wait([process.sentinel for process, _ in running.values()], _LOOK_EVERY_S)
            before, ended = ended, look()
            deaths = deaths if ended == before else 0
            for index, (process, result) in list(running.items()):
                if process.is_alive():
                    continue
                del running[index]
                if (died := _cause_of_death(process, result)) is None:
                    continue
                deaths += 1
                log = _log(worker, index)
                message = f"search.workers: a worker died ({died}); see {log}"
                if deaths > MAX_ATTEMPTS * number:
                    raise WorkerError(f"{message}:\n{log.read_text(errors='replace')[-_LOG_TAIL:].strip()}")
                warn(message)
                waiting.append(index)
        look()
    finally:
        for process, _ in running.values():
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process, _ in running.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()


def _log(worker: Worker, number: int) -> Path:
    return Path(worker.folder) / "workers" / f"worker-{number}.log"


def _start(worker: Worker, number: int) -> tuple[Any, Connection]:
    _log(worker, number).touch()
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_run, args=(worker, number, sender))
    process.start()
    sender.close()
    return process, receiver


def _cause_of_death(process: Any, result: Connection) -> str | None:
    try:
        message = result.recv()
    except EOFError:
        process.join()
        if process.exitcode > 128:
            raise KeyboardInterrupt from None
        return f"exit code {process.exitcode}; -9 often means lack of memory"
    if message is not None:
        raise UserError(message)
    return None


def _run(worker: Worker, number: int, sender: Connection) -> None:
    with _log(worker, number).open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    sender.send(worker(number))


def _end_with_launcher() -> None:
    """End this worker if the process that launched it has ended, so that its run folder is unlocked."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def submit(folder: Path, worker: Worker, settings: SlurmSettings, missing: int) -> int:
    """Submit the Slurm jobs that are needed in addition to live jobs, and return their number.

    Args:
        missing: the number of trials that remain to be run.
    """
    wanted = min(settings.array_parallelism, -(-missing // settings.trials_per_job))
    lacking = max(0, wanted - live_jobs(folder))
    if lacking:
        import submitit

        logs = folder.resolve() / "slurm"
        logs.mkdir(exist_ok=True)
        executor = submitit.AutoExecutor(logs, "slurm", slurm_max_num_timeout=settings.max_num_timeout)
        executor.update_parameters(name=job_name(folder), **_job_parameters(settings))
        try:
            executor.map_array(worker, range(lacking))
        except (subprocess.CalledProcessError, RuntimeError, OSError) as error:
            raise _slurm_error("sbatch", error) from error
    return lacking


def _job_parameters(settings: SlurmSettings) -> dict[str, Any]:
    """Return the settings of a job in the form that submitit expects."""
    given = asdict(settings)
    of_slurm = ("partition", "account", "qos", "setup", "array_parallelism", "signal_delay_s")
    job = {key: given[key] for key in ("timeout_min", "cpus_per_task", "mem_gb", "gpus_per_node")}
    job |= {f"slurm_{key}": given[key] for key in of_slurm}
    job["slurm_additional_parameters"] = {"requeue": True, **settings.additional_parameters}
    if settings.ranks > 1:
        cpus = f"--cpus-per-task={settings.cpus_per_task}"
        job |= {"nodes": settings.nodes, "tasks_per_node": settings.tasks_per_node}
        # When one rank ends, Slurm must not kill the others, because rank 0 may still requeue the job. Since
        # Slurm 22.05, srun does not inherit the number of CPUs from sbatch.
        job["slurm_srun_args"] = ["--kill-on-bad-exit=0", f"--wait={_LAST_TASKS_S}", cpus]
    return {key: value for key, value in job.items() if value not in (None, [])}


def watch(folder: Path, look: Callable[[], int]) -> None:
    """Wait until no jobs of a sweep are left, and regularly call ``look`` to show progress."""
    live = 1
    while live:
        time.sleep(POLL_S)
        with suppress(WorkerError):  # squeue fails while Slurm's controller is busy or restarting
            live = live_jobs(folder)
        look()


def job_name(folder: Path) -> str:
    """Return the name that all jobs of a sweep share."""
    return f"adaecho-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:10]}"


def live_jobs(folder: Path) -> int:
    """Return the number of jobs of a sweep that are queued or running."""
    filters = [f"--user={getpass.getuser()}", f"--name={job_name(folder)}"]
    command = ["squeue", "--noheader", "--array", *filters, "--format=%i"]
    try:
        return len(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    except (OSError, subprocess.CalledProcessError) as error:
        raise _slurm_error("squeue", error) from error


def _slurm_error(command: str, error: Exception) -> WorkerError:
    reason = getattr(error, "stderr", "") or error
    return WorkerError(f"hydra/launcher=slurm: {command} failed: {reason}; is this a Slurm host?")
