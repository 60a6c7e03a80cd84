"""The run folder: everything a run leaves behind, safe to kill at any instant.

::

    config.yaml        the resolved config, its overrides in the first line
    environment.json   where it ran; see ``records.environment``
    metrics.jsonl      one JSON object per evaluation, flat but for ``echo_factor_changes``
    summary.json       status and outcome; the one file that sweeps and figures read
    checkpoint/        what a resumed run continues from; see ``training.checkpoint``
    model/             weights at the end and at the best evaluation, as safetensors
    traceback.txt      of each crash
    lock               who is writing; empty while nobody is

Three rules make every kill harmless: files are replaced atomically, lines are appended before the checkpoint
that counts them, and a resumed run cuts metrics.jsonl back to that count.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adaecho.config.identity import changes
from adaecho.errors import FolderError
from adaecho.masking import masked
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
from adaecho.records.lock import FolderInUseError, FolderLock

_OVERRIDES = "# overrides: "


class RunFolder:
    """Reads a run's records, and writes them while ``lock`` is held.

    Every writing method raises ``FolderError`` if this process does not hold the lock, the disk is full or
    the folder can't be written; what was there before is then unchanged.

    Attributes:
        checkpoint: the file of the last one.
        moved_to: where ``start`` put the run that the folder held before, if it did.
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
        """Be the folder's only writer inside the block; the folder is made if it is missing.

        Raises:
            FolderInUseError: a live process holds the lock; names its host and pid.
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
    ) -> None:
        """Begin a new run, or continue the one in the folder if its config allows.

        Args:
            config: the plain config. What can't change the trajectory (see ``config.identity``) may
                differ from the folder's, and budgets may be larger.
            overrides: what the user typed, kept for the reader of ``config.yaml``.
            environment: see ``records.environment``. Those of earlier pieces stay under ``earlier``.
            fresh: move a folder that holds a run to ``<name>.old-<n>`` first.

        Raises:
            FolderError: the folder holds another run (with a diff), a larger budget, or no config.
        """
        self._check_writer()
        has_records = any(path.exists() for path in (self._config, self._metrics, self._summary))
        if fresh and has_records:
            self.moved_to = move_aside(self.path)
            self._lock.release()
            self._lock.acquire()
        elif has_records:
            self._check_same(config)
        with folder_errors(self.path):
            for name in ("checkpoint", "model"):
                (self.path / name).mkdir(exist_ok=True)
        write_text(self._config, f"{_OVERRIDES}{dumps(masked([*overrides]))}\n{yaml_text(config)}")
        path, now = self.path / "environment.json", environment or {}
        if path.exists():
            last = read_json(path)
            earlier = last.pop("earlier", [])
            now = {**now, "earlier": earlier if now == last else [*earlier, last]}
        write_json(path, now)

    def _check_same(self, config: dict[str, Any]) -> None:
        """Raises FolderError, with a diff, where the folder holds another run than this config's."""
        recorded = self.read_config()
        if recorded is None:
            raise FolderError(
                f"{self.path}: holds records but no config.yaml, so it can't be said which run they belong "
                "to. Choose another folder, or fresh=true to start anew and keep these beside it"
            )
        if lines := changes(recorded, config):
            raise FolderError(
                f"{self.path}: holds a run with another config:\n  "
                + "\n  ".join(lines)
                + "\nSet these back, choose another folder (hydra.run.dir=...), or start anew with "
                "fresh=true (the old folder is kept beside the new one)"
            )

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``."""
        self._check_writer()
        append(self._metrics, dumps(metrics) + "\n")

    def truncate_metrics(self, num_lines: int) -> None:
        """Keep the first ``num_lines`` lines: those a checkpoint knows of. A torn last line goes too.

        Raises:
            FolderError: the file has fewer whole lines.
        """
        self._check_writer()
        lines = whole_lines(self._metrics)
        if len(lines) < num_lines:
            raise FolderError(
                f"{self._metrics}: {len(lines)} lines, but the checkpoint was written after {num_lines}. "
                "Restore it, or start anew with fresh=true"
            )
        if self._metrics.exists():
            with folder_errors(self._metrics):
                os.truncate(self._metrics, sum(map(len, lines[:num_lines])))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The evaluations so far, without a torn last line."""
        return [json.loads(line) for line in whole_lines(self._metrics)]

    def save_checkpoint(self, data: bytes | memoryview) -> None:
        """Replace the last checkpoint."""
        self._write(self.checkpoint, data)

    def write_model(self, name: str, data: bytes) -> Path:
        """Keep the weights ``model/<name>``; returns the path in the folder."""
        self._write(self.path / "model" / name, data)
        return Path("model") / name

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace ``summary.json``."""
        self._check_writer()
        write_json(self._summary, summary)

    def read_summary(self) -> dict[str, Any] | None:
        """The summary, or None before the first."""
        return read_json(self._summary) if self._summary.exists() else None

    def read_config(self) -> dict[str, Any] | None:
        """The plain config the run was started with, or None in a new folder."""
        return read_yaml(self._config) if self._config.exists() else None

    def read_overrides(self) -> list[str]:
        """What was typed for the run, from the first line of ``config.yaml``."""
        first = self._config.read_text(encoding="utf-8").partition("\n")[0]
        return list(json.loads(first.removeprefix(_OVERRIDES))) if first.startswith(_OVERRIDES) else []

    def write_traceback(self, traceback: str) -> None:
        """Add a crash to ``traceback.txt``; those of earlier attempts stay."""
        self._check_writer()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S %z")
        append(self.path / "traceback.txt", f"--- {stamp} ---\n{masked(traceback).rstrip()}\n")

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        self._check_writer()
        with atomic_file(path) as file:
            file.write(data)

    def _check_writer(self) -> None:
        if not self._lock.is_mine():
            raise FolderInUseError(
                f"{self.path}: this process does not hold its lock (another one took the folder over while "
                "this one slept, or removed it). Nothing was written"
            )


def move_aside(folder: Path) -> Path:
    """Rename a folder to ``<name>.old-<n>``, so that a new one can start in its place; where it now is."""
    number = 1
    while (old := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    with folder_errors(folder):
        folder.rename(old)
    return old
