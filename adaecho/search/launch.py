"""Workers of a sweep: as processes on this machine, or as an array of Slurm jobs through submitit.

Every one leaves everything in the run folders. Whether the command that started jobs watches or has ended
makes no difference to what is computed.
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
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from adaecho.config.slurm import SlurmSettings
from adaecho.errors import UserError, warn
from adaecho.search.worker import MAX_ATTEMPTS, Worker

CONTEXT: Any = multiprocessing.get_context("spawn")
POLL_S = 10.0  # squeue asks a controller that serves all users
_SILENT_POLLS = 60
_GRACE_S = 10.0  # a signalled trial ends its step and writes a checkpoint
_LOOK_EVERY_S = 0.5
_LOG_TAIL = 2000
_LAST_TASKS_S = 60  # for a job's other tasks to end after the first has


class WorkerError(UserError):
    """Workers can't be started, or die before they get anywhere."""


def run_here(worker: Worker, number: int, threads: int, look: Callable[..., int]) -> None:
    """Run so many workers until none finds anything left to do; they end with this process.

    Args:
        worker: what each is.
        number: of workers; what their trials print goes to ``workers/worker-<n>.log`` in the sweep's folder.
        threads: of each for linear algebra; more than the cores there are would slow all.
        look: called about twice a second; tells how many trials have ended.

    Raises:
        UserError: a trial met something that only the user can mend; running ones are checkpointed.
        WorkerError: workers die again and again without ending a trial.
        KeyboardInterrupt: a worker was told to end.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)  # which they inherit, and libraries read as they are imported
    (Path(worker.folder) / "workers").mkdir(exist_ok=True)
    worker = replace(worker, num_workers=number)
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
                if (died := _how_it_died(process, result)) is None:
                    continue
                deaths += 1
                log = _log(worker, index)
                told = f"search.workers: a worker died ({died}); see {log}"
                if deaths > MAX_ATTEMPTS * number:
                    raise WorkerError(f"{told}:\n{log.read_text(errors='replace')[-_LOG_TAIL:].strip()}")
                warn(told)
                waiting.append(index)
        look(at_once=True)
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


def _how_it_died(process: Any, result: Connection) -> str | None:
    try:
        message = result.recv()
    except EOFError:
        process.join()
        if process.exitcode > 128:
            raise KeyboardInterrupt from None
        if process.exitcode >= 0:
            return f"exit code {process.exitcode}"
        of_memory = ", often for want of memory" if process.exitcode == -signal.SIGKILL else ""
        return f"killed by signal {-process.exitcode}{of_memory}"
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
    """Wait until the launcher is gone; a trial left behind would go on unseen and hold its folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def submit(folder: Path, worker: Worker, settings: SlurmSettings, missing: int) -> int:
    """Submit as many jobs as there is work for and none is queued or running; how many that were.

    Raises:
        WorkerError: sbatch or squeue fails; says what it said.
    """
    wanted = min(settings.array_parallelism, -(-missing // settings.trials_per_job))
    lacking = max(0, wanted - live_jobs(folder))
    if lacking:
        import submitit

        logs = folder.resolve() / "slurm"
        logs.mkdir(exist_ok=True)
        executor = submitit.AutoExecutor(logs, "slurm", slurm_max_num_timeout=settings.max_num_timeout)
        executor.update_parameters(name=job_name(folder), **_asked_for(settings))
        try:
            executor.map_array(replace(worker, num_workers=lacking), range(lacking))
        except (subprocess.CalledProcessError, RuntimeError, OSError) as error:
            raise WorkerError(
                f"hydra/launcher=slurm: sbatch refuses: {_said(error)}; --cfg hydra shows what was asked"
            ) from error
    return lacking


def _asked_for(settings: SlurmSettings) -> dict[str, Any]:
    """What submitit is told of a job.

    Of one whose tasks are ranks: a task that ends may not take the others along at once, as some clusters
    have it, for the first one may still have to ask for the requeue. Since Slurm 22.05 srun does not take the
    CPUs per task over from sbatch.
    """
    given = asdict(settings)
    of_slurm = ("partition", "account", "qos", "setup", "array_parallelism", "signal_delay_s")
    asked = {key: given[key] for key in ("timeout_min", "cpus_per_task", "mem_gb", "gpus_per_node")}
    asked |= {f"slurm_{key}": given[key] for key in of_slurm}
    asked["slurm_additional_parameters"] = {"requeue": True, **settings.additional_parameters}
    if settings.ranks > 1:
        cpus = f"--cpus-per-task={settings.cpus_per_task}"
        asked |= {"nodes": settings.nodes, "tasks_per_node": settings.tasks_per_node}
        asked["slurm_srun_args"] = ["--kill-on-bad-exit=0", f"--wait={_LAST_TASKS_S}", cpus]
    return {key: value for key, value in asked.items() if value not in (None, [])}


def watch(folder: Path, look: Callable[..., int]) -> None:
    """Wait until no job of a sweep is queued or running.

    Raises:
        WorkerError: squeue did not answer for ``_SILENT_POLLS`` times in a row; the jobs go on.
    """
    silent, live = 0, 1
    while live:
        time.sleep(POLL_S)
        try:
            live, silent = live_jobs(folder), 0
        except WorkerError:  # a controller that starts again, or is busy: not the end of a watch of days
            silent += 1
            if silent > _SILENT_POLLS:
                raise
        look(at_once=True)


def job_name(folder: Path) -> str:
    """The name of all jobs of a sweep, and of no others': how squeue is asked for them."""
    return f"adaecho-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:10]}"


def live_jobs(folder: Path) -> int:
    """How many jobs of a sweep are queued or run."""
    of_whom = [f"--user={getpass.getuser()}", f"--name={job_name(folder)}"]
    command = ["squeue", "--noheader", "--array", *of_whom, "--format=%i"]
    try:
        return len(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    except (OSError, subprocess.CalledProcessError) as error:
        raise WorkerError(
            f"hydra/launcher=slurm: squeue fails: {_said(error)}; is this a Slurm host?"
        ) from error


def _said(error: Exception) -> str:
    output = getattr(error, "stderr", None) or str(error)
    return (output.decode(errors="replace") if isinstance(output, bytes) else output).strip()
