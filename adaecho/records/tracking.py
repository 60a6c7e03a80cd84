"""The W&B mirror of run folders: kept by a process of its own, so that nothing it does can reach a run.

Importing W&B and opening a first run costs seconds of processor time, its background service is known to
hang, and a crash of either must not cost a training run. So this side only says, over a pipe that never
blocks, which folder to mirror; ``wandb_mirror`` reads the folder (the truth) at a low priority. One such
process serves all trials of a persistent worker: after the first, one costs it some hundredths of a second.
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
from types import TracebackType
from typing import Any

from adaecho.config.schema import TrackingConfig

# How long the end of this process may wait for the mirror; W&B gives up an upload before, and `wandb sync`
# can do it later.
FINISH_WAIT_S = 60.0


class Tracker:
    """Mirrors nothing: ``tracking=none``, and what the other kind degrades to."""

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self) -> None:
        """The folder has a new line of metrics."""

    def image(self, name: str, path: Path) -> None:
        """A picture to show beside the summary."""

    def close(self) -> None:
        """The folder has its summary, and nothing more will come in this piece of the run."""


class WandbTracker(Tracker):
    """Has one folder mirrored as one W&B run, whose id stays in the folder.

    Offline the mirror is made when the run closes, from the folder as it is then: nobody could look earlier.
    Online it follows every evaluation.
    """

    def __init__(
        self, tracking: TrackingConfig, folder: Path, *, group: str | None, name: str | None
    ) -> None:
        self._order: dict[str, Any] = {
            "folder": str(folder.resolve()),
            "mode": tracking.mode,
            "project": tracking.project,
            "entity": tracking.entity,
            "group": group,
            "name": name,
            "images": {},
            "final": False,
        }
        self._online = tracking.mode == "online"
        _mirror.start()
        self.update()

    def update(self) -> None:
        if self._online:
            _mirror.send(self._order)

    def image(self, name: str, path: Path) -> None:
        self._order["images"][name] = str(path.resolve())

    def close(self) -> None:
        _mirror.send({**self._order, "final": True})


def open_tracker(
    tracking: TrackingConfig, folder: Path, *, group: str | None = None, name: str | None = None
) -> Tracker:
    """The mirror that ``tracking`` asks for; it never raises and never waits.

    Args:
        tracking: where to, online or offline.
        folder: a run folder, or a sweep's (its design is the config, its outcome the summary).
        group: name shared by the runs of a sweep.
        name: shown for this run; by default a trial's arm/repeat/index in a group, else the folder's name.
    """
    if tracking.kind == "none":
        return Tracker()
    name = name or "/".join(folder.parts[-3:] if group else folder.parts[-1:])
    return WandbTracker(tracking, folder, group=group, name=name)


def mirror_sweep(tracking: TrackingConfig, sweep: Path) -> None:
    """Have a sweep's design, outcome and figures mirrored as one more run of its group."""
    with open_tracker(tracking, sweep, group=str(sweep), name="outcome") as tracker:
        for picture in sorted(sweep.glob("*.png")):
            tracker.image(picture.stem, picture)


class _Mirror:
    """The process that talks to W&B, started when first needed and given up for good at the first trouble."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._given_up = False

    def start(self) -> None:
        """Start it now, so that it is ready when a run ends."""
        if self._pid == os.getpid() or self._given_up:  # a forked child must not write into its parent's pipe
            return
        self._pid = os.getpid()
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "adaecho.records.wandb_mirror"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
                start_new_session=True,  # Ctrl-C is for the run; the mirror then still writes what there is
            )
        except OSError as error:
            self._given_up = True
            _warn(str(error))
            return
        assert self._process.stdin is not None
        descriptor = self._process.stdin.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_NONBLOCK)
        atexit.register(self.finish)

    def send(self, order: dict[str, Any]) -> None:
        """Pass an order on, or give up: the pipe is full when the other side has hung for long."""
        if self._process is None or self._pid != os.getpid() or self._given_up:
            return
        assert self._process.stdin is not None
        data = (json.dumps(order) + "\n").encode()
        try:
            self._given_up = os.write(self._process.stdin.fileno(), data) != len(data)
        except BrokenPipeError:  # it has said why before it ended
            self._given_up = True
        except BlockingIOError:
            self._given_up = True
            _warn("it does not answer")

    def finish(self) -> None:
        """Wait for what was sent, at most ``FINISH_WAIT_S``."""
        process, self._process = self._process, None
        if process is None or self._pid != os.getpid():
            return
        self._pid = 0
        assert process.stdin is not None
        with suppress(OSError):
            # Not only the end of the pipe: processes forked from this one hold it open.
            os.write(process.stdin.fileno(), b"\n")
        process.stdin.close()
        try:
            if process.wait(FINISH_WAIT_S) != 0:
                _warn(f"its mirror ended with {process.returncode}")
        except subprocess.TimeoutExpired:
            _warn(f"not finished in {FINISH_WAIT_S:g} s")
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish() -> None:
    """Wait for the mirror, for a bounded time; the exit of a process does it by itself.

    A worker of ``multiprocessing`` skips what was registered for its exit and calls this instead.
    """
    _mirror.finish()


def _warn(reason: str) -> None:
    print(f"warning: W&B: {reason}; the run folders are complete without it", file=sys.stderr)


_mirror = _Mirror()
