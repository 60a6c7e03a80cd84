"""The Optuna study of a sweep: a journal file for ``optuna.visualization`` and optuna-dashboard.

It is exported from the run folders and never read for a decision: removing it loses nothing, and one that is
damaged, or of other trials, is deleted and written anew.
"""

import shutil
from pathlib import Path
from typing import Any

from adaecho.errors import warn
from adaecho.records.files import atomic_file
from adaecho.records.status import ENDED, Status
from adaecho.search.axes import Axis
from adaecho.search.state import Search, SweepState

JOURNAL = "optuna.journal"


def export(state: SweepState) -> None:
    """Bring the studies of a sweep, one per search named ``<arm>/<repeat>``, up to date with its folders.

    The objective is fresh examples to the target, infinite where it was missed; diverged and failed trials
    are Optuna's FAIL. A trial's number is its index, so one is exported after all before it.

    A private copy of the journal is extended and then takes its place, so no lock is ever waited for: a
    process that was killed with Optuna's lock in its hands, or a dashboard, can't hold a sweep up. Whatever
    goes wrong is a warning.
    """
    path = state.folder / JOURNAL
    try:
        with atomic_file(path, durable=False) as file:
            private = Path(file.name)  # Optuna opens it by its name
            if not _extend_copy(state, path, private):
                private.write_bytes(b"")
                _add_trials(state, private)
    except Exception as error:  # of Optuna, of its file, of the disk: none of them matters to the sweep
        warn(f"{path}: the Optuna study is not up to date: {error}")


def _extend_copy(state: SweepState, path: Path, private: Path) -> bool:
    """Add what is new to a copy; False where the journal can't be read or is of other trials."""
    try:
        shutil.copyfile(path, private)
        # Optuna would append to a line that was torn by a kill, and lose what follows.
        return private.read_bytes().endswith(b"\n") and _add_trials(state, private)
    except (OSError, ValueError, KeyError):
        return False


def _add_trials(state: SweepState, path: Path) -> bool:
    """Add what is new; False if one in it is another trial, e.g. one that was tried again."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    previous = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=_Unlocked()))  # type: ignore[arg-type]
        for (arm, repeat), search in state.searches.items():
            study = optuna.create_study(
                storage=storage, study_name=f"{arm}/{repeat}", direction="minimize", load_if_exists=True
            )
            exported = study.get_trials(deepcopy=False)
            if not all(_is_same(trial, state, search) for trial in exported):
                return False
            for index in range(len(exported), search.num_wanted()):
                if search.status(index) not in ENDED:
                    break
                study.add_trial(_trial(state, search, index))
        return True
    finally:
        optuna.logging.set_verbosity(previous)


class _Unlocked:
    """The lock of a file that no other process knows."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _is_same(exported: Any, state: SweepState, search: Search) -> bool:
    point = state.design.point(search.arm, search.repeat, exported.number)
    status = search.status(exported.number)
    return bool(exported.params == point and exported.user_attrs.get("status") == status)


def _trial(state: SweepState, search: Search, index: int) -> Any:
    import optuna

    summary = search.summaries[index]
    failed = summary["status"] in (Status.DIVERGED, Status.FAILED)
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
    """Optuna knows no axis that is logarithmic in 1 - x: such a one is exported as linear."""
    from optuna.distributions import FloatDistribution, IntDistribution

    if axis.integer:
        return IntDistribution(round(axis.low), round(axis.high), log=axis.scale == "log")
    return FloatDistribution(axis.low, axis.high, log=axis.scale == "log")
