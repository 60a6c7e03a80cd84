"""One writer per run folder: a lock file that says who holds it and beats while its holder lives.

Not the kernel's ``flock``: it is local to each host by default on BeeGFS, and on Lustre mounted
``localflock``, so that two nodes would write one trial in silence. Not ``filelock.SoftFileLease`` (tried at
4.2): from a holder that is stopped (Ctrl-Z, a debugger) it is taken after the lease, and both write when that
goes on.
"""

import fcntl
import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adaecho.errors import FolderError
from adaecho.records.files import check_no_link, folder_errors, read_bytes

HEARTBEAT_S = 15.0
# A network file system may show a file's times up to a minute late (NFS acregmax), so several beats.
STALE_AFTER_S = 120.0
# Creating the lock and writing who holds it are microseconds apart: an older lock without a holder was killed
# in between.
_UNNAMED_AFTER_S = 2.0
_UNKNOWN = "unknown"  # in place of a process's start


class FolderInUseError(FolderError):
    """A live process is writing the folder."""


class FolderLock:
    """The right to write into a folder, held by a file ``lock`` in it.

    The file names host, pid, process start and folder, and its time of change is the heartbeat. A holder on
    this host is looked up in the process table; one on another host, or that the table hides from this user,
    counts as gone when its heartbeat is older than ``STALE_AFTER_S`` by the file system's own clock. A lock
    that was copied along with its folder holds nothing: the one it was copied from still lies in the folder
    that it names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "lock"
        self._token: str | None = None
        self._stop = threading.Event()

    def acquire(self) -> None:
        """Take the lock, also from a holder that is gone.

        Raises:
            FolderInUseError: a live process holds it (named by host and pid).
            FolderError: the folder can't be written, or the lock is a link.
        """
        check_no_link(self.path)  # one to nothing neither exists nor can be created
        with folder_errors(self.folder):
            begin = time.monotonic()
            while not self._try_acquire(waited_s=time.monotonic() - begin):
                time.sleep(0.05)
        self._stop = threading.Event()
        threading.Thread(target=self._beat, args=(self._stop,), name="folder-lock", daemon=True).start()

    def release(self) -> None:
        """Give the lock back; a lock that another process took over meanwhile stays with that process."""
        self._stop.set()
        if self.is_mine():
            with suppress(OSError):
                self.path.unlink()
        self._token = None

    def is_mine(self) -> bool:
        """Whether this object holds the lock: a machine that slept too long may have lost it."""
        return self._token is not None and (_read(self.path) or {}).get("token") == self._token

    def _try_acquire(self, waited_s: float) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), alone(self.folder):  # it may be moved aside at this moment
            return self._take_if_free(waited_s)
        return False

    def _take_if_free(self, waited_s: float) -> bool:
        if self.path.exists():
            holder = _read(self.path)
            if holder is None:
                # Its time may lie in the future, where a clock was set back: then only waiting tells.
                if max(self._age_s(), waited_s) < _UNNAMED_AFTER_S:
                    return False
            elif self._is_alive(holder) and not self._is_copy(holder):
                raise FolderInUseError(self._refusal(holder))
            self.path.unlink(missing_ok=True)
        token = uuid.uuid4().hex
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, json.dumps(_me(token, self.folder)).encode())
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._token = token
        return True

    def _is_alive(self, holder: dict[str, Any]) -> bool:
        if holder["host"] == socket.gethostname():
            start = process_start(holder["pid"])
            if start != _UNKNOWN or holder["process_start"] == _UNKNOWN:
                return start is not None and start == holder["process_start"]
        return self._age_s() < STALE_AFTER_S

    def _is_copy(self, holder: dict[str, Any]) -> bool:
        """Whether the lock it was copied from is still where it was taken."""
        original = Path(holder["folder"]) / "lock"
        with suppress(OSError):
            return (
                not original.samefile(self.path) and (_read(original) or {}).get("token") == holder["token"]
            )
        return False

    def _age_s(self) -> float:
        """Age of the last heartbeat by the clock of the file system: hosts' own clocks disagree.

        Infinite where the lock has been given back, or its folder moved, while it was looked at.
        """
        while self.folder.exists():
            # Not named by process: those of two hosts may have one number.
            probe = self.folder / f".clock.{uuid.uuid4().hex}.tmp"
            try:
                probe.touch()
                now = probe.stat().st_mtime
            except FileNotFoundError:  # a holder that begins removes what others have left behind
                continue
            except OSError:  # one who may only read looks at another user's run
                now = time.time()
            finally:
                with suppress(OSError):
                    probe.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                return now - self.path.stat().st_mtime
            break
        return math.inf

    def _refusal(self, holder: dict[str, Any]) -> str:
        ahead_s = -self._age_s()
        until = f"{STALE_AFTER_S:.0f} s after the last heartbeat"
        if ahead_s > STALE_AFTER_S:
            until += (
                f", but that lies {ahead_s:.0f} s in the future, as a clock was set back: if no process is "
                f"at it, remove {self.path}"
            )
        return (
            f"{self.folder}: process {holder['pid']} on host {holder['host']} is writing this folder since "
            f"{holder['since']}. Wait for it, stop it, or choose another folder; if its host died, the lock "
            f"frees itself {until}"
        )

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(HEARTBEAT_S):
            if self.is_mine():
                with suppress(OSError):
                    os.utime(self.path)


def is_held(folder: Path) -> bool:
    """Whether a process is at work in a folder, as far as its lock tells."""
    lock = FolderLock(folder)
    holder = _read(lock.path)
    return holder is not None and lock._is_alive(holder) and not lock._is_copy(holder)


def process_start(pid: int) -> str | None:
    """When a process of this host started, in a form that no reused pid shares; None if it is gone.

    ``_UNKNOWN`` where there is no /proc, or it shows each user their own processes alone (``hidepid``).
    """
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id")
        # The state and the start, fields 3 and 22 of proc(5).
        return (
            None if fields[0] in "ZX" else f"{boot.read_text().strip() if boot.exists() else ''}:{fields[19]}"
        )
    try:
        os.kill(pid, 0)
    except PermissionError:
        return _UNKNOWN
    except OSError:
        return None
    return _UNKNOWN


def _me(token: str, folder: Path) -> dict[str, Any]:
    return {
        "folder": str(folder.resolve()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": process_start(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "token": token,
    }


def _read(path: Path) -> dict[str, Any] | None:
    """Who holds the lock; None where no process does, or the file is not what ``_me`` writes."""
    with suppress(OSError, ValueError, RecursionError, KeyError):
        holder = json.loads(read_bytes(path))
        texts = [holder[key] for key in ("folder", "host", "process_start", "since", "token")]
        pid = holder["pid"]
        if (
            all(type(text) is str and "\0" not in text for text in texts)
            and type(pid) is int
            and 0 < pid < 1 << 31
        ):
            return dict(holder)
    return None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process of this host at a time through, for a moment.

    Two processes that both found a stale lock would otherwise each remove what the other has just created.
    Where a folder can't be locked like this (NFS), exclusive creation alone decides.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # a process that was forked meanwhile holds what is only closed
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
