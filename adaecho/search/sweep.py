"""A sweep from design to outcome on this machine; the same command finishes what an earlier one left."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from adaecho.errors import FolderError, UserError
from adaecho.records.compare import differences, smaller_budgets
from adaecho.records.files import read_json, write_json
from adaecho.records.folder import RunFolder
from adaecho.search.design import Design, TrialId
from adaecho.search.execute import MAX_ATTEMPTS
from adaecho.search.optuna_export import OptunaExporter
from adaecho.search.pool import Ended, Pool
from adaecho.search.progress import Progress
from adaecho.search.state import FINISHED, SweepState

_BUDGETS = ("trials", "repeats", "max_diverged")
_MAX_LINES = 20
_REFRESH_S = 0.5


def record_design(design: Design, folder: Path) -> None:
    """Write ``design.json``, or check that the folder holds this design; more trials or repeats may be added.

    Raises:
        FolderError: the folder holds another design (with a diff).
    """
    path = folder / "design.json"
    new = design.to_plain()
    if not path.exists() and any(folder.glob("*/*/*/config.yaml")):
        raise FolderError(
            f"{folder}: holds trials but no design.json, so nobody knows of which sweep; choose another "
            "hydra.sweep.dir=, or fresh=true to start anew and keep the old folder beside it"
        )
    if path.exists():
        read_design(folder)
        old = read_json(path)
        refused = smaller_budgets(old["search"], new["search"], _BUDGETS)
        refused += differences(_comparable(old), _comparable(new))
        if refused:
            shown = "\n".join(f"  {line}" for line in refused[:_MAX_LINES])
            raise FolderError(
                f"{folder}: holds another design:\n{shown}\nRun that design again, choose another "
                "hydra.sweep.dir=, or fresh=true to start anew and keep the old folder beside it"
            )
    write_json(path, new)


def read_design(folder: Path) -> Design:
    """The design that a sweep's folder records.

    Raises:
        FolderError: no sweep was begun there, or its record is damaged.
    """
    path = folder / "design.json"
    if not path.exists():
        raise FolderError(f"{folder}: no sweep, for it has no design.json; give the folder that -m printed")
    try:
        return Design.from_plain(read_json(path))
    except (KeyError, TypeError, AttributeError) as error:
        raise FolderError(
            f"{path}: is no sweep's design ({type(error).__name__}: {error}). Restore it, or start anew with "
            "fresh=true"
        ) from error


def _comparable(plain: dict[str, Any]) -> dict[str, Any]:
    """What may not change: all but budgets, spelling, and the points that a longer design has more of."""
    return {
        "search.seed": plain["search"]["seed"],
        "search.stop_hopeless": plain["search"].get("stop_hopeless", False),
        "arms": sorted(plain["arms"]),
        **{
            name: {
                "config": arm["config"],
                "axes": arm["axes"],
                "first point": next((points[0] for points in arm["points"]), None),
            }
            for name, arm in plain["arms"].items()
        },
    }


def move_aside(folder: Path) -> None:
    """Rename a sweep's folder to ``<name>.old-<n>``, so that a new one can start in its place.

    The caller holds the folder's lock, which does not move along.
    """
    number = 1
    while (old := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(old)
    (old / "lock").unlink(missing_ok=True)


class LocalSweep:
    """Runs the missing trials of a sweep on a pool of local workers.

    Args:
        state: of the sweep.
        pool: of workers.
        progress: told about every trial.
        group: the tracker's name for the sweep.
    """

    def __init__(self, state: SweepState, pool: Pool, progress: Progress, group: str) -> None:
        self._state, self._pool, self._progress, self._group = state, pool, progress, group
        self._arms = {arm.name: arm for arm in state.design.arms}
        self._exporter = OptunaExporter(state)
        self._attempts: Counter[TrialId] = Counter()
        self._running: dict[TrialId, float] = {}

    def run(self) -> None:
        """Until nothing is missing that could still be run.

        Raises:
            UserError: a trial met something that only the user can mend; running ones are checkpointed.
        """
        while True:
            for trial in self._next_trials():
                self._submit(trial)
            if not self._running:
                return
            self._progress.show(self._running)
            for ended in self._pool.wait(_REFRESH_S):
                self._record(ended)
            self._exporter.update()

    def _next_trials(self) -> list[TrialId]:
        if not self._pool.num_free:
            return []
        waiting = [
            trial
            for trial in self._state.missing()
            if trial not in self._running and self._attempts[trial] < MAX_ATTEMPTS
        ]
        return waiting[: self._pool.num_free]

    def _submit(self, trial: TrialId) -> None:
        arm, design = self._arms[trial.arm], self._state.design
        self._running[trial] = time.monotonic()
        self._pool.submit(
            {
                "trial": [trial.arm, trial.repeat, trial.index],
                "folder": str(self._state.trial_folder(trial)),
                "config": design.trial_config(arm, trial.repeat, trial.index),
                "overrides": design.trial_overrides(arm, trial.repeat, trial.index),
                "group": self._group,
            }
        )

    def _record(self, ended: Ended) -> None:
        trial = TrialId(*ended.job["trial"])
        duration_s = time.monotonic() - self._running.pop(trial)
        if ended.users:
            raise UserError(f"trial {trial}: {ended.error}")
        note = ""
        if ended.error is not None:
            self._attempts[trial] += 1
            note = f"failed, attempt {self._attempts[trial]} of {MAX_ATTEMPTS} ({ended.error})"
            if self._attempts[trial] == MAX_ATTEMPTS:
                record_failure(self._state.trial_folder(trial), ended.error)
        elif ended.status == "preempted":
            raise KeyboardInterrupt
        self._state.reread(trial)
        self._progress.ended(trial, duration_s, note)


def record_failure(folder: Path, error: str) -> None:
    """See that a failed trial's summary says so, also where its process died without a word."""
    run = RunFolder(folder)
    with run.lock():
        summary = run.read_summary() or {"to_target": None, "best": None}
        # A folder with records but no config could not be continued.
        if run.read_config() is not None and summary.get("status") not in FINISHED | {"failed"}:
            run.write_summary({**summary, "status": "failed", "error": error})
