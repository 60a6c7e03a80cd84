"""``search.prune``: whether a trial has already cost more than its search's best complete one."""

import math
import os
from pathlib import Path

from adaecho.errors import FolderError
from adaecho.records.folder import RunFolder
from adaecho.records.outcome import FINISHED


class Pruner:
    """Asked after each evaluation of the trial in ``folder``; reads the folders of its siblings.

    Nothing is shared but the records, so it works between processes and between hosts.
    """

    def __init__(self, folder: Path) -> None:
        self._search = folder.resolve().parent
        self._ended: set[str] = set()
        self._best = math.inf

    def __call__(self, fresh_examples: int) -> bool:
        """Whether a sibling has reached the target with fewer fresh examples than this."""
        with os.scandir(self._search) as entries:
            siblings = [entry.name for entry in entries if entry.name.isdigit()]
        for name in siblings:
            if name not in self._ended:
                self._look_at(name)
        return fresh_examples > self._best

    def _look_at(self, name: str) -> None:
        try:
            summary = RunFolder(self._search / name).read_summary()
        except FolderError:  # damaged, or being moved aside: the worker that takes that trial sees to it
            return
        if summary is None or summary["status"] not in FINISHED:
            return
        self._ended.add(name)
        if summary["to_target"] is not None:
            self._best = min(self._best, summary["to_target"]["fresh_examples"])
