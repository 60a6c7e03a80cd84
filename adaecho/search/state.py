"""Read the state of a sweep from its run folders: which trials are needed, and how each one ended."""

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from adaecho.records.files import read_json
from adaecho.records.folder import RunFolder
from adaecho.records.outcome import cost_to_target, lowest
from adaecho.records.trials import FINISHED, Status
from adaecho.search.design import Arm, Design, TrialId


@dataclass
class Search:
    """One hyperparameter search, which tunes one of the compared configurations (arms)."""

    arm: Arm
    repeat: int  # number of the search among the searches of its arm, from 0
    trials: int  # required number of trials, not counting diverged ones
    max_diverged: int  # maximum number of diverged trials that are replaced
    # the last known summary of each trial that has begun, by trial index
    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)

    def status(self, index: int) -> str | None:
        """Return the status of a trial, or None if it has not begun."""
        return self.summaries.get(index, {}).get("status")

    def wanted(self) -> range:
        """Return the indices of all trials that are needed, including replacements for diverged trials."""
        wanted = counted = 0
        while counted < self.trials and wanted < self.trials + self.max_diverged:
            counted += self.status(wanted) != Status.DIVERGED
            wanted += 1
        return range(wanted)

    def missing(self) -> list[int]:
        """Return the indices of the trials that remain to be run, including failed trials."""
        return [index for index in self.wanted() if self.status(index) not in FINISHED]

    def counted(self) -> set[int]:
        """Return the indices of the needed trials that have finished without diverging."""
        places = (index for index in self.wanted() if self.status(index) != Status.DIVERGED)
        return {index for index in islice(places, self.trials) if self.status(index) in FINISHED}


class SweepState:
    """The state of all searches of a sweep, with the summaries of their trials."""

    def __init__(self, design: Design, folder: Path) -> None:
        self.design, self.folder = design, folder
        self.searches = {
            (arm.name, repeat): Search(
                arm,
                repeat,
                trials=design.trials if arm.axes else 1,
                max_diverged=design.max_diverged if arm.axes else 0,
            )
            for repeat in range(design.repeats)
            for arm in design.arms
        }
        self.refresh()

    def search(self, trial: TrialId) -> Search:
        """Return the search to which a trial belongs."""
        return self.searches[trial.arm, trial.repeat]

    def reread(self, trial: TrialId) -> str | None:
        """Read the summary of a trial again, and return its status, or None if it has not begun."""
        summary = RunFolder(self.folder / str(trial)).read_summary()
        if summary is not None:
            self.search(trial).summaries[trial.index] = summary
        return self.status(trial)

    def refresh(self) -> None:
        """Read the summaries of all trials that had not finished at the last call."""
        for (name, repeat), search in self.searches.items():
            index = 0
            while index < len(search.wanted()):
                if search.status(index) not in FINISHED:
                    self.reread(TrialId(name, repeat, index))
                index += 1

    def status(self, trial: TrialId) -> str | None:
        """Return the last known status of a trial, or None if it has not begun."""
        return self.search(trial).status(trial.index)

    def wanted(self) -> list[TrialId]:
        """Return all trials that the searches need, in the order in which they should run."""
        arms = {arm.name: number for number, arm in enumerate(self.design.arms)}
        trials = [TrialId(*key, index) for key, search in self.searches.items() for index in search.wanted()]
        return sorted(trials, key=lambda trial: (trial.repeat, trial.index, arms[trial.arm]))

    def missing(self) -> list[TrialId]:
        """Return the trials that remain to be run, including failed trials."""
        return [trial for trial in self.wanted() if self.status(trial) not in FINISHED]


def cannot_win(folder: Path, fresh_examples: int) -> bool:
    """Return whether another trial of the same search reached the target with fewer fresh examples."""
    others = folder.resolve().parent.glob("*/summary.json")
    best = lowest(cost_to_target(read_json(path)) for path in others if path.parent.name.isdigit())
    return best is not None and fresh_examples > best
