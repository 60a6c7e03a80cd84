"""The process behind ``tracking``: reads orders from its input, and shows run folders to W&B.

All that it knows of a run is in the run's folder. ``wandb.json`` there keeps the run's id, so that every
piece of an interrupted run continues the same W&B run, and how far its history was sent, so that nothing is
sent twice. W&B's own files go to the folder's ``wandb/``; ``wandb sync`` uploads those of offline runs.
"""

import json
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from adaecho.records.files import read_json, whole_lines, write_json

# How long W&B may take to upload the end of a run.
UPLOAD_WAIT_S = 45
# After the last order this process ends, whatever W&B's service does.
LAST_WORDS_S = 55


class Piece:
    """One opened W&B run on one run folder, from start or resumption to its close."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._folder = Path(order["folder"])
        self._state = _state(self._folder / "wandb.json", order["project"], order["entity"])
        self._lines_read = 0
        # The id is on disk before W&B hears of it: a kill in between leaves no second run.
        self._save()
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

    def send_history(self) -> None:
        """Send the evaluations that W&B lacks, each at the step of its number of fresh examples.

        A resumed run repeats the evaluations after its last checkpoint, exactly; they are there already.
        """
        lines = whole_lines(self._folder / "metrics.jsonl")
        for line in lines[self._lines_read :]:
            metrics = json.loads(line)
            if metrics["fresh_examples"] > self._sent:
                self._sent = metrics["fresh_examples"]
                self._run.log(metrics, step=self._sent)
        self._lines_read = len(lines)

    def close(self, images: dict[str, str]) -> None:
        """Send the summary and the pictures, and end this piece."""
        import wandb

        summary = _summary(self._folder)
        for name, path in images.items():
            self._run.log({name: wandb.Image(path)})
        self._run.summary.update(summary)
        self._run.finish(exit_code=1 if summary.get("status") == "failed" else 0)
        self._state["fresh_examples"] = self._sent
        self._save()

    def _save(self) -> None:
        write_json(self._folder / "wandb.json", self._state, durable=False)


def _state(path: Path, project: str, entity: str | None) -> dict[str, Any]:
    """What the folder knows of its W&B run; another project has none of it."""
    where = {"project": project, "entity": entity}
    if path.exists():
        state = dict(read_json(path))
        if {key: state[key] for key in where} == where:
            return state
    return {"id": uuid.uuid4().hex[:12], **where, "fresh_examples": -1}


def _config(folder: Path) -> dict[str, Any]:
    """A run's config, or a sweep's design."""
    if (folder / "config.yaml").exists():
        return dict(yaml.safe_load((folder / "config.yaml").read_text()))
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


def _serve() -> None:
    """Carry out orders until the input ends or holds an empty line."""
    pieces: dict[str, Piece] = {}
    for line in sys.stdin:
        if not line.strip():
            break
        order = json.loads(line)
        folder = order["folder"]
        if folder not in pieces:
            pieces[folder] = Piece(order)
        pieces[folder].send_history()
        if order["final"]:
            pieces.pop(folder).close(order["images"])
    signal.alarm(LAST_WORDS_S)


def main() -> None:
    """Serve; at the first trouble say so once and leave the rest of the runs alone."""
    os.nice(10)
    try:
        import wandb  # noqa: F401  # here, so that it is ready when the first run ends

        _serve()
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        print(
            f"warning: W&B: {reason}. The run goes on and its folder is complete; tracking=none is silent",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
