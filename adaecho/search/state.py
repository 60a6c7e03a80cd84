"""Where a sweep stands, by its run folders alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from adaecho.records.folder import RunFolder
from adaecho.records.outcome import cost_to_target, lowest
from adaecho.records.trials import FINISHED, Status
from adaecho.search.design import Arm, Design, TrialId


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

    def wanted(self) -> range:
        """The indices that the search needs as far as is known; more as trials diverge."""
        wanted = counted = 0
        while counted < self.trials and wanted < self.trials + self.max_diverged:
            counted += self.status(wanted) != Status.DIVERGED
            wanted += 1
        return range(wanted)

    def missing(self) -> Iterator[int]:
        """Indices that have not ended, in order; failed ones among them."""
        return (index for index in self.wanted() if self.status(index) not in FINISHED)

    def count(self, *statuses: str) -> int:
        """How many of the wanted trials have one of these statuses."""
        return sum(self.status(index) in statuses for index in self.wanted())

    def counted(self) -> set[int]:
        """Indices of the first ``trials`` non-divergent trials; one that has not ended keeps its place."""
        places = (index for index in self.wanted() if self.status(index) != Status.DIVERGED)
        return {index for index in islice(places, self.trials) if self.status(index) in FINISHED}


class SweepState:
    """All searches of a design, with what their folders say."""

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

    def trial_folder(self, trial: TrialId) -> Path:
        """The run folder of a trial."""
        return self.folder / str(trial)

    def search(self, trial: TrialId) -> Search:
        """The search that a trial belongs to."""
        return self.searches[trial.arm, trial.repeat]

    def reread(self, trial: TrialId) -> str | None:
        """Take over what the trial's folder says now; its status, None before it began."""
        summary = RunFolder(self.trial_folder(trial)).read_summary()
        if summary is not None:
            self.search(trial).summaries[trial.index] = summary
        return self.status(trial)

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

    def status(self, trial: TrialId) -> str | None:
        """The status of a trial; None before it began."""
        return self.search(trial).status(trial.index)

    def wanted(self) -> list[TrialId]:
        """Every trial that is needed as far as is known, in the order to run them: so that arms keep pace."""
        arms = {arm.name: number for number, arm in enumerate(self.design.arms)}
        trials = [TrialId(*key, index) for key, search in self.searches.items() for index in search.wanted()]
        return sorted(trials, key=lambda trial: (trial.repeat, trial.index, arms[trial.arm]))

    def missing(self) -> list[TrialId]:
        """What is left to run; failed trials among them."""
        return [trial for trial in self.wanted() if self.status(trial) not in FINISHED]


class Pruner:
    """``search.prune``: asked after each evaluation of the trial in ``folder``; reads its siblings' folders.

    Nothing is shared but the records, so it works between processes and between hosts.
    """

    def __init__(self, folder: Path) -> None:
        self._search = folder.resolve().parent
        self._costs: dict[str, int | None] = {}  # of siblings that have ended

    def __call__(self, fresh_examples: int) -> bool:
        """Whether a sibling has reached the target with fewer fresh examples than this."""
        for path in self._search.iterdir():
            if path.name not in self._costs and path.name.isdigit():
                summary = RunFolder(path).read_summary() or {}
                if summary.get("status") in FINISHED:
                    self._costs[path.name] = cost_to_target(summary)
        best = lowest(self._costs.values())
        return best is not None and fresh_examples > best
