"""The process behind ``tracking``: follows a run's folder, or a sweep's and those of its trials, for W&B.

All that it knows of a run is in the run's folder. ``wandb.json`` there keeps the run's id, so that every
piece of an interrupted run continues the same W&B run, and how far it was sent, so that nothing is sent
twice. W&B's own files lie where its users look for them, in ``wandb/`` of the current folder or
``WANDB_DIR``: what ``wandb sync`` uploads from there is one's own, while a run's folder may be anyone's.
"""

import json
import os
import select
import signal
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from adaecho.errors import warn
from adaecho.records.files import check_no_link, read_json, read_yaml, whole_lines, write_json
from adaecho.records.folder import RunFolder
from adaecho.records.lock import is_held
from adaecho.records.status import Status
from adaecho.records.trials import digest

# How long W&B may take to upload the end of a run.
UPLOAD_WAIT_S = 45
_POLL_S = 0.5
# After the end of its input this process ends, whatever W&B's service does.
LAST_WORDS_S = 55


class Piece:
    """A folder as a run in W&B, from where it was left to its close.

    It is opened when the folder is over, online already at the first evaluation.

    Raises:
        FolderError: one of its files or folders is a link, as in one that was received from others.
    """

    def __init__(self, folder: Path, root: Path, where: dict[str, Any]) -> None:
        self._folder, self._root, self._where = folder, root, where
        self._file = folder / "wandb.json"
        self._lines_read = 0
        self._run: Any = None
        RunFolder(folder).check_links()  # W&B writes through them, and what they lead to would be sent
        for name in ("design.json", "outcome.json"):
            check_no_link(folder / name)
        self.state = _state(self._file, where)

    def follow(self) -> None:
        """Send what is new of a run that goes on."""
        if self._run is None and (self._folder / "metrics.jsonl").exists():
            # Not before: its import takes the processor seconds, as do the run's first steps. Also
            # offline, so that it is ready at the run's end.
            import wandb  # noqa: F401

            if self._where["mode"] != "offline":
                self._open()
        if self._run is not None:
            self._send_history()

    def close(self) -> None:
        """Send what is left, and end this piece."""
        self.state["as_of"] = _as_of(self._folder)
        if self._run is None:
            self._open()
        self._send_history()
        self._finish()
        write_json(self._file, self.state, durable=False)

    def _open(self) -> None:
        import wandb

        # The id is on disk before W&B hears of it: a kill in between leaves no second run.
        write_json(self._file, {**self.state, "as_of": None}, durable=False)
        in_sweep = _is_sweep(self._root)
        self._run = wandb.init(
            id=self.state["id"],
            resume="allow",
            config=_config(self._folder),
            settings=_settings(wandb),
            group=str(self._root) if in_sweep else None,
            name="outcome"
            if _is_sweep(self._folder)
            else "/".join(self._folder.parts[-3 if in_sweep else -1 :]),
            **self._where,
        )
        self._run.define_metric("fresh_examples")
        self._run.define_metric("*", step_metric="fresh_examples")
        # Online the server may know more than the folder says, after a kill before the folder was told.
        self.state["fresh_examples"] = max(self.state["fresh_examples"], self._run.starting_step - 1)

    def _send_history(self) -> None:
        """Send the evaluations that the tracker lacks, each at the step of its number of fresh examples.

        A resumed run repeats the evaluations after its last checkpoint, exactly; they are there already.
        """
        lines = whole_lines(self._folder / "metrics.jsonl")
        for line in lines[self._lines_read :]:
            metrics = _inert(json.loads(line))
            if metrics["fresh_examples"] > self.state["fresh_examples"]:
                self.state["fresh_examples"] = metrics["fresh_examples"]
                self._run.log(metrics, step=metrics["fresh_examples"])
        self._lines_read = len(lines)

    def _finish(self) -> None:
        """Send the summary and the pictures (those of a sweep's folder)."""
        summary = _summary(self._folder)
        for path in sorted(one for one in self._folder.glob("*.png") if not one.is_symlink()):
            self._send_picture(path)
        self._run.summary.update(summary)
        self._run.finish(exit_code=1 if summary.get("status") == Status.FAILED else 0)

    def _send_picture(self, path: Path) -> None:
        """A PNG alone: Pillow goes by content, and hands PostScript to Ghostscript, which runs it."""
        import wandb
        from PIL import Image

        with suppress(OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # as Pillow does
            with Image.open(path, formats=["PNG"]) as picture:
                picture.load()
            self._run.log({path.stem: wandb.Image(picture)})


def _state(path: Path, where: dict[str, Any]) -> dict[str, Any]:
    """What the folder knows of its run in the tracker; another project has none of it, nor has a copy."""
    own = {key: where[key] for key in ("project", "entity")}
    own["place"] = digest(bytes(path.parent.resolve()))[:16]
    if path.exists():
        state = dict(read_json(path))
        if {key: state.get(key) for key in own} == own and str(state.get("id", "")).isalnum():
            return state
    return {"id": uuid.uuid4().hex[:12], **own, "fresh_examples": -1, "as_of": None}


def _as_of(folder: Path) -> int | None:
    """Changes with what a folder has to tell at its end; None while it has nothing."""
    for name in ("summary.json", "outcome.json"):
        with suppress(FileNotFoundError):
            return (folder / name).stat().st_mtime_ns
    return None


def _inert(value: Any) -> Any:
    """A record without what W&B takes for an artifact: it asks the host that a text names, with one's key."""
    if isinstance(value, dict):
        return {key: _inert(inner) for key, inner in value.items() if key != "_type"}
    if isinstance(value, list):
        return [_inert(inner) for inner in value]
    return value.replace("wandb-artifact:", "wandb artifact:") if isinstance(value, str) else value


def _config(folder: Path) -> dict[str, Any]:
    """A run's config, or a sweep's design."""
    if (folder / "config.yaml").exists():
        return dict(_inert(read_yaml(folder / "config.yaml")))
    return dict(_inert(read_json(folder / "design.json"))) if (folder / "design.json").exists() else {}


def _summary(folder: Path) -> dict[str, Any]:
    """A run's summary, or a sweep's outcome by arm."""
    if (folder / "summary.json").exists():
        return dict(_inert(read_json(folder / "summary.json")))
    if (folder / "outcome.json").exists():
        return {arm["arm"]: arm for arm in _inert(read_json(folder / "outcome.json"))}
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


def _trials(root: Path) -> list[Path]:
    """The trials of a sweep that have begun; not those that were set aside."""
    found = (path.parent for path in root.glob("*/*/*/config.yaml")) if _is_sweep(root) else ()
    # One that a link leads to is no trial of this sweep.
    return sorted(
        folder for folder in found
        if folder.name.isdigit() and not any(one.is_symlink() for one in (folder, *folder.parents[:2]))
    )  # fmt: skip


def _is_sweep(folder: Path) -> bool:
    return (folder / "design.json").exists()


def _follow(root: Path, where: dict[str, Any]) -> None:
    """Follow a folder until there is something to read, or nothing more will be."""
    pieces: dict[Path, Piece] = {}
    told: dict[Path, int | None] = {}
    ended, pause_s = False, _POLL_S
    while not ended:
        ended, begin = bool(select.select([0], [], [], pause_s)[0]), time.monotonic()
        for folder in [*_trials(root), root]:
            over = ended or (folder != root and not is_held(folder))  # before it is read for the last time
            now = _as_of(folder)
            if now is None or told.get(folder) == now:
                continue
            if folder not in pieces:
                pieces[folder] = Piece(folder, root, where)
            if not over:
                pieces[folder].follow()
                continue
            if pieces[folder].state["as_of"] != now:
                pieces[folder].close()
            del pieces[folder]
            told[folder] = now
        pause_s = max(
            _POLL_S, 10 * (time.monotonic() - begin)
        )  # a look at thousands of folders takes a while
    signal.alarm(LAST_WORDS_S)


def main(folder: str, mode: str, project: str, entity: str | None = None) -> None:
    """Follow; at the first trouble say so once and leave the rest of the runs alone."""
    os.nice(10)
    os.environ["WANDB_SILENT"] = "true"  # it would show where it logs in, with user and password
    if mode == "offline":  # what needs no key can send none, wherever a record would have it sent
        os.environ.pop("WANDB_API_KEY", None)
        os.environ["NETRC"] = os.devnull
    try:
        if "?" in os.environ.get("WANDB_BASE_URL", ""):
            raise ValueError("WANDB_BASE_URL has a query, which W&B writes into its logs; leave that out")
        _follow(Path(folder), {"mode": mode, "project": project, "entity": entity})
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        warn(f"tracking: {reason}. The run goes on and its folder is complete; tracking=none is silent")


if __name__ == "__main__":
    main(*sys.argv[1:])
