"""The mirror in W&B: a process of its own that follows a run's folder, or a sweep's and those of its trials.

Importing W&B and opening a run takes seconds of processor time, a server may not answer, and a hang or crash
of either must cost no training. So the command starts ``python -m adaecho.records.tracking FOLDER ...`` at a
low priority, which reads the records (the truth) and sends what is new. Each folder is one run in W&B, whose
id stays in it: online every evaluation is followed, offline it is written, whole, when its process has ended.
"""

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adaecho.config.schema import TrackingConfig
from adaecho.errors import warn
from adaecho.masking import masked
from adaecho.records.files import read_json, read_yaml, write_text
from adaecho.records.folder import RunFolder
from adaecho.records.lock import is_held
from adaecho.records.status import Status

# How long the end of a command waits; W&B gives up an upload before, and `wandb sync` can do it later.
FINISH_WAIT_S = 60.0
_UPLOAD_WAIT_S, _LAST_WORDS_S = 45, 55
_POLL_S = 0.5


@contextmanager
def exported(tracking: TrackingConfig, folder: Path) -> Iterator[None]:
    """Have a folder mirrored while the block runs, and for a bounded time after it; never raises of its own.

    Args:
        tracking: where to, online or offline.
        folder: a run's, or a sweep's with its design.
    """
    if tracking.kind == "none":
        yield
        return
    where = [str(folder), tracking.mode, tracking.project, *([tracking.entity] if tracking.entity else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "adaecho.records.tracking", *where],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run; the mirror then still takes what there is
    )
    try:
        yield
    finally:
        try:
            process.communicate(b"\n", FINISH_WAIT_S)
            if process.returncode:
                warn(f"tracking: its process ended with {process.returncode}; the run folders are complete")
        except subprocess.TimeoutExpired:
            warn(f"tracking: not finished in {FINISH_WAIT_S:g} s; `wandb sync` can do it later")
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Mirror:
    """A folder's run in W&B, open from here to ``finish``."""

    def __init__(self, folder: Path, root: Path, where: dict[str, Any]) -> None:
        import wandb

        self._folder, self._id, self._sent = folder, _id_file(folder), 0
        if not self._id.exists():
            write_text(self._id, uuid.uuid4().hex[:12])
        os.utime(self._id, (0, 0))  # until ``finish``: not mirrored
        is_run = (folder / "config.yaml").exists()
        config = read_yaml(folder / "config.yaml") if is_run else read_json(folder / "design.json")
        self._run = wandb.init(
            id=self._id.read_text(),
            resume="allow",
            config=masked(config),
            group=str(root) if _is_sweep(root) else None,
            name="/".join(folder.parts[-3 if folder != root else -1 :]) if is_run else "outcome",
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, finish_timeout=_UPLOAD_WAIT_S
            ),
            **where,
        )

    def send(self) -> None:
        """Send the evaluations that are new, each at the step of its number of fresh examples.

        A resumed run repeats those after its last checkpoint exactly; the server has them already.
        """
        lines = RunFolder(self._folder).read_metrics()
        for line in lines[self._sent :]:
            if line["fresh_examples"] >= self._run.starting_step:
                self._run.log(line, step=line["fresh_examples"])
        self._sent = len(lines)

    def finish(self) -> None:
        """Send what is left: evaluations, the summary, and a sweep's figures."""
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
    """Whether a folder has ended, or goes on, after it was mirrored last."""
    records = [path for name in ("summary.json", "outcome.json") if (path := folder / name).exists()]
    mirrored = _id_file(folder).stat().st_mtime_ns if _id_file(folder).exists() else 0
    return any(path.stat().st_mtime_ns > mirrored for path in records)


def _follow(root: Path, where: dict[str, Any]) -> None:
    """Follow a folder, or a sweep's trials and its outcome, until there is something to read."""
    mirrors: dict[Path, Mirror] = {}
    ended, pause_s = False, _POLL_S
    while not ended:
        ended, begin = bool(select.select([0], [], [], pause_s)[0]), time.monotonic()
        if ended:
            signal.alarm(_LAST_WORDS_S)  # whatever W&B's service does
        trials = [path.parent for path in root.glob("*/*/*/summary.json")] if _is_sweep(root) else []
        for folder in [*(one for one in trials if one.name.isdigit()), root]:
            is_over = ended or (folder != root and not is_held(folder))  # before it is read for the last time
            if folder not in mirrors and _has_news(folder) and (is_over or where["mode"] == "online"):
                mirrors[folder] = Mirror(folder, root, where)
            if folder in mirrors:
                mirrors[folder].send()
                if is_over:
                    mirrors.pop(folder).finish()
        pause_s = max(
            _POLL_S, 10 * (time.monotonic() - begin)
        )  # a look at thousands of folders takes a while


def main(folder: str, mode: str, project: str, entity: str | None = None) -> None:
    """Follow; at the first trouble say so once and leave the rest of the runs alone."""
    os.nice(10)
    try:
        _follow(Path(folder), {"mode": mode, "project": project, "entity": entity})
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warn(f"tracking: {reason}. The run goes on and its folder is complete; tracking=none is silent")


if __name__ == "__main__":
    main(*sys.argv[1:])
