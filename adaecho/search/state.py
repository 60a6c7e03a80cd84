"""Where a sweep stands, by its run folders alone; what was refused or failed."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from adaecho.config.identity import changes
from adaecho.config.schema import value_at
from adaecho.errors import ChangedDataError, ConfigError, FolderError
from adaecho.records.environment import environment
from adaecho.records.files import check_no_link, read_json, record_errors, write_json
from adaecho.records.folder import RunFolder
from adaecho.records.lock import alone
from adaecho.records.outcome import cost_to_target, lowest
from adaecho.records.status import ENDED, FINISHED, Status
from adaecho.search.design import MAX_TRIALS, Arm, Design, TrialId, stable_hash


@dataclass
class Search:
    """One quasi-random search: the trials of one arm and repeat.

    It is complete when its first ``trials`` non-divergent points, by index, have ended. Every diverged trial
    calls for one more point, until ``max_diverged`` have been replaced; a failed one calls for none.

    Attributes:
        summaries: last known summary by index; without an entry a trial has not begun.
    """

    arm: Arm
    repeat: int
    trials: int
    max_diverged: int
    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)

    def status(self, index: int) -> str | None:
        """The status of a trial; None before it began."""
        return self.summaries.get(index, {}).get("status")

    def num_wanted(self) -> int:
        """How many points, from index 0 on, the search needs as far as is known; grows as trials diverge."""
        wanted, diverged = self.trials, -1
        while (
            diverged < (found := self.count(Status.DIVERGED, below=wanted)) and diverged < self.max_diverged
        ):
            diverged = found
            wanted = self.trials + min(diverged, self.max_diverged)
        return wanted

    def missing(self) -> Iterator[int]:
        """Indices that have not ended, in order; failed ones among them."""
        return (index for index in range(self.num_wanted()) if self.status(index) not in FINISHED)

    def count(self, status: str, below: int | None = None) -> int:
        """How many trials of the search have this status."""
        below = self.num_wanted() if below is None else below
        return sum(self.status(index) == status for index in range(below))

    def num_finished(self) -> int:
        """How many of the wanted trials have ended, diverged ones among them."""
        return sum(self.status(index) in FINISHED for index in range(self.num_wanted()))

    def is_complete(self) -> bool:
        """Whether it has its ``trials`` non-divergent trials."""
        return self.num_finished() - self.count(Status.DIVERGED) == self.trials

    def counted(self) -> set[int]:
        """Indices of the first ``trials`` non-divergent trials; one that has not ended keeps its place."""
        places = (index for index in range(self.num_wanted()) if self.status(index) != Status.DIVERGED)
        return {index for index in islice(places, self.trials) if self.status(index) in FINISHED}

    def best(self) -> int | None:
        """Fewest fresh examples to the target among its counted trials; None if none reached it."""
        return lowest(cost_to_target(self.summaries[index]) for index in self.counted())


class SweepState:
    """All searches of a design, with what their folders say."""

    def __init__(self, design: Design, folder: Path) -> None:
        self.design, self.folder = design, folder
        for name in ("workers", "slurm", "wandb", "design.json", "data.json"):
            check_no_link(folder / name)
        self.searches = {(arm.name, repeat): self._read(arm, repeat) for arm, repeat in design.searches()}

    def trial_folder(self, trial: TrialId) -> Path:
        """The run folder of a trial."""
        return self.folder / trial.arm / str(trial.repeat) / str(trial.index)

    def search(self, trial: TrialId) -> Search:
        """The search that a trial belongs to."""
        return self.searches[trial.arm, trial.repeat]

    def reread(self, trial: TrialId) -> dict[str, Any]:
        """Take over what the trial's folder says now; its summary, empty before it began."""
        summary = _read_summary(self.trial_folder(trial))
        if summary is not None:
            config = self.design.trial_config(self.search(trial).arm, trial.repeat, trial.index)
            _check_own(self.trial_folder(trial), summary, config)
            self.search(trial).summaries[trial.index] = summary
        return summary or {}

    def status(self, trial: TrialId) -> str | None:
        """The status of a trial; None before it began."""
        return self.search(trial).status(trial.index)

    def wanted(self) -> list[TrialId]:
        """Every trial that is needed as far as is known, ended ones among them."""
        return [
            TrialId(name, repeat, index)
            for (name, repeat), search in self.searches.items()
            for index in range(search.num_wanted())
        ]

    def refresh(self) -> None:
        """Take over what the folders of all trials that had not ended say now.

        One that turns out to have diverged calls for another, which may have ended meanwhile as well.
        """
        for (name, repeat), search in self.searches.items():
            read: set[int] = set()
            while unread := set(search.missing()) - read:
                for index in sorted(unread):
                    self.reread(TrialId(name, repeat, index))
                read |= unread

    def missing(self) -> list[TrialId]:
        """What is left to run: repeat by repeat, index by index, so that early results cover all arms."""
        trials = [
            (repeat, index, position, TrialId(name, repeat, index))
            for position, ((name, repeat), search) in enumerate(self.searches.items())
            for index in search.missing()
        ]
        return [trial for *_, trial in sorted(trials, key=lambda item: item[:3])]

    def _read(self, arm: Arm, repeat: int) -> Search:
        searched = bool(arm.axes)
        search = Search(
            arm,
            repeat,
            trials=self.design.trials if searched else 1,
            max_diverged=self.design.max_diverged if searched else 0,
        )
        root = self.folder / arm.name / str(repeat)
        check_no_link(root.parent)
        check_no_link(root)
        for folder in root.iterdir() if root.is_dir() else ():
            check_no_link(folder)
            RunFolder(folder).check_links()
            # An index beyond all would have as many points drawn.
            is_index = re.fullmatch("[0-9]{1,6}", folder.name) and int(folder.name) < MAX_TRIALS
            if is_index and (summary := _read_summary(folder)) is not None:
                _check_own(folder, summary, self.design.trial_config(arm, repeat, int(folder.name)))
                search.summaries[int(folder.name)] = summary
        return search


def has_finished(folder: Path) -> bool:
    """Whether any trial of a sweep's folder has ended, of whatever design."""
    summaries = (_read_summary(path.parent) for path in folder.glob("*/*/*/summary.json"))
    return any(one is not None and one["status"] in FINISHED for one in summaries)


class Pruner:
    """``search.prune``: asked after each evaluation of the trial in ``folder``; reads its siblings' folders.

    Nothing is shared but the records, so it works between processes and between hosts.
    """

    def __init__(self, folder: Path) -> None:
        self._search = folder.resolve().parent
        self._ended: set[str] = set()
        self._best: int | None = None

    def __call__(self, fresh_examples: int) -> bool:
        """Whether a sibling has reached the target with fewer fresh examples than this."""
        with os.scandir(self._search) as entries:
            siblings = [entry.name for entry in entries if entry.name.isdigit()]
        for name in siblings:
            if name not in self._ended:
                self._look_at(name)
        return self._best is not None and fresh_examples > self._best

    def _look_at(self, name: str) -> None:
        summary = _read_summary(self._search / name)
        if summary is None or summary["status"] not in FINISHED:
            return
        self._ended.add(name)
        self._best = lowest([self._best, cost_to_target(summary)])


class DataSeen:
    """Refuses a trial whose data, or own task's code, is not that of the trials before it.

    Their sweep would compare data, too. Its ``data.json`` holds digests of what trials have seen, for each
    choice of data among arms; what is mended before any trial has ended takes that place.

    Args:
        folder: of the trial.
        config: its.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._sweep, self._may_change = folder.resolve().parents[2], config["data"]["allow_changed"]
        # What names files; numbers are what a search varies.
        names = {key: value for key, value in config["task"].items() if isinstance(value, str)}
        self._choice = str(stable_hash(names, config["data"]["path"]))

    def __call__(self, digests: dict[str, str]) -> None:
        """Compare digests by the names of what they are of.

        Raises:
            ChangedDataError: one is another, or there are more files or fewer of the same choice.
            FolderError: ``data.json`` is damaged.
        """
        path = self._sweep / "data.json"
        with alone(self._sweep), record_errors(path):
            if not path.exists() and not self._may_change and has_finished(self._sweep):
                raise ChangedDataError(
                    f"{path}: is gone, and with it what data the trials before had; put it back, or start "
                    "anew with fresh=true, or go on with what is here by data.allow_changed=true"
                )
            seen = read_json(path) if path.exists() else {}
            then = {name: digest for choice in seen.values() for name, digest in choice.items()}
            same = seen.get(self._choice, digests)
            names = [
                name for name in {**digests, **same} if then.get(name, digests.get(name)) != digests.get(name)
            ]
            names += [name for name in digests if name not in same]
            if names and (self._may_change or not has_finished(self._sweep)):
                seen, names = {}, []
            if not names and self._choice not in seen:
                write_json(path, {**seen, self._choice: digests})
        if names:
            first = names[0]
            raise ChangedDataError(
                f"{self._sweep}: trials before this one had {first} ({then.get(first, 'without it')}), and "
                f"here it is {digests.get(first, 'gone')}; put back what was there, or start anew with "
                "fresh=true, or go on with what is here, which the trials before it had otherwise, by "
                "data.allow_changed=true"
            )


def _read_summary(folder: Path) -> dict[str, Any] | None:
    """A trial's summary; None too where it is damaged or being moved aside, which its next worker sees to."""
    with suppress(FolderError):
        return RunFolder(folder).read_summary()
    return None


def _check_own(folder: Path, summary: dict[str, Any], config: dict[str, Any]) -> None:
    """Refuse a trial of another sweep or arm, as far as its summary and a whole config tell."""
    recorded: dict[str, Any] = {"seed": summary.get("seed"), "task.name": summary.get("task")}
    recorded |= {f"echo.{key}": value for key, value in summary.get("echo", {}).items()}
    recorded |= {"adascale.enabled": summary.get("adascale"), **summary.get("hyperparameters", {})}
    try:
        pairs = {key: (theirs, value_at(config, key)) for key, theirs in recorded.items()}
    except ConfigError as error:
        raise FolderError(f"{folder}: a trial of another sweep: {error}") from error
    pairs |= {key: (theirs, config.get(key)) for key, theirs in summary.get("budgets", {}).items()}
    differing = [f"its {key} is {a}, here it is {b}" for key, (a, b) in pairs.items() if a not in (None, b)]
    with suppress(FolderError):
        found = RunFolder(folder).read_config()
        if not differing and found not in (None, config):  # most are equal, which is soon seen
            differing = changes(found, config)
    if differing:
        raise FolderError(
            f"{folder}: a trial of another sweep or arm ({differing[0]}); move it away, or start anew with "
            "fresh=true"
        )


REFUSAL = "refusal.json"


def read_refusal(folder: Path, launch: str) -> str | None:
    """Why a worker of this launch ended, where only the user can mend it."""
    with suppress(FolderError, KeyError):
        refusal = read_json(folder / REFUSAL)
        return str(refusal["error"]) if refusal["launch"] == launch else None
    return None


def record_failure(state: SweepState, trial: TrialId, error: str) -> None:
    """See that a failed trial's summary says so, also where its process died without a word.

    Raises:
        FolderInUseError: another process is at the trial.
    """
    run = RunFolder(state.trial_folder(trial))
    with run.lock():
        summary = run.read_summary() or {"to_target": None, "best": None}
        if summary.get("status") in ENDED:
            return
        if run.read_config() is None:  # a folder with records but no config could not be continued
            arm, point = state.search(trial).arm, (trial.repeat, trial.index)
            config, typed = state.design.trial_config(arm, *point), state.design.trial_overrides(arm, *point)
            run.start(config, typed, environment())
        run.write_summary({**summary, "status": Status.FAILED, "error": error})
