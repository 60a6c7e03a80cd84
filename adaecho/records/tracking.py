"""Exporting run folders to W&B, by a process of its own, so that nothing it does reaches a run.

Importing W&B and opening a first run costs seconds of processor time, its background service is known to
hang, and a crash of either must not cost a training run. So this side only names folders, over a pipe that
never blocks; ``exporter`` reads the folders (the truth) at a low priority. One such process serves all
trials of a worker: after the first, one costs it some hundredths of a second.
"""

import atexit
import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from adaecho.config.schema import TrackingConfig
from adaecho.errors import warn

# How long the end of this process may wait for the export; W&B gives up an upload before, and `wandb sync`
# can do it later.
FINISH_WAIT_S = 60.0


def export(
    tracking: TrackingConfig, folder: Path, *, group: str | None = None, name: str | None = None
) -> None:
    """Have a folder exported as one run, whose id stays in the folder; never raises and never waits.

    Call it while holding the folder's lock: the export is made when the lock has been released. W&B
    online also follows every evaluation until then.

    Args:
        tracking: where to, online or offline.
        folder: a run folder, or a sweep's (its design is the config, its outcome the summary).
        group: name shared by the runs of a sweep.
        name: shown for this run; by default a trial's arm/repeat/index in a group, else the folder's name.
    """
    if tracking.kind == "none":
        return
    order = {
        "folder": str(folder.resolve()),
        "mode": tracking.mode,
        "project": tracking.project,
        "entity": tracking.entity,
        "group": group,
        "name": name or "/".join(folder.parts[-3:] if group else folder.parts[-1:]),
    }
    _exporter.send(order)


def finish() -> None:
    """Wait for the export, for a bounded time; the exit of a process does it by itself.

    A worker of ``multiprocessing`` skips what was registered for its exit and calls this instead.
    """
    _exporter.finish()


class _Exporter:
    """The process that talks to the tracker, started when first needed, given up at the first trouble."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._given_up = False

    def send(self, order: dict[str, str | None]) -> None:
        """Pass a folder on, or give up: the pipe is full when the other side has hung for long."""
        if self._given_up:
            return
        self._given_up = True  # unless all of it goes through
        try:
            process = self._started()
            assert process.stdin is not None
            data = (json.dumps(order) + "\n").encode()
            self._given_up = os.write(process.stdin.fileno(), data) != len(data)
        except BrokenPipeError:
            pass  # it has said why before it ended
        except OSError as error:
            _warn("it does not answer" if isinstance(error, BlockingIOError) else str(error))

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._pid != os.getpid():  # a forked child needs one of its own
            path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
            self._process = subprocess.Popen(
                [sys.executable, "-m", "adaecho.records.exporter"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
                start_new_session=True,  # Ctrl-C is for the run; the export then still writes what there is
            )
            self._pid = os.getpid()
            assert self._process.stdin is not None
            descriptor = self._process.stdin.fileno()
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_NONBLOCK)
            atexit.register(self.finish)
        return self._process

    def finish(self) -> None:
        """Wait for what was sent, at most ``FINISH_WAIT_S``."""
        process, self._process = self._process, None
        if process is None or self._pid != os.getpid():
            return
        assert process.stdin is not None
        with suppress(OSError):
            # Not only the end of the pipe: processes forked from this one hold it open.
            os.write(process.stdin.fileno(), b"\n")
        process.stdin.close()
        try:
            if process.wait(FINISH_WAIT_S) != 0:
                _warn(f"its export ended with {process.returncode}")
        except subprocess.TimeoutExpired:
            _warn(f"not finished in {FINISH_WAIT_S:g} s; `wandb sync` can do it later")
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _warn(reason: str) -> None:
    warn(f"tracking: {reason}; the run folders are complete without it")


_exporter = _Exporter()
