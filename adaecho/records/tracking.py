"""Exporting run folders to W&B, by a process of its own, so that nothing it does reaches a run.

Importing W&B and opening a first run costs seconds of processor time, its background service is known to
hang, and a crash of either must not cost a training run. So this side only names a folder, a run's or a
sweep's, to ``exporter``, which follows it (the truth) at a low priority. Of a sweep it serves all trials:
after the first, one costs it some hundredths of a second.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adaecho.config.schema import TrackingConfig
from adaecho.errors import warn

# How long the end of a command may wait for the export; W&B gives up an upload before, and `wandb sync` can
# do it later.
FINISH_WAIT_S = 60.0


@contextmanager
def exported(tracking: TrackingConfig, folder: Path) -> Iterator[None]:
    """Have a folder exported while the block runs, and for a bounded time after it; never raises of its own.

    A run is one in W&B, whose id stays in its folder: online every evaluation is followed, offline it is
    written at the end. Of a sweep each trial is one, exported when its lock has been released, and the sweep
    itself another (its design is the config, its outcome the summary).

    Args:
        tracking: where to, online or offline.
        folder: a run's, or a sweep's with its design.
    """
    if tracking.kind == "none":
        yield
        return
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    # -P: the current folder may be a run's, with a wandb/ of its own to import.
    program = [sys.executable, "-P", "-m", "adaecho.records.exporter"]
    command = [*program, str(folder), tracking.mode, tracking.project]
    try:
        process = subprocess.Popen(
            [*command, *([tracking.entity] if tracking.entity else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
            start_new_session=True,  # Ctrl-C is for the run; the export then still writes what there is
        )
    except OSError as error:
        _warn(str(error))
        yield
        return
    try:
        yield
    finally:
        _finish(process)


def _finish(process: "subprocess.Popen[bytes]") -> None:
    """Wait for what is left to export, at most ``FINISH_WAIT_S``."""
    try:
        # Not only the end of the pipe: processes forked from this one hold it open.
        process.communicate(b"\n", FINISH_WAIT_S)
        if process.returncode:
            _warn(f"its export ended with {process.returncode}")
    except subprocess.TimeoutExpired:
        _warn(f"not finished in {FINISH_WAIT_S:g} s; `wandb sync` can do it later")
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _warn(reason: str) -> None:
    warn(f"tracking: {reason}; the run folders are complete without it")
