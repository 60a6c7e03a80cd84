"""Workers of a sweep on this machine: how many it can take, and looking after them."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from adaecho.echo.memory.budget import free_bytes
from adaecho.errors import UserError, warn
from adaecho.records.files import folder_errors
from adaecho.search.progress import SweepProgress
from adaecho.search.sweep import read_refusal
from adaecho.search.worker import BEGUN, RUN_TRIAL

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_GRACE_S = 10.0  # a signalled trial ends its step and writes a checkpoint
_POLL_S = 0.1
_LOG_TAIL = 2000
MAX_STARTS = 3  # of a worker that ends before it begins a trial
WORKER_BYTES = 400 << 20  # of an interpreter that has imported torch, before any data (Linux, torch 2.8)


class WorkerError(UserError):
    """A worker process that can't start."""


def affordable(workers: int) -> tuple[int, str | None]:
    """How many of so many workers this machine takes, and if fewer, a line that says why."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = free_bytes()
    most = cores if free is None else max(1, min(cores, free // WORKER_BYTES))
    if workers <= most:
        return workers, None
    memory = "" if free is None else f" and {free / 2**30:.1f} GiB of free memory"
    return most, (
        f"search.workers={workers}: this machine has {cores} cores{memory}; {most} run. On a cluster: "
        "hydra/launcher=slurm"
    )


class LocalWorkers:
    """Worker processes that end with this one; one that dies in a trial is replaced.

    Args:
        folder: of the sweep; its ``workers/`` gets ``worker-<n>.log`` with whatever the trials print.
        threads: of each for linear algebra; more than the cores there are would slow all.
        runner: ``module:function`` that runs a trial.
    """

    def __init__(self, folder: Path, *, threads: int, runner: str = RUN_TRIAL) -> None:
        self._folder, self._runner = folder, runner
        self._environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads))}
        self._launch = uuid.uuid4().hex[:8]
        self._number = 0
        self._workers: dict[int, _Process] = {}
        self._told: bytes | None = None
        self._starts: Counter[int] = Counter()  # by index, that came to no trial

    def __enter__(self) -> "LocalWorkers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupt()

    def start(self, number: int) -> None:
        """Have so many workers at least: start what lacks."""
        self._number = number
        for index in range(len(self._workers), number):
            self._workers[index] = self._start(index)

    def tell(self, typed: Sequence[str], urls: Sequence[str]) -> None:
        """Let the workers begin: with what the user has typed and the design doesn't hold, or not in full.

        Over a pipe, which no other process and no file sees.

        Args:
            typed: see ``config.schema.from_plain``.
            urls: see ``masking.know``.
        """
        self._told = json.dumps({"typed": typed, "urls": urls}).encode() + b"\n"
        for worker in self._workers.values():
            worker.tell(self._told)

    def keep(self, number: int) -> None:
        """Have so many workers at most: end what is too many, in mid-trial if they have begun one."""
        for index in range(number, len(self._workers)):
            self._workers.pop(index).kill()

    def watch(self, progress: SweepProgress) -> None:
        """Wait until every worker has found nothing left to do.

        Raises:
            WorkerError: all died ``MAX_STARTS`` times before they began a trial: nothing will run here.
            UserError: a trial met something that only the user can mend; running ones are checkpointed.
            KeyboardInterrupt: a worker was told to end.
        """
        while self._workers:
            for index, worker in list(self._workers.items()):
                code = worker.poll()
                if code is not None:
                    del self._workers[index]
                    if code != 0 and self._may_go_on(index, worker, code):
                        self._workers[index] = self._start(index)
            progress.update()
            time.sleep(_POLL_S)
        progress.update(at_once=True)

    def _may_go_on(self, index: int, worker: "_Process", code: int) -> bool:
        """Whether another worker of its number might get on; raises where none can go on at all."""
        said = worker.said()
        if code == 2:  # without a record of why where the disk is full
            raise UserError(read_refusal(self._folder, self._launch) or said[-_LOG_TAIL:].strip())
        if code > 128:
            raise KeyboardInterrupt
        if BEGUN in said:
            how = f"ended in mid-trial ({_how(code)})"
            warn(f"search.workers: a worker {how}; another goes on; see {worker.log}")
            self._starts[index] = 0
            return True
        self._starts[index] += 1
        if self._starts[index] < MAX_STARTS:
            return True
        reason = f"search.workers: a worker ended {MAX_STARTS} times before its first trial ({_how(code)})"
        if last := said[-_LOG_TAIL:].strip():
            reason = f"{reason}:\n{last}"
        if not self._workers:
            raise WorkerError(reason)
        warn(f"{reason}\nthe others go on without it")
        return False

    def _start(self, index: int) -> "_Process":
        process = _Process(
            [
                *(sys.executable, "-m", "adaecho.search.worker", str(self._folder)),
                *("--number", str(index), "--num-workers", str(self._number), "--launch", self._launch),
                *("--launcher", str(os.getpid()), "--runner", self._runner),
            ],
            self._folder / "workers" / f"worker-{index}.log",
            self._environment,
        )
        if self._told is not None:
            process.tell(self._told)
        return process

    def _interrupt(self) -> None:
        """Let running trials write a checkpoint; a worker that takes too long is killed."""
        try:
            for worker in self._workers.values():
                worker.terminate()
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline and any(x.poll() is None for x in self._workers.values()):
                time.sleep(_POLL_S)
        finally:
            for worker in self._workers.values():
                worker.kill()


def _how(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"exit code {code}"
    return f"killed by signal {-code}" + (", often for want of memory" if code == -signal.SIGKILL else "")


class _Process:
    """A worker and its ``log``."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        with folder_errors(log.parent):
            log.parent.mkdir(parents=True, exist_ok=True)
            self.log, self._begins = log, log.stat().st_size if log.exists() else 0
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the launcher alone, a kill all its children
                )

    def poll(self) -> int | None:
        return self._process.poll()

    def tell(self, line: bytes) -> None:
        """What it waits for."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has died
            self._process.stdin.write(line)
            self._process.stdin.close()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """Kill it with all that it has started."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(OSError):  # it may never have been told
            self._process.stdin.close()

    def said(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._begins)
            return file.read().decode(errors="replace")
