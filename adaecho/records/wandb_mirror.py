"""Copy the records of a run, or of a sweep and its trials, to Weights & Biases (W&B) in a separate process.

Each run folder becomes one run in W&B. In online mode, evaluations are sent as soon as they are recorded. In
offline mode, a run is written to disk when it has ended.
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

# Before it ends, a command waits at most this long for the mirror. W&B stops its upload earlier, after
# _UPLOAD_WAIT_S, so that its files are complete and `wandb sync` can upload them later.
FINISH_WAIT_S = 60.0
_UPLOAD_WAIT_S = 45
_POLL_S = 1.0
_ID_FILE = "wandb_id"


@contextmanager
def exported(tracking: TrackingConfig, folder: Path) -> Iterator[None]:
    """Mirror a folder to W&B while the ``with`` block runs. If W&B fails, only a warning is printed.

    Args:
        folder: the folder of a run, or of a sweep that already contains its ``design.json``.
    """
    if tracking.kind == "none":
        yield
        return
    where = [str(folder), tracking.mode, tracking.project, *([tracking.entity] if tracking.entity else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "adaecho.records.wandb_mirror", *where],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C does not stop the mirror before the run has ended
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
    """The W&B run that mirrors one folder. It stays open until ``finish`` is called."""

    def __init__(self, folder: Path, root: Path, where: dict[str, Any]) -> None:
        import wandb

        self._folder, self._id, self._sent = folder, folder / _ID_FILE, 0
        if not self._id.exists():
            write_text(self._id, uuid.uuid4().hex[:12])
        os.utime(self._id, (0, 0))  # marks the folder as not mirrored until ``finish`` is called
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
        """Send new evaluations to W&B, with the number of fresh examples as W&B's step."""
        lines = RunFolder(self._folder).read_metrics()
        for line in lines[self._sent :]:
            # A resumed run repeats evaluations that W&B already has.
            if line["fresh_examples"] >= self._run.starting_step:
                self._run.log(line, step=line["fresh_examples"])
        self._sent = len(lines)

    def finish(self) -> None:
        """Send the remaining evaluations, the summary and any figures, and close the W&B run."""
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


def _is_sweep(folder: Path) -> bool:
    return (folder / "design.json").exists()


def _has_news(folder: Path) -> bool:
    """Return whether the results of a folder have changed since they were last sent to W&B."""
    records = [path for name in ("summary.json", "outcome.json") if (path := folder / name).exists()]
    id_file = folder / _ID_FILE
    mirrored = id_file.stat().st_mtime_ns if id_file.exists() else 0
    return any(path.stat().st_mtime_ns > mirrored for path in records)


def _follow(root: Path, where: dict[str, Any]) -> None:
    """Mirror a run or sweep until the training command ends."""
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
    """Mirror a folder. The first error ends the mirroring with a warning."""
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
