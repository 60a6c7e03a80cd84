"""The run folder: the records of a run, its checkpoint and weights, and the lock of its only writer.

::

    config.yaml        the resolved config; its first line holds the overrides
    environment.json   code, versions and machine; see ``records.environment``
    metrics.jsonl      one JSON object per evaluation, flat except for ``echo_factor_changes``
    summary.json       status and outcome; the only file that sweeps and figures read
    checkpoint/        the state that a resumed run continues from; see ``training.checkpoint``
    model/             weights at the end and at the best evaluation, as safetensors
    traceback.txt      of each crash
    lock               the writer's host and process; empty without a writer

Three rules make a kill at any instant harmless. Files are replaced atomically. A line is appended before the
checkpoint that counts it. A resumed run cuts metrics.jsonl back to that count.
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
from adaecho.records.files import (
    append,
    atomic_file,
    dumps,
    folder_errors,
    read_json,
    read_yaml,
    whole_lines,
    write_json,
    write_text,
    yaml_text,
)

_OVERRIDES = "# overrides: "
HEARTBEAT_S = 15.0
# A network file system may show the times of a file up to a minute late (acregmax of NFS).
STALE_AFTER_S = 120.0


class FolderInUseError(FolderError):
    """A live process is writing to the folder."""


class RunFolder:
    """Reads the records of a run, and writes them while it holds ``lock``.

    Every writing method raises ``FolderError`` if this process does not hold the lock, the disk is full or
    the folder is not writable. The previous content then stays.

    Attributes:
        checkpoint: path of the last checkpoint.
        moved_to: the folder to which ``start`` moved the previous run; None otherwise.
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
        """Be the only writer of the folder inside the block; the folder is created if missing.

        Raises:
            FolderInUseError: a live process holds the lock; names its host and process.
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
        """Begin a new run, or continue the run in the folder if its config allows it.

        Args:
            config: the plain config. Keys that cannot change the trajectory (see ``config.identity``) may
                differ from the recorded config, and budgets may be larger.
            overrides: the overrides that the user typed.
            environment: see ``records.environment``; the previous ones stay under ``earlier``.
            restart: first rename a folder that contains a run to ``<name>.old-<n>``.

        Raises:
            FolderError: the folder contains a different run (with a diff), or a larger budget.
        """
        self._check_writer()
        has_records = self._config.exists()
        if restart and has_records:
            self.moved_to = move_aside(self.path)
            self._lock.release()
            self._lock.acquire()
        elif has_records:
            self._check_same(config)
        with folder_errors(self.path):
            for path in (self.checkpoint.parent, self.path / "model"):
                path.mkdir(exist_ok=True)
        # A url may hold credentials.
        shown, typed = redact_urls(config), redact_urls([*overrides])
        write_text(self._config, f"{_OVERRIDES}{dumps(typed)}\n{yaml_text(shown)}")
        path, now = self.path / "environment.json", environment or {}
        if path.exists():
            last = read_json(path)
            earlier = last.pop("earlier", [])
            now = {**now, "earlier": earlier if now == last else [*earlier, last]}
        write_json(path, now)

    def _check_same(self, config: dict[str, Any]) -> None:
        """Raise a FolderError with a diff if the folder contains a run with a different config."""
        recorded = read_yaml(self._config)
        remedy = "choose another folder (hydra.run.dir=...), or restart=true, which renames this one"
        if lines := changes(recorded, config):
            differences = "\n  ".join(lines)
            raise FolderError(
                f"{self.path}: contains a run with a different config:\n  {differences}\n"
                f"Undo these changes, {remedy}"
            )

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Append one line to ``metrics.jsonl``."""
        self._check_writer()
        append(self._metrics, dumps(metrics) + "\n")

    def truncate_metrics(self, num_lines: int) -> None:
        """Keep the first ``num_lines`` lines, which the checkpoint counts."""
        self._check_writer()
        if self._metrics.exists():
            kept = whole_lines(self._metrics)[:num_lines]
            with folder_errors(self._metrics):
                os.truncate(self._metrics, sum(map(len, kept)))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The evaluations so far, without an incomplete last line."""
        return [json.loads(line) for line in whole_lines(self._metrics)]

    def write(self, path: Path, data: bytes | memoryview) -> None:
        """Replace a file of the folder: the checkpoint, or weights in ``model/``."""
        self._check_writer()
        with atomic_file(path) as file:
            file.write(data)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace ``summary.json``."""
        self._check_writer()
        write_json(self._summary, summary)

    def read_summary(self) -> dict[str, Any] | None:
        """The summary, or None before the first."""
        return read_json(self._summary) if self._summary.exists() else None

    def read_config(self) -> dict[str, Any] | None:
        """The recorded plain config, or None in a new folder."""
        return read_yaml(self._config) if self._config.exists() else None

    def write_traceback(self, traceback: str) -> None:
        """Append a crash to ``traceback.txt``."""
        self._check_writer()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S %z")
        append(self.path / "traceback.txt", f"--- {stamp} ---\n{redact_urls(traceback).rstrip()}\n")

    def _check_writer(self) -> None:
        if not self._lock.is_mine():
            raise FolderInUseError(
                f"{self.path}: this process does not hold the lock, so it wrote nothing; another process "
                "took the lock over or removed it"
            )


def move_aside(folder: Path) -> Path:
    """Rename a folder to ``<name>.old-<n>``; returns the new path."""
    number = 1
    while (old := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    with folder_errors(folder):
        folder.rename(old)
    return old


_descriptors: set[int] = set()


def _close_descriptors() -> None:
    """Close the locks in a forked child, which would keep them after its parent's death."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_close_descriptors)


class FolderLock:
    """The right to write to a folder: a locked file ``lock`` in it.

    ``flock`` works between the processes of a host, and the kernel releases it when a process dies. Some file
    systems keep flock local to each host (BeeGFS, Lustre with ``localflock``) or lack it. There the writer's
    heartbeat, the modification time of the file, tells whether a writer on another host is alive. The file is
    never removed: two processes could then hold different files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "lock"
        self._descriptor, self._mine = -1, b""
        self._stop = threading.Event()

    def acquire(self) -> None:
        """Take the lock; the folder is created if missing.

        Raises:
            FolderInUseError: a live process holds the lock; names its host and process.
            FolderError: the folder is not writable.
        """
        with folder_errors(self.folder):
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
        """Release the lock, unless another host has taken it over."""
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
        """Whether this object holds the lock; a process that was suspended may have lost it."""
        with suppress(OSError):
            return self._descriptor >= 0 and self.path.read_bytes() == self._mine
        return False

    def _beat(self, descriptor: int, stop: threading.Event) -> None:
        while not stop.wait(HEARTBEAT_S):
            with suppress(OSError):
                os.utime(descriptor)


def is_held(folder: Path) -> bool:
    """Whether a live process holds the lock of a folder, by its heartbeat alone."""
    with suppress(OSError):
        path = folder / "lock"
        return bool(path.read_bytes()) and time.time() - path.stat().st_mtime < STALE_AFTER_S
    return False


def _holder(descriptor: int) -> str | None:
    """Lock the file; returns the live process that holds it, or None."""
    is_ours = is_locked = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except BlockingIOError:
        is_locked = True
    except OSError:  # this file system has no flock; only the heartbeat tells
        pass
    found = dict[str, object]()
    with suppress(ValueError):  # an empty file: no process holds it
        found = json.loads(os.pread(descriptor, 1024, 0))
    beats = bool(found) and time.time() - os.fstat(descriptor).st_mtime < STALE_AFTER_S
    if is_locked or (beats and not (is_ours and found["host"] == socket.gethostname())):
        return f"process {found.get('pid', '')} on host {found.get('host', '')}"
    return None
