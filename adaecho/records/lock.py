"""One writer per folder: ``flock`` between the processes of a host, a heartbeat between hosts.

The kernel gives a flock back when its process ends, however that ends. Where it is local to each host
(BeeGFS, Lustre mounted ``localflock``) or missing, the file's time of change tells whether a holder elsewhere
lives.
"""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from adaecho.errors import FolderError
from adaecho.records.files import folder_errors

HEARTBEAT_S = 15.0
# A network file system may show a file's times up to a minute late (NFS acregmax).
STALE_AFTER_S = 120.0
_TRIES = 3  # ``is_held`` holds the lock, too, for an instant

_descriptors: set[int] = set()


def _let_go() -> None:
    """A forked child would keep its parent's lock after the parent's death."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_let_go)


class FolderInUseError(FolderError):
    """A live process is writing the folder."""


class FolderLock:
    """The right to write into a folder: a locked file ``lock`` in it, which is empty while nobody has it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "lock"
        self._descriptor, self._mine = -1, b""
        self._stop = threading.Event()

    def acquire(self) -> None:
        """Take the lock; the folder is made if it is missing.

        Raises:
            FolderInUseError: a live process holds it (named by host and pid).
            FolderError: the folder can't be written.
        """
        with folder_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                for left in reversed(range(_TRIES)):
                    if (holder := _holder(descriptor, fcntl.LOCK_EX)) is None:
                        break
                    if not left:
                        raise FolderInUseError(
                            f"{self.folder}: {holder} is writing this folder. Wait for it, stop it, or "
                            f"choose another folder; if its host died, it is free {STALE_AFTER_S:.0f} s later"
                        )
                    time.sleep(0.02)
                me = {"host": socket.gethostname(), "pid": os.getpid(), "token": uuid.uuid4().hex}
                self._descriptor, self._mine = descriptor, json.dumps(me).encode()
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, self._mine, 0)
            except BaseException:
                os.close(descriptor)
                self._descriptor = -1
                raise
        _descriptors.add(descriptor)
        self._stop = threading.Event()
        threading.Thread(target=self._beat, args=(descriptor, self._stop), daemon=True).start()

    def release(self) -> None:
        """Give the lock back; one that another host took over meanwhile stays with that."""
        if self._descriptor < 0:
            return
        self._stop.set()
        if self.is_mine():
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
        _descriptors.discard(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1

    def is_mine(self) -> bool:
        """Whether this object holds the lock: a process that slept too long may have lost it."""
        with suppress(OSError):
            return self._descriptor >= 0 and self.path.read_bytes() == self._mine
        return False

    def _beat(self, descriptor: int, stop: threading.Event) -> None:
        while not stop.wait(HEARTBEAT_S):
            with suppress(OSError):
                os.utime(descriptor)


def is_held(folder: Path) -> bool:
    """Whether a process is at work in a folder, as far as its lock tells."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        return _holder(descriptor, fcntl.LOCK_SH) is not None
    finally:
        os.close(descriptor)


def _holder(descriptor: int, kind: int) -> str | None:
    """Lock the file unless a process of this host has; who holds the folder, None where nobody does."""
    is_ours = is_locked = False
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        is_ours = True
    except BlockingIOError:
        is_locked = True
    except OSError:  # no flock on this file system: the heartbeat alone tells
        pass
    found = dict[str, object]()
    with suppress(ValueError):  # of an empty one: nobody has signed
        found = json.loads(os.pread(descriptor, 1024, 0))
    beats = bool(found) and time.time() - os.fstat(descriptor).st_mtime < STALE_AFTER_S
    if is_locked or (beats and not (is_ours and found["host"] == socket.gethostname())):
        return f"process {found.get('pid', '')} on host {found.get('host', '')}"
    return None
