"""The run folder: everything a run leaves behind, safe to kill at any instant.

::

    config.yaml        the resolved config, its overrides in the first lines
    environment.json   where it ran; see ``records.environment``
    metrics.jsonl      one JSON object per evaluation, flat but for ``echo_factor_changes``
    summary.json       status and outcome; the one file that sweeps and figures read
    checkpoint/        what a resumed run continues from; see ``records.checkpoints``
    model/             weights at the end and at the best evaluation, as safetensors
    traceback.txt      of each crash
    lock               who is writing; absent when no process is

Against a power cut the order of what reaches the disk counts: config.yaml first, then the lines of
metrics.jsonl that a checkpoint relies on, the checkpoint, the summary that tells of it.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adaecho.config.identity import changes, identity, run_id
from adaecho.errors import DiskError, FolderError, warn
from adaecho.masking import presentable
from adaecho.records import checkpoints
from adaecho.records.files import (
    append,
    atomic_file,
    check_no_link,
    dumps,
    folder_errors,
    open_regular,
    read_bytes,
    read_json,
    read_yaml,
    sync_folder,
    whole_lines,
    write_json,
    write_text,
    yaml_text,
)
from adaecho.records.lock import FolderInUseError, FolderLock, is_held
from adaecho.records.outcome import COSTS
from adaecho.records.status import Status

_OVERRIDES = "# overrides: "
_LEFT = (
    "config.yaml", "environment.json", "metrics.jsonl", "summary.json", "checkpoint",
    "model", "traceback.txt", "lock", "pictures", "wandb", ".wandb", "wandb.json",
    "attempts.log",
)  # fmt: skip
# The lock does not guard it: the export of the piece before may be writing it at this moment.
_UNGUARDED = (".wandb.json.",)


class RunFolder:
    """Reads a run's records, and writes them while ``lock`` is held.

    Every writing method raises ``FolderError`` if this process does not hold the lock, the disk is full or
    the folder can't be written; what was there before is then unchanged. The lock is looked at again right
    before each rename and append: a process that slept for minutes may have lost it in between.

    Attributes:
        checkpoint_dir: where checkpoints go; ``start`` makes it.
        moved_to: where ``start`` put the run that the folder held before, if it did.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.checkpoint_dir = self.path / "checkpoint"
        self._config = self.path / "config.yaml"
        self._metrics = self.path / "metrics.jsonl"
        self._summary = self.path / "summary.json"
        self.moved_to: Path | None = None
        self._lock = FolderLock(self.path)
        self._identity = ""
        self._earlier_config = b""  # what ``start`` wrote over

    @contextmanager
    def lock(self) -> Iterator["RunFolder"]:
        """Be the folder's only writer inside the block; the folder is made if it is missing.

        Raises:
            FolderError: a live process holds the lock; names its host and pid.
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
        fresh: bool = False,
    ) -> bool:
        """Begin a new run, or continue the one in the folder if its config allows.

        Args:
            config: the plain config. What can't change the trajectory (see ``config.identity``) may
                differ from the folder's, and budgets may be larger.
            overrides: what the user typed, kept for the reader of ``config.yaml``.
            environment: see ``records.environment``. Those of earlier pieces stay under ``earlier``.
            fresh: move a folder that holds a run to ``<name>.old-<n>`` first.

        Returns:
            Whether the folder already held this run.

        Raises:
            FolderError: the folder holds another run (with a diff), a larger budget, or no config.
        """
        self._check_writer()
        self.check_links()
        self._identity = run_id(config)
        if fresh and self._has_records():
            self._move_aside()
        elif self._has_lost_its_config():
            self._move_aside()
            warn(
                f"{self._config} is empty, and nothing says which run the folder's records belong to: they "
                f"were moved to {self.moved_to}, and the run begins anew"
            )
        recorded = None if self._is_blank(self._config) else self.read_config()
        has_records = self._has_records()
        if recorded is None and has_records and not self._config.exists():
            raise FolderError(
                f"{self.path}: holds records but no config.yaml, so it can't be said which run they belong "
                "to. Choose another folder, or fresh=true to start anew and keep these beside it"
            )
        if recorded is not None:
            _check_same_run(self.path, recorded, config)
            self._earlier_config = read_bytes(self._config)
        self._prepare(config, overrides, environment or {})
        return has_records

    def take_back_config(self) -> None:
        """Put back the config that ``start`` found: what was asked for beyond it was refused."""
        self._check_writer()
        if self._earlier_config:
            write_text(self._config, self._earlier_config.decode(), ready=self._check_writer)

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``."""
        self._check_writer()
        append(self._metrics, dumps(metrics) + "\n", ready=self._check_writer)

    def truncate_metrics(self, num_lines: int) -> None:
        """Keep the first ``num_lines`` lines: those a checkpoint knows of. A torn last line goes too.

        Raises:
            FolderError: the file has fewer whole lines.
        """
        self._check_writer()
        lines = whole_lines(self._metrics)
        kept = b"".join(lines[:num_lines])
        if len(lines) < num_lines:
            raise FolderError(
                f"{self._metrics}: {len(lines)} lines, but the checkpoint was written after {num_lines}"
            )
        if self._metrics.exists() and self._metrics.stat().st_nlink > 1:  # a cp -al of the run has it, too
            write_text(self._metrics, kept.decode(), ready=self._check_writer)
        elif self._metrics.exists():
            with folder_errors(self._metrics):
                descriptor = os.open(self._metrics, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    os.truncate(descriptor, len(kept))
                finally:
                    os.close(descriptor)

    def save_checkpoint(self, archive: memoryview) -> None:
        """Keep a ZIP archive as the last checkpoint; see ``records.checkpoints.save``."""
        self._check_writer()
        with folder_errors(self.checkpoint_dir):
            self.checkpoint_dir.mkdir(exist_ok=True)
        self.sync_metrics()
        checkpoints.save(self.checkpoint_dir, archive, self._identity, self._check_writer)

    def checkpoints(self) -> list[Path]:
        """The checkpoints there are, the last one first; ``check_checkpoint`` says which are good."""
        paths = [self.checkpoint_dir / name for name in (checkpoints.LAST, checkpoints.PREVIOUS)]
        return [path for path in paths if path.exists()]

    def check_checkpoint(self, path: Path) -> None:
        """Check a checkpoint's bytes, and that it belongs to this run: ``start``'s, or the recorded one.

        Raises:
            DiskError: it can't be read now, which says nothing about it.
            FolderError: it is damaged or of another run; says which.
        """
        try:
            with folder_errors(path):
                found = checkpoints.identity_of(path)
        except ValueError as error:
            raise FolderError(f"{path}: {error}") from error
        recorded = self.read_config() if not self._identity else None
        expected = self._identity if recorded is None else run_id(recorded)
        if found != expected:
            raise FolderError(f"{path}: of another run ({found}, this one is {expected})")

    def set_aside(self, path: Path) -> None:
        """Rename a file that can't be used to ``<name>.damaged``, so that nothing writes over it."""
        self._check_writer()
        with folder_errors(path):
            path.replace(path.with_name(f"{path.name}.damaged"))

    def write_model(self, name: str, data: bytes) -> Path:
        """Keep the weights ``model/<name>``; returns the path in the folder."""
        self._check_writer()
        path = self.path / "model" / name
        with folder_errors(path):
            path.parent.mkdir(exist_ok=True)
        with atomic_file(path, ready=self._check_writer) as file:
            file.write(data)
        return path.relative_to(self.path)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The evaluations so far, without a torn last line.

        Raises:
            FolderError: a line within the file is damaged; names it.
        """
        metrics = []
        for number, line in enumerate(whole_lines(self._metrics), start=1):
            try:
                metrics.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise FolderError(f"{self._metrics}: line {number} is damaged ({error})") from error
        return metrics

    def sync_metrics(self) -> None:
        """Make the lines so far survive a power cut: before a checkpoint relies on them."""
        if self._metrics.exists():
            with folder_errors(self._metrics), open_regular(self._metrics) as file:
                os.fsync(file.fileno())
            sync_folder(self.path)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace ``summary.json`` atomically; it and the metrics so far also survive a power cut."""
        self._check_writer()
        self.sync_metrics()
        write_json(self._summary, summary, ready=self._check_writer)

    def read_summary(self) -> dict[str, Any] | None:
        """The summary, or None before the first; also where a power cut left the file empty.

        Raises:
            FolderError: the file is damaged.
        """
        if not self._summary.exists() or self._is_blank(self._summary):
            return None
        summary = read_json(self._summary)
        if not isinstance(summary, dict) or summary.get("status") not in [*Status] or not _can_be(summary):
            raise FolderError(
                f"{self._summary}: damaged (no summary of a run). Restore it, or start anew with fresh=true"
            )
        return summary

    def read_config(self) -> dict[str, Any] | None:
        """The plain config the run was started with, or None in a new folder.

        Raises:
            FolderError: the file is damaged.
        """
        if not self._config.exists():
            return None
        try:
            with folder_errors(self._config):
                config = dict(read_yaml(self._config))
            identity(config)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise FolderError(
                f"{self._config}: damaged ({type(error).__name__}: {error}). Restore it, or start anew with "
                "fresh=true"
            ) from error
        return config

    def read_overrides(self) -> list[str]:
        """What was typed for the run, from the first line of ``config.yaml``."""
        with folder_errors(self._config):
            first = read_bytes(self._config).decode("utf-8", errors="replace").partition("\n")[0]
        return list(json.loads(first.removeprefix(_OVERRIDES))) if first.startswith(_OVERRIDES) else []

    def write_traceback(self, traceback: str) -> None:
        """Add a crash to ``traceback.txt``; those of earlier attempts stay."""
        self._check_writer()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S %z")
        text = f"--- {stamp} ---\n{presentable(traceback).rstrip()}\n"
        append(self.path / "traceback.txt", text, ready=self._check_writer)

    def _check_writer(self) -> None:
        if not self._lock.is_mine():
            with folder_errors(self.path):
                kind = FolderInUseError if is_held(self.path) else FolderError
            raise kind(
                f"{self.path}: this process does not hold its lock (another one took the folder over while "
                "this one slept, or removed it). Nothing was written"
            )

    def check_links(self) -> None:
        """Refuse links in it, which lead in a run received from others to any file or folder of one's own.

        What is written through one is changed, and what is read may come to lie in a record.

        Raises:
            FolderError: one of its files or folders is a link.
        """
        for name in _LEFT:
            check_no_link(self.path / name)
        for name in ("checkpoint", "model"):
            for path in self.path.glob(f"{name}/*"):
                check_no_link(path)

    def _has_records(self) -> bool:
        if any(path.exists() for path in (self._config, self._metrics, self._summary)):
            return True
        weights = self.path.glob("model/*.safetensors")
        return any(weights) or (self.checkpoint_dir.is_dir() and any(self.checkpoint_dir.iterdir()))

    def _has_lost_its_config(self) -> bool:
        """Whether config.yaml is empty and no checkpoint says that the records belong to this run.

        A file system may leave an empty file, or one of zeros, where the power was cut. Alone, or beside a
        checkpoint of this run, it is written anew.
        """
        if not self._is_blank(self._config):
            return False
        for path in self.checkpoints():
            try:
                self.check_checkpoint(path)
            except DiskError:
                raise
            except FolderError:
                continue
            return False
        return self._metrics.exists() or self._summary.exists() or bool(self.checkpoints())

    @staticmethod
    def _is_blank(path: Path) -> bool:
        with folder_errors(path):
            return path.exists() and not read_bytes(path).strip(b"\0 \n")

    def _move_aside(self) -> None:
        """Rename the whole folder, which no kill can leave half done, and take a new one in its place.

        Raises:
            FolderError: it holds what no run leaves, which would move along.
        """
        self._check_writer()
        with folder_errors(self.path):
            names = sorted(one.name for one in self.path.iterdir())
        foreign = [name for name in names if name not in _LEFT and not name.endswith(".tmp")]
        if foreign:
            raise FolderError(
                f"{self.path}: is to be moved aside with the run in it, and holds more than a run "
                f"({', '.join(foreign[:5])}{', ...' if len(foreign) > 5 else ''}); move that elsewhere, or "
                "choose another folder"
            )
        self.moved_to = move_aside(self.path)
        self._lock.release()
        self._lock.acquire()

    def _prepare(self, config: dict[str, Any], overrides: Sequence[str], environment: dict[str, Any]) -> None:
        with folder_errors(self.path):
            self.checkpoint_dir.mkdir(exist_ok=True)
            for folder in (self.path, self.checkpoint_dir, self.path / "model"):
                for leftover in folder.glob(".*.tmp"):
                    if not leftover.name.startswith(_UNGUARDED):
                        leftover.unlink(missing_ok=True)
        text = f"{_OVERRIDES}{dumps(list(overrides))}\n{yaml_text(config)}"
        write_text(self._config, text, ready=self._check_writer)
        sync_folder(self.path.parent)  # the run folder itself
        self._write_environment(environment)

    def _write_environment(self, environment: dict[str, Any]) -> None:
        """Record where this piece runs, after the earlier ones; nothing depends on it."""
        path = self.path / "environment.json"
        try:
            last = dict(read_json(path)) if path.exists() else None
        except (FolderError, TypeError, ValueError):
            warn(f"{path} is damaged: where earlier pieces of the run were made is lost")
            last = None
        if last is not None:
            earlier = last.pop("earlier", [])
            environment = {**environment, "earlier": earlier if environment == last else [*earlier, last]}
        write_json(path, environment, ready=self._check_writer)


def move_aside(folder: Path) -> Path:
    """Rename a folder to ``<name>.old-<n>``, so that a new one can start in its place; where it now is.

    A lock does not move along; its holder, if there is one, is the caller.

    Raises:
        FolderError: it can't be renamed, or this process works in it.
    """
    if Path.cwd().is_relative_to(folder.resolve()):
        raise FolderError(
            f"{folder}: is to be moved aside, and it is or holds the current folder; choose another with "
            "hydra.run.dir= (of a sweep: hydra.sweep.dir=)"
        )
    number = 1
    while (old := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    with folder_errors(folder):
        folder.rename(old)
        (old / "lock").unlink(missing_ok=True)
    sync_folder(folder.parent)
    return old


def _check_same_run(path: Path, recorded: dict[str, Any], config: dict[str, Any]) -> None:
    lines = changes(recorded, config)
    if lines:
        raise FolderError(
            f"{path}: holds a run with another config:\n  "
            + "\n  ".join(lines)
            + "\nSet these back, choose another folder (hydra.run.dir=...), or start anew with fresh=true "
            "(the old folder is kept beside the new one)"
        )


def _can_be(summary: dict[str, Any]) -> bool:
    """Whether what a summary says of data and of costs is what a run can have."""
    to_target = summary.get("to_target")
    if not isinstance(to_target, dict | None) or not isinstance(summary.get("data"), dict | None):
        return False
    costs = [found.get(name, 0) for found in (summary, to_target or {}) for name in COSTS]
    return all(type(cost) in (int, float) and 0 <= cost < math.inf for cost in costs)
