"""State of a sweep, read from its run folders."""

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
    """One quasi-random search: the trials of one arm and repeat.

    It is complete when its first ``trials`` non-divergent trials, by index, have ended. A diverged trial adds
    one more point, up to ``max_diverged`` times. A failed trial adds none.

    Attributes:
        summaries: last known summary of each trial that has begun, by index.
    """

    arm: Arm
    repeat: int
    trials: int
    max_diverged: int
    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)

    def status(self, index: int) -> str | None:
        """Return the status of a trial; None before it begins."""
        return self.summaries.get(index, {}).get("status")

    def wanted(self) -> range:
        """Return the indices that the search needs so far. Diverged trials add more."""
        wanted = counted = 0
        while counted < self.trials and wanted < self.trials + self.max_diverged:
            counted += self.status(wanted) != Status.DIVERGED
            wanted += 1
        return range(wanted)

    def missing(self) -> list[int]:
        """Return the indices that have not ended, including failed ones."""
        return [index for index in self.wanted() if self.status(index) not in FINISHED]

    def counted(self) -> set[int]:
        """Return the indices of the first ``trials`` non-divergent trials, if they have ended."""
        places = (index for index in self.wanted() if self.status(index) != Status.DIVERGED)
        return {index for index in islice(places, self.trials) if self.status(index) in FINISHED}


class SweepState:
    """All searches of a design, with the summaries of their trials."""

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
        """Return the search of a trial."""
        return self.searches[trial.arm, trial.repeat]

    def reread(self, trial: TrialId) -> str | None:
        """Read the summary of a trial again and return its status; None before it begins."""
        summary = RunFolder(self.folder / str(trial)).read_summary()
        if summary is not None:
            self.search(trial).summaries[trial.index] = summary
        return self.status(trial)

    def refresh(self) -> None:
        """Read the summaries of all trials that had not ended.

        A trial that has diverged adds another one, which may have ended, too.
        """
        for (name, repeat), search in self.searches.items():
            index = 0
            while index < len(search.wanted()):
                if search.status(index) not in FINISHED:
                    self.reread(TrialId(name, repeat, index))
                index += 1

    def status(self, trial: TrialId) -> str | None:
        """Return the status of a trial; None before it begins."""
        return self.search(trial).status(trial.index)

    def wanted(self) -> list[TrialId]:
        """Return every trial that is needed so far, in the order to run them, which alternates the arms."""
        arms = {arm.name: number for number, arm in enumerate(self.design.arms)}
        trials = [TrialId(*key, index) for key, search in self.searches.items() for index in search.wanted()]
        return sorted(trials, key=lambda trial: (trial.repeat, trial.index, arms[trial.arm]))

    def missing(self) -> list[TrialId]:
        """Return the trials to run, including failed ones."""
        return [trial for trial in self.wanted() if self.status(trial) not in FINISHED]


def cannot_win(folder: Path, fresh_examples: int) -> bool:
    """Return whether another trial of the search reached the target with fewer fresh examples.

    ``search.prune`` asks after each evaluation. The run folders answer, so it works across hosts.

    Args:
        folder: run folder of the trial.
        fresh_examples: how many the trial has read.
    """
    others = folder.resolve().parent.glob("*/summary.json")
    best = lowest(cost_to_target(read_json(path)) for path in others if path.parent.name.isdigit())
    return best is not None and fresh_examples > best
