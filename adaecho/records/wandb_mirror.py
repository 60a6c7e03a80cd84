"""The mirror in W&B: a separate process that follows the folder of a run, or of a sweep and its trials.

Importing W&B and opening a run take seconds, and a server may not answer. Neither a hang nor a crash of W&B
may slow or stop training. So the command starts ``python -m adaecho.records.wandb_mirror FOLDER ...`` at a
low priority, which reads the records and sends new ones. Each folder is one run in W&B, and its id stays in
the folder. Online the mirror sends every evaluation; offline it writes the complete run when its process has
ended.
"""

import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adaecho.config.schema import TrackingConfig
from adaecho.errors import redact_urls, warn
from adaecho.records.files import read_json, read_yaml, write_text
from adaecho.records.folder import RunFolder, is_held
from adaecho.records.trials import Status

# How long the end of a command waits. W&B stops an upload before that, and `wandb sync` can repeat it.
FINISH_WAIT_S = 60.0
_UPLOAD_WAIT_S = 45
_POLL_S = 1.0


@contextmanager
def exported(tracking: TrackingConfig, folder: Path) -> Iterator[None]:
    """Mirror a folder during the block and for a bounded time after it; a failure is only a warning.

    Args:
        tracking: project, entity, and whether online or offline.
        folder: of a run, or of a sweep with its design.
    """
    if tracking.kind == "none":
        yield
        return
    where = [str(folder), tracking.mode, tracking.project, *([tracking.entity] if tracking.entity else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "adaecho.records.wandb_mirror", *where],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C must not end the mirror before the run
    )
    try:
        yield
    finally:
        try:
            process.communicate(b"\n", FINISH_WAIT_S)
            if process.returncode:
                warn(f"tracking: W&B's process ended with {process.returncode}; the run folders are complete")
        except subprocess.TimeoutExpired:
            warn(f"tracking: not finished in {FINISH_WAIT_S:g} s; `wandb sync` can finish the upload")
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Mirror:
    """The W&B run of one folder, open until ``finish``."""

    def __init__(self, folder: Path, root: Path, where: dict[str, Any]) -> None:
        import wandb

        self._folder, self._id, self._sent = folder, _id_file(folder), 0
        if not self._id.exists():
            write_text(self._id, uuid.uuid4().hex[:12])
        os.utime(self._id, (0, 0))  # marks the folder as not mirrored until ``finish``
        is_run = (folder / "config.yaml").exists()
        config = read_yaml(folder / "config.yaml") if is_run else read_json(folder / "design.json")
        self._run = wandb.init(
            id=self._id.read_text(),
            resume="allow",
            config=redact_urls(config),
            group=str(root) if _is_sweep(root) else None,
            name="/".join(folder.parts[-3 if folder != root else -1 :]) if is_run else "outcome",
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, finish_timeout=_UPLOAD_WAIT_S
            ),
            **where,
        )

    def send(self) -> None:
        """Send the new evaluations; W&B's step is the number of fresh examples.

        A resumed run repeats the evaluations after its last checkpoint exactly, and the server has them.
        """
        lines = RunFolder(self._folder).read_metrics()
        for line in lines[self._sent :]:
            if line["fresh_examples"] >= self._run.starting_step:
                self._run.log(line, step=line["fresh_examples"])
        self._sent = len(lines)

    def finish(self) -> None:
        """Send the remaining evaluations, the summary and the figures of a sweep."""
        import wandb

        self.send()
        summary = RunFolder(self._folder).read_summary()
        if summary is None:
            summary = {arm["arm"]: arm for arm in read_json(self._folder / "outcome.json")}
        for path in sorted(self._folder.glob("*.png")):
            self._run.log({path.stem: wandb.Image(str(path))})
        self._run.summary.update(summary)
        self._run.finish(exit_code=1 if summary.get("status") == Status.FAILED else 0)
        self._id.touch()


def _id_file(folder: Path) -> Path:
    return folder / "wandb_id"


def _is_sweep(folder: Path) -> bool:
    return (folder / "design.json").exists()


def _has_news(folder: Path) -> bool:
    """Whether the records of a folder changed after it was mirrored last."""
    records = [path for name in ("summary.json", "outcome.json") if (path := folder / name).exists()]
    mirrored = _id_file(folder).stat().st_mtime_ns if _id_file(folder).exists() else 0
    return any(path.stat().st_mtime_ns > mirrored for path in records)


def _follow(root: Path, where: dict[str, Any]) -> None:
    """Follow a folder, or a sweep's trials and outcome, until standard input has a line."""
    mirrors: dict[Path, Mirror] = {}
    ended = False
    while not ended:
        ended = bool(select.select([0], [], [], _POLL_S)[0])
        trials = [path.parent for path in root.glob("*/*/*/summary.json")] if _is_sweep(root) else []
        for folder in [*(one for one in trials if one.name.isdigit()), root]:
            is_over = ended or (folder != root and not is_held(folder))  # checked before the last read
            if folder not in mirrors and _has_news(folder) and (is_over or where["mode"] == "online"):
                mirrors[folder] = Mirror(folder, root, where)
            if folder in mirrors:
                mirrors[folder].send()
                if is_over:
                    mirrors.pop(folder).finish()


def main(folder: str, mode: str, project: str, entity: str | None = None) -> None:
    """Follow a folder; the first error ends the mirror with one warning."""
    os.nice(10)
    try:
        _follow(Path(folder), {"mode": mode, "project": project, "entity": entity})
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warn(
            f"tracking: {reason}. The run continues, and its folder is complete; tracking=none turns W&B off"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
