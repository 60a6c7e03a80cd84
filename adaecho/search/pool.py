"""Local worker processes that stay alive between trials."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from adaecho.errors import UserError
from adaecho.records.files import folder_errors
from adaecho.search.worker import RUN_TRIAL, Job

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_GRACE_S = 10.0  # a signalled trial ends its step and writes a checkpoint
_LOG_TAIL = 2000


class WorkerError(UserError):
    """A worker process that can't start."""


@dataclass
class Ended:
    """What became of a job: a trial's status, or an error instead of one.

    Attributes:
        users: the error is the user's to mend, so trying again would not help.
    """

    job: Job
    status: str | None = None
    error: str | None = None
    users: bool = False


class Pool:
    """``num_workers`` processes, each running at most one trial.

    A process that dies in a trial (out of memory, a crash in native code) is replaced, and its trial ends
    with an error.

    Args:
        num_workers: how many.
        threads: of each for linear algebra; more than the cores there are would slow all.
        log_folder: gets ``worker-<n>.log`` with whatever the trials print.
        runner: ``module:function`` that runs a trial.
    """

    def __init__(self, num_workers: int, *, threads: int, log_folder: Path, runner: str = RUN_TRIAL) -> None:
        self._selector = selectors.DefaultSelector()
        self._threads, self._log_folder, self._runner = threads, log_folder, runner
        with folder_errors(log_folder):
            log_folder.mkdir(parents=True, exist_ok=True)
        self._workers = [self._start(number) for number in range(num_workers)]

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._close()
        else:
            self._interrupt()

    @property
    def num_free(self) -> int:
        """How many jobs can be submitted; a worker that is still starting takes one, too."""
        return sum(worker.job is None for worker in self._workers)

    def submit(self, job: Job) -> None:
        """Hand a job to a free worker; there must be one."""
        worker = next(worker for worker in self._workers if worker.job is None)
        worker.job = job
        worker.send(job)

    def wait(self, timeout_s: float) -> list[Ended]:
        """The jobs that ended, after the first or after ``timeout_s``.

        Raises:
            WorkerError: a worker died before it was ready: nothing will run here.
        """
        ended: list[Ended] = []
        for key, _ in self._selector.select(timeout_s):
            worker: _Worker = key.data
            for answer in worker.receive():
                if answer.get("ready"):
                    worker.is_ready = True
                else:
                    assert worker.job is not None
                    ended.append(Ended(worker.job, **answer))
                    worker.job = None
            if worker.is_gone:
                ended += self._replace(worker)
        return ended

    def _start(self, number: int) -> "_Worker":
        log = self._log_folder / f"worker-{number}.log"
        worker = _Worker(number, log, self._runner, self._threads)
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)
        return worker

    def _replace(self, worker: "_Worker") -> list[Ended]:
        self._selector.unregister(worker.answers)
        code = worker.reap()
        if not worker.is_ready:
            tail = worker.log.read_text(errors="replace")[-_LOG_TAIL:].strip()
            raise WorkerError(
                f"search.workers: a worker ended before its first trial (exit code {code}):\n{tail}"
            )
        self._workers[self._workers.index(worker)] = self._start(worker.number)
        if worker.job is None:
            return []
        why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        hint = "; often memory: fewer search.workers need less" if code == -signal.SIGKILL else ""
        return [Ended(worker.job, error=f"its process died ({why}{hint}); see {worker.log}")]

    def _close(self) -> None:
        for worker in self._workers:
            worker.send(None)
        self._reap_all()

    def _interrupt(self) -> None:
        """Let running trials write a checkpoint; whoever takes too long is killed."""
        try:
            for worker in self._workers:
                worker.signal(signal.SIGTERM if worker.is_ready else signal.SIGKILL)
            deadline = time.monotonic() + _GRACE_S
            while any(worker.job for worker in self._workers) and time.monotonic() < deadline:
                with suppress(WorkerError):
                    self._drain(timeout_s=0.1)
        finally:
            for worker in self._workers:
                worker.signal(signal.SIGKILL)
            self._reap_all()

    def _drain(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            worker: _Worker = key.data
            if worker.receive() or worker.is_gone:
                worker.job = None
            if worker.is_gone:
                self._selector.unregister(worker.answers)

    def _reap_all(self) -> None:
        for worker in self._workers:
            worker.reap()
        self._selector.close()


class _Worker:
    """One process and both ends of the talk with it."""

    def __init__(self, number: int, log: Path, runner: str, threads: int) -> None:
        self.number, self.log = number, log
        self.job: Job | None = None
        self.is_ready = False
        self.is_gone = False
        self._unread = b""
        environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads))}
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "adaecho.search.worker", runner, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, and a kill the worker's children
            )
        assert self._process.stdout is not None
        self.answers = self._process.stdout

    def send(self, job: Job | None) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died: its answers' end says so, too
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self) -> list[dict[str, Any]]:
        """Whole answers that have arrived; sets ``is_gone`` at the end of the stream."""
        data = os.read(self.answers.fileno(), 65536)
        self.is_gone = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def signal(self, number: int) -> None:
        """To the process alone, or with SIGKILL to all it has started."""
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def reap(self) -> int:
        """Wait for the end of the process; its exit code."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            code = self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self.answers.close()
        return code
