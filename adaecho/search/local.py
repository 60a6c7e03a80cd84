"""Workers of a sweep on this machine: how many it can take, and looking after them."""

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
from adaecho.masking import VARIABLE
from adaecho.records.files import folder_errors, open_to_append
from adaecho.search.progress import SweepProgress
from adaecho.search.state import read_refusal
from adaecho.search.worker import BEGUN

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
        number: of workers.
        threads: of each for linear algebra; more than the cores there are would slow all.
        typed: see ``config.schema.from_plain``.
        urls: see ``masking.know``.
        runner: ``module:function`` that runs a trial.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        *,
        threads: int,
        typed: Sequence[str] = (),
        urls: Sequence[str] = (),
        runner: str = "",
    ) -> None:
        self._folder, self._launch = folder, uuid.uuid4().hex[:8]
        self._environment = {
            **os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads)), VARIABLE: " ".join(urls)
        }  # fmt: skip
        self._command = [
            *(
                sys.executable,
                *(["-P"] if sys.flags.safe_path else []),
                "-m",
                "adaecho.search.worker",
                str(folder),
                "--num-workers",
                str(number),
            ),
            *("--launch", self._launch, "--launcher", str(os.getpid()), "--runner", runner),
            *(f"--task={name}" for name in typed),
        ]
        with folder_errors(folder / "workers"):
            (folder / "workers").mkdir(exist_ok=True)
        self._begins: dict[int, int] = {}  # of what a worker says, in its log
        self._starts: Counter[int] = Counter()  # that came to no trial
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        for index in range(number):
            self._start(index)

    def __enter__(self) -> "LocalWorkers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let running trials write a checkpoint; a worker that takes too long is killed."""
        try:
            for worker in self._workers.values():
                worker.terminate()
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline and any(x.poll() is None for x in self._workers.values()):
                time.sleep(_POLL_S)
        finally:
            for worker in self._workers.values():
                with suppress(OSError):
                    os.killpg(worker.pid, signal.SIGKILL)  # with all that it has started
                worker.wait()

    def watch(self, progress: SweepProgress) -> None:
        """Wait until every worker has found nothing left to do.

        Raises:
            WorkerError: all ended ``MAX_STARTS`` times before they began a trial: nothing will run here.
            UserError: a trial met something that only the user can mend; running ones are checkpointed.
            KeyboardInterrupt: a worker was told to end.
        """
        while self._workers:
            for index, worker in list(self._workers.items()):
                code = worker.poll()
                if code is not None:
                    del self._workers[index]
                    if code != 0:
                        self._go_on(index, code)
            progress.update()
            time.sleep(_POLL_S)
        progress.update(at_once=True)

    def _go_on(self, index: int, code: int) -> None:
        """Start another worker in place of one that has ended, unless that came to no trial too often."""
        with self._log(index).open("rb") as file:
            file.seek(self._begins[index])
            said = file.read().decode(errors="replace")
        if code == 2:  # without a record of why where the disk is full
            raise UserError(read_refusal(self._folder, self._launch) or said[-_LOG_TAIL:].strip())
        if code > 128:
            raise KeyboardInterrupt
        how = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
        how += ", often for want of memory" if code == -signal.SIGKILL else ""
        if BEGUN in said:
            log = self._log(index)
            warn(f"search.workers: a worker ended in mid-trial ({how}); another goes on; see {log}")
            self._starts[index] = 0
        elif self._starts[index] == MAX_STARTS:
            reason = f"search.workers: a worker ended {MAX_STARTS} times before its first trial ({how})"
            if last := said[-_LOG_TAIL:].strip():
                reason = f"{reason}:\n{last}"
            if not self._workers:
                raise WorkerError(reason)
            warn(f"{reason}\nthe others go on without it")
            return
        self._start(index)

    def _start(self, index: int) -> None:
        self._starts[index] += 1
        with folder_errors(self._log(index)), os.fdopen(open_to_append(self._log(index)), "ab") as log:
            self._begins[index] = log.tell()
            self._workers[index] = subprocess.Popen(
                [*self._command, "--number", str(index)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, a kill all its children
            )

    def _log(self, index: int) -> Path:
        return self._folder / "workers" / f"worker-{index}.log"
