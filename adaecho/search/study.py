"""The Optuna mirror of a sweep: a journal file for ``optuna.visualization`` and optuna-dashboard.

It is written from the run folders and never read for a decision: removing it loses nothing, and one that is
damaged is set aside and written anew.
"""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from adaecho.records.lock import alone
from adaecho.search.axes import Axis
from adaecho.search.state import FINISHED, Search, SweepState

JOURNAL = "optuna.journal"
_EVERY_S = 60.0


class Mirror:
    """Keeps the mirror of a sweep under way roughly up to date, for a dashboard that is open meanwhile."""

    def __init__(self, state: SweepState) -> None:
        self._state, self._last = state, time.monotonic()

    def update(self) -> None:
        """Mirror, unless it was done within the last minute."""
        if time.monotonic() - self._last >= _EVERY_S:
            mirror(self._state)
            self._last = time.monotonic()


def mirror(state: SweepState) -> None:
    """Bring the studies of a sweep, one per search named ``<arm>/<repeat>``, up to date with its folders.

    The objective is fresh examples to the target, infinite where it was missed; diverged and failed trials
    are Optuna's FAIL. A trial's number is its index, so one is mirrored after all before it. Whatever goes
    wrong is a warning: a mirror can't stop a sweep.
    """
    path = state.folder / JOURNAL
    try:
        with alone(state.folder):
            _bring_up_to_date(state, path)
    except Exception as error:  # of Optuna, of its file, of the disk: none of them matters to the sweep
        print(f"warning: {path}: the Optuna mirror is not up to date: {error}", file=sys.stderr)


def _bring_up_to_date(state: SweepState, path: Path) -> None:
    if _is_torn(path):
        _set_aside(path, "ends in mid-line")
    try:
        is_ours = _mirror(state, path)
    except ValueError as error:  # of the JSON in it
        _set_aside(path, f"can't be read ({error})")
        is_ours = True
        _mirror(state, path)
    if not is_ours:
        path.unlink()
        _mirror(state, path)


def _mirror(state: SweepState, path: Path) -> bool:
    """Add what is new; False if one in it is another trial, e.g. one that was retried: then start anew."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    previous = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        storage = JournalStorage(JournalFileBackend(str(path)))
        for (arm, repeat), search in state.searches.items():
            study = optuna.create_study(
                storage=storage, study_name=f"{arm}/{repeat}", direction="minimize", load_if_exists=True
            )
            mirrored = study.get_trials(deepcopy=False)
            if not all(_is_same(trial, state, search) for trial in mirrored):
                return False
            for index in range(len(mirrored), search.num_wanted()):
                if search.status(index) not in FINISHED | {"failed"}:
                    break
                study.add_trial(_trial(state, search, index))
        return True
    finally:
        optuna.logging.set_verbosity(previous)


def _is_same(mirrored: Any, state: SweepState, search: Search) -> bool:
    with suppress(KeyError):  # a journal that somebody else wrote
        point = state.design.point(search.arm, search.repeat, mirrored.number)
        status = search.status(mirrored.number)
        return bool(mirrored.params == point and mirrored.user_attrs["status"] == status)
    return False


def _trial(state: SweepState, search: Search, index: int) -> Any:
    import optuna

    summary = search.summaries[index]
    failed = summary["status"] in ("diverged", "failed")
    reached = summary.get("to_target")
    value = reached["fresh_examples"] if reached else float("inf")
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE,
        value=None if failed else value,
        params=state.design.point(search.arm, search.repeat, index),
        distributions={axis.key: _distribution(axis) for axis in search.arm.axes},
        user_attrs={"status": summary["status"], "seed": summary.get("seed"), "to_target": reached},
    )


def _distribution(axis: Axis) -> Any:
    """Optuna knows no axis that is logarithmic in 1 - x: such a one is mirrored as linear."""
    from optuna.distributions import FloatDistribution, IntDistribution

    if axis.integer:
        return IntDistribution(round(axis.low), round(axis.high), log=axis.scale == "log")
    return FloatDistribution(axis.low, axis.high, log=axis.scale == "log")


def _is_torn(path: Path) -> bool:
    """Whether a writer was killed in mid-line: Optuna would append to the torn line and lose what follows."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _set_aside(path: Path, why: str) -> None:
    number = 1
    while (damaged := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(damaged)
    print(
        f"warning: {path}: {why}; kept as {damaged.name}, and written anew from the run folders",
        file=sys.stderr,
    )
