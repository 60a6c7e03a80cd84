"""The run folder: everything a run leaves behind, safe to kill at any instant.

::

    config.yaml        the resolved config, its overrides in the first lines
    environment.json   where it ran; see ``records.environment``
    metrics.jsonl      one JSON object per evaluation, flat but for ``echo_factor_changes``
    summary.json       status and outcome; the one file that sweeps and figures read
    checkpoint/        what a resumed run continues from
    traceback.txt      of each crash
    lock               who is writing; absent when nobody is
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from adaecho.config.schema import COUNTED_BUDGETS, identity
from adaecho.errors import FolderError
from adaecho.records.compare import differences, smaller_budgets
from adaecho.records.files import append, dumps, folder_errors, read_json, whole_lines, write_json, write_text
from adaecho.records.lock import FolderLock

# The parser and emitter in C where PyYAML has them: a trial may last a second.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

_OVERRIDES = "# overrides: "


class RunFolder:
    """Reads a run's records, and writes them while ``lock`` is held.

    Every writing method raises ``FolderError`` if this process does not hold the lock, the disk is full or
    the folder can't be written; what was there before is then unchanged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = FolderLock(self.path)

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints go; ``start`` makes it."""
        return self.path / "checkpoint"

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
            config: the plain config. What can't change the trajectory (see ``schema.identity``) may
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
        if fresh and self._has_records():
            self._move_aside()
        recorded = self.read_config()
        if recorded is None and self._has_records():
            raise FolderError(
                f"{self.path}: holds records but no config.yaml, so nobody can say which run they belong to. "
                "Choose another folder, or fresh=true to start anew and keep these beside it"
            )
        if recorded is not None:
            _check_same_run(self.path, recorded, config)
        self._prepare(config, overrides, environment or {})
        return recorded is not None

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
                "Restore the file, or start anew with fresh=true"
            )
        if self._metrics.exists():
            with folder_errors(self._metrics):
                os.truncate(self._metrics, sum(map(len, lines[:num_lines])))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The evaluations so far, without a torn last line.

        Raises:
            FolderError: a line within the file is damaged; names it.
        """
        metrics = []
        for number, line in enumerate(whole_lines(self._metrics), start=1):
            try:
                metrics.append(json.loads(line))
            except ValueError as error:
                raise FolderError(f"{self._metrics}: line {number} is damaged ({error})") from error
        return metrics

    def sync_metrics(self) -> None:
        """Make the lines so far survive a power cut: before a checkpoint relies on them."""
        if self._metrics.exists():
            with folder_errors(self._metrics), self._metrics.open("rb") as file:
                os.fsync(file.fileno())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace ``summary.json`` atomically; a final one also survives a power cut."""
        self._check_writer()
        final = summary.get("status") != "running"
        if final:
            self.sync_metrics()
        write_json(self._summary, summary, durable=final)

    def read_summary(self) -> dict[str, Any] | None:
        """The summary, or None before the first.

        Raises:
            FolderError: the file is damaged.
        """
        if not self._summary.exists():
            return None
        summary = read_json(self._summary)
        if not isinstance(summary, dict) or "status" not in summary:
            raise FolderError(
                f"{self._summary}: damaged (no summary of a run). Restore it, or start anew with fresh=true"
            )
        return summary

    def read_config(self) -> dict[str, Any] | None:
        """The plain config the run was started with, or None in a new folder.

        Raises:
            FolderError: the file is damaged.
        """
        path = self.path / "config.yaml"
        if not path.exists():
            return None
        with folder_errors(path):
            text = path.read_text()
        try:
            return dict(yaml.load(text, _Loader))
        except (yaml.YAMLError, TypeError, ValueError) as error:
            raise FolderError(
                f"{path}: damaged ({error}). Restore it, or start anew with fresh=true"
            ) from error

    def read_overrides(self) -> list[str]:
        """What was typed for the run, from the first line of ``config.yaml``."""
        path = self.path / "config.yaml"
        with folder_errors(path):
            first = path.read_text().splitlines()[0]
        return list(json.loads(first.removeprefix(_OVERRIDES))) if first.startswith(_OVERRIDES) else []

    def write_traceback(self, traceback: str) -> None:
        """Add a crash to ``traceback.txt``; those of earlier attempts stay."""
        self._check_writer()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S %z")
        append(self.path / "traceback.txt", f"--- {stamp} ---\n{traceback.rstrip()}\n")

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def _summary(self) -> Path:
        return self.path / "summary.json"

    def _check_writer(self) -> None:
        if not self._lock.is_mine():
            raise FolderError(
                f"{self.path}: this process does not hold its lock (another one took the folder over while "
                "this one slept, or removed it). Nothing was written"
            )

    def _has_records(self) -> bool:
        names = ("config.yaml", "metrics.jsonl", "summary.json")
        if any((self.path / name).exists() for name in names):
            return True
        return self.checkpoint_dir.is_dir() and any(self.checkpoint_dir.iterdir())

    def _move_aside(self) -> None:
        """Rename the whole folder, which no kill can leave half done, and take a new one in its place."""
        number = 1
        while (old := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        with folder_errors(self.path):
            self.path.rename(old)
            (old / "lock").unlink(missing_ok=True)
        self._lock.release()
        self._lock.acquire()

    def _prepare(self, config: dict[str, Any], overrides: Sequence[str], environment: dict[str, Any]) -> None:
        with folder_errors(self.path):
            self.checkpoint_dir.mkdir(exist_ok=True)
            for folder in (self.path, self.checkpoint_dir):
                for leftover in folder.glob(".*.tmp"):
                    leftover.unlink(missing_ok=True)
        path = self.path / "environment.json"
        if path.exists():
            last = read_json(path)
            earlier = last.pop("earlier", [])
            environment = {**environment, "earlier": earlier if environment == last else [*earlier, last]}
        write_json(path, environment, durable=False)
        header = f"{_OVERRIDES}{json.dumps(list(overrides))}\n"
        text = yaml.dump(config, Dumper=_Dumper, sort_keys=False)
        write_text(self.path / "config.yaml", header + text, durable=False)


def _check_same_run(path: Path, recorded: dict[str, Any], config: dict[str, Any]) -> None:
    lines = differences(identity(recorded), identity(config)) + smaller_budgets(
        recorded, config, COUNTED_BUDGETS
    )
    if lines:
        raise FolderError(
            f"{path}: holds a run with another config:\n  "
            + "\n  ".join(lines)
            + "\nSet these back, choose another folder (hydra.run.dir=...), or start anew with fresh=true "
            "(the old folder is kept beside the new one)"
        )
