"""The run folder, which contains everything that a run writes: records, checkpoint, weights and a lock.

It contains these files::

    config.yaml        the resolved config; its first line lists the overrides that the user typed
    environment.json   code, versions and machine; see ``records.environment``
    metrics.jsonl      one JSON object per evaluation, flat except for ``echo_factor_changes``
    summary.json       status and outcome of the run
    checkpoint/        the state from which a resumed run continues; see ``training.checkpoint``
    model/             weights at the end and at the best evaluation, as safetensors
    traceback.txt      the traceback of each crash
    lock               host and process of the current writer; empty if no process is writing

A run can be killed at any time without damaging these files.
"""

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adaecho.config.identity import changes
from adaecho.errors import FolderError, redact_urls
from adaecho.records import files

_OVERRIDES = "# overrides: "
HEARTBEAT_S = 15.0
# A writer counts as dead if its last heartbeat is older than this. The limit is much longer than the
# heartbeat, since a network file system may show file times up to a minute late (NFS option acregmax).
STALE_AFTER_S = 120.0


class FolderInUseError(FolderError):
    """Another live process is writing to the folder."""


class RunFolder:
    """The files of one run folder, with methods to read and write them.

    To write, a process must hold the folder's lock (see ``lock``).

    Attributes:
        checkpoint: the path of the last checkpoint.
        moved_to: the new path of a previous run that ``start`` has moved away; otherwise None.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.checkpoint = self.path / "checkpoint" / "last.pt"
        self._config = self.path / "config.yaml"
        self._metrics = self.path / "metrics.jsonl"
        self._summary = self.path / "summary.json"
        self.moved_to: Path | None = None
        self._lock = FolderLock(self.path)

    @contextmanager
    def lock(self) -> Iterator["RunFolder"]:
        """Create the folder if needed, and lock it for writing while the ``with`` block runs.

        Raises:
            FolderInUseError: another live process holds the lock.
        """
        self._lock.acquire()
        try:
            yield self
        finally:
            self._lock.release()

    def start(
        self,
        config: dict[str, Any],
        overrides: Sequence[str] = (),
        environment: dict[str, Any] | None = None,
        *,
        restart: bool = False,
    ) -> None:
        """Record the config and the environment when a run starts or resumes.

        A resumed run may have larger budgets, or other settings that do not affect the results.

        Args:
            config: the config as plain dicts.
            overrides: the overrides on the command line.
            environment: the current environment. The environments of earlier starts are kept too.
            restart: whether to start a new run. An existing run is first moved to ``<name>.old-<n>``.

        Raises:
            FolderError: the run in the folder has a different config. The message lists the differences.
        """
        self._check_writer()
        has_records = self._config.exists()
        if restart and has_records:
            self.moved_to = move_aside(self.path)
            self._lock.release()
            self._lock.acquire()
        elif has_records:
            self._check_same(config)
        with files.folder_errors(self.path):
            for path in (self.checkpoint.parent, self.path / "model"):
                path.mkdir(exist_ok=True)
        # Urls are redacted because they may contain credentials.
        shown, typed = redact_urls(config), redact_urls([*overrides])
        files.write_text(self._config, f"{_OVERRIDES}{files.dumps(typed)}\n{files.yaml_text(shown)}")
        path, now = self.path / "environment.json", environment or {}
        if path.exists():
            last = files.read_json(path)
            earlier = last.pop("earlier", [])
            now = {**now, "earlier": earlier if now == last else [*earlier, last]}
        files.write_json(path, now)

    def _check_same(self, config: dict[str, Any]) -> None:
        """Raise a FolderError if the recorded config is different."""
        if lines := changes(files.read_yaml(self._config), config):
            differences = "\n  ".join(lines)
            raise FolderError(
                f"{self.path}: contains a run with a different config:\n  {differences}\nUndo these changes, "
                "choose another folder (hydra.run.dir=...), or restart=true, which renames this one"
            )

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Append one line to ``metrics.jsonl``."""
        self._check_writer()
        files.append(self._metrics, files.dumps(metrics) + "\n")

    def truncate_metrics(self, num_lines: int) -> None:
        """Keep only the first ``num_lines`` lines of ``metrics.jsonl``."""
        self._check_writer()
        if self._metrics.exists():
            kept = files.whole_lines(self._metrics)[:num_lines]
            with files.folder_errors(self._metrics):
                os.truncate(self._metrics, sum(map(len, kept)))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all evaluations that were written completely."""
        return [json.loads(line) for line in files.whole_lines(self._metrics)]

    def write(self, path: Path, data: bytes | memoryview) -> None:
        """Atomically write a binary file in the folder, such as the checkpoint."""
        self._check_writer()
        with files.atomic_file(path) as file:
            file.write(data)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace ``summary.json``."""
        self._check_writer()
        files.write_json(self._summary, summary)

    def read_summary(self) -> dict[str, Any] | None:
        """Return the content of ``summary.json``, or None if it has not been written yet."""
        return files.read_json(self._summary) if self._summary.exists() else None

    def read_config(self) -> dict[str, Any] | None:
        """Return the recorded config as plain dicts, or None if the folder contains no run."""
        return files.read_yaml(self._config) if self._config.exists() else None

    def write_traceback(self, traceback: str) -> None:
        """Append the time and the traceback of a crash to ``traceback.txt``."""
        self._check_writer()
        head = time.strftime("--- %Y-%m-%d %H:%M:%S %z ---\n")
        files.append(self.path / "traceback.txt", f"{head}{redact_urls(traceback).rstrip()}\n")

    def _check_writer(self) -> None:
        if not self._lock.is_mine():
            raise FolderInUseError(
                f"{self.path}: this process does not hold the lock, so it wrote nothing; another process "
                "took over or removed the lock"
            )


def move_aside(folder: Path) -> Path:
    """Rename a folder to ``<name>.old-<n>`` with an unused number n, and return the new path."""
    number = 1
    while (old := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    with files.folder_errors(folder):
        folder.rename(old)
    return old


_descriptors: set[int] = set()


def _close_descriptors() -> None:
    """Close all lock files in a forked child process, so that it does not hold the locks."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_descriptors)


class FolderLock:
    """A lock that lets only one process at a time write to a folder, even across hosts.

    The process locks the file ``lock``, and regularly updates the file's time to show that it is alive.
    """

    def __init__(self, folder: Path) -> None:
        # The file is never removed, so that no process can lock a removed file while another locks a new one.
        self.folder, self.path = folder, folder / "lock"
        self._descriptor, self._mine = -1, b""
        self._stop = threading.Event()

    def acquire(self) -> None:
        """Acquire the lock, and create the folder if it is missing.

        Raises:
            FolderInUseError: another live process holds the lock.
        """
        with files.folder_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if holder := _holder(descriptor):
                    raise FolderInUseError(
                        f"{self.folder}: {holder} is writing to this folder; wait for it, stop it, or choose "
                        f"another folder. If its host died, the folder is free after {STALE_AFTER_S:.0f} s"
                    )
                me = {"host": socket.gethostname(), "pid": os.getpid(), "token": uuid.uuid4().hex}
                self._mine = json.dumps(me).encode()
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, self._mine, 0)
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        _descriptors.add(descriptor)
        self._stop = threading.Event()
        threading.Thread(target=self._beat, args=(descriptor, self._stop), daemon=True).start()

    def release(self) -> None:
        """Release the lock, unless a process on another host has taken it over."""
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
        """Return whether this object still owns the lock."""
        # While this process was suspended, a process on another host may have acquired the lock.
        with suppress(OSError):
            return self._descriptor >= 0 and self.path.read_bytes() == self._mine
        return False

    def _beat(self, descriptor: int, stop: threading.Event) -> None:
        # On some file systems (BeeGFS, Lustre with localflock), flock has no effect across hosts.
        while not stop.wait(HEARTBEAT_S):
            with suppress(OSError):
                os.utime(descriptor)


def is_held(folder: Path) -> bool:
    """Return whether a live process holds the lock of a folder, judging by its last heartbeat."""
    with suppress(OSError):
        path = folder / "lock"
        return bool(path.read_bytes()) and time.time() - path.stat().st_mtime < STALE_AFTER_S
    return False


def _holder(descriptor: int) -> str | None:
    """Try to lock an open file. Return a description of the process that holds the lock, or None."""
    is_ours = is_locked = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except BlockingIOError:
        is_locked = True
    except OSError:  # this file system has no flock, so only the heartbeat can be checked
        pass
    found = dict[str, object]()
    with suppress(ValueError):  # the file is empty if no process holds the lock
        found = json.loads(os.pread(descriptor, 1024, 0))
    beats = bool(found) and time.time() - os.fstat(descriptor).st_mtime < STALE_AFTER_S
    if is_locked or (beats and not (is_ours and found["host"] == socket.gethostname())):
        return f"process {found.get('pid', '')} on host {found.get('host', '')}"
    return None
