"""The process behind ``tracking``: follows the folders that its input names, for W&B.

All that it knows of a run is in the run's folder. ``wandb.json`` there keeps the run's id, so that every
piece of an interrupted run continues the same W&B run, and how far its history was sent, so that nothing is
sent twice. W&B's own files go to the folder's ``wandb/``; ``wandb sync`` uploads those of offline runs.
"""

import json
import os
import select
import signal
import uuid
from pathlib import Path
from typing import Any

from adaecho.errors import warn
from adaecho.records.files import read_json, read_yaml, whole_lines, write_json
from adaecho.records.lock import is_held
from adaecho.records.status import Status

# How long W&B may take to upload the end of a run.
UPLOAD_WAIT_S = 45
_POLL_S = 0.5
# After the end of its input this process ends, whatever W&B's service does.
LAST_WORDS_S = 55


class Piece:
    """A folder that was named, as a run in W&B: from start or resumption to its close.

    It is opened when the folder is over, online already at the first evaluation.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._order, self._folder = order, Path(order["folder"])
        self._file = self._folder / "wandb.json"
        self._lines_read = 0
        self._sent = -1  # fresh examples of the last evaluation that the tracker has
        self._run: Any = None

    def is_over(self) -> bool:
        """Send what is new; whether the folder's lock has been released, and nothing more will come."""
        over = not is_held(self._folder)  # before the folder is read for the last time
        if self._run is None and (self._folder / "metrics.jsonl").exists():
            # Not before: its import takes the processor seconds, as do the run's first steps. Also
            # offline, so that it is ready at the run's end.
            import wandb  # noqa: F401

            if self._order["mode"] != "offline":
                self._begin()
        if self._run is not None:
            self._send_history()
        return over

    def close(self) -> None:
        """Send what is left, and end this piece."""
        if self._run is None:
            self._begin()
        self._send_history()
        self._finish()
        self._state["fresh_examples"] = self._sent
        self._save()

    def _begin(self) -> None:
        self._state = _state(self._file, self._order["project"], self._order["entity"])
        # The id is on disk before W&B hears of it: a kill in between leaves no second run.
        self._save()
        self._open(self._order)

    def _save(self) -> None:
        write_json(self._file, self._state, durable=False)

    def _open(self, order: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            dir=self._folder,
            id=self._state["id"],
            resume="allow",
            config=_config(self._folder),
            settings=_settings(wandb),
            **{key: order[key] for key in ("project", "entity", "mode", "group", "name")},
        )
        self._run.define_metric("fresh_examples")
        self._run.define_metric("*", step_metric="fresh_examples")
        # Online the server may know more than the folder says, after a kill before the folder was told.
        self._sent = max(self._state["fresh_examples"], self._run.starting_step - 1)

    def _send_history(self) -> None:
        """Send the evaluations that the tracker lacks, each at the step of its number of fresh examples.

        A resumed run repeats the evaluations after its last checkpoint, exactly; they are there already.
        """
        lines = whole_lines(self._folder / "metrics.jsonl")
        for line in lines[self._lines_read :]:
            metrics = json.loads(line)
            if metrics["fresh_examples"] > self._sent:
                self._sent = metrics["fresh_examples"]
                self._run.log(metrics, step=self._sent)
        self._lines_read = len(lines)

    def _finish(self) -> None:
        """Send the summary and the pictures (those of a sweep's folder)."""
        import wandb

        summary = _summary(self._folder)
        for path in sorted(self._folder.glob("*.png")):
            self._run.log({path.stem: wandb.Image(str(path))})
        self._run.summary.update(summary)
        self._run.finish(exit_code=1 if summary.get("status") == Status.FAILED else 0)


def _state(path: Path, project: str, entity: str | None) -> dict[str, Any]:
    """What the folder knows of its run in the tracker; another project has none of it."""
    where = {"project": project, "entity": entity}
    if path.exists():
        state = dict(read_json(path))
        if {key: state[key] for key in where} == where:
            return state
    return {"id": uuid.uuid4().hex[:12], **where, "fresh_examples": -1}


def _config(folder: Path) -> dict[str, Any]:
    """A run's config, or a sweep's design."""
    if (folder / "config.yaml").exists():
        return dict(read_yaml(folder / "config.yaml"))
    return dict(read_json(folder / "design.json")) if (folder / "design.json").exists() else {}


def _summary(folder: Path) -> dict[str, Any]:
    """A run's summary, or a sweep's outcome by arm."""
    if (folder / "summary.json").exists():
        return dict(read_json(folder / "summary.json"))
    if (folder / "outcome.json").exists():
        return {arm["arm"]: arm for arm in read_json(folder / "outcome.json")}
    return {}


def _settings(wandb: Any) -> Any:
    """Nothing but the run: no console, code, git, packages or machine, which ``environment.json`` has."""
    return wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_disable_stats=True,
        x_save_requirements=False,
        finish_timeout=UPLOAD_WAIT_S,
    )


def _follow() -> None:
    """Follow folders until they are over, and to the end of the input, or an empty line in it."""
    followed: dict[tuple[str, ...], Piece] = {}
    unread, ended = b"", False
    while not ended:
        if select.select([0], [], [], _POLL_S if followed else None)[0]:
            data = os.read(0, 65536)
            *lines, unread = (unread + data).split(b"\n")
            ended = not data or b"" in lines
            for order in map(json.loads, filter(None, lines)):
                key = tuple(str(order[name]) for name in ("folder", "project", "entity"))
                if key not in followed:
                    followed[key] = Piece(order)
        for key, one in list(followed.items()):
            if one.is_over() or ended:
                del followed[key]
                one.close()
    signal.alarm(LAST_WORDS_S)


def main() -> None:
    """Follow; at the first trouble say so once and leave the rest of the runs alone."""
    os.nice(10)
    os.environ["WANDB_SILENT"] = "true"  # it would show where it logs in, with user and password
    try:
        if "?" in os.environ.get("WANDB_BASE_URL", ""):
            raise ValueError("WANDB_BASE_URL has a query, which W&B writes into its logs; leave that out")
        _follow()
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        warn(f"tracking: {reason}. The run goes on and its folder is complete; tracking=none is silent")


if __name__ == "__main__":
    main()
