"""The Optuna study of a sweep: a journal file for ``optuna.visualization`` and optuna-dashboard.

It is written from the run folders and never read: removing it loses nothing.
"""

import json
from typing import Any

from adaecho.errors import warn
from adaecho.records.files import write_text
from adaecho.records.status import ENDED, Status
from adaecho.search.axes import Axis
from adaecho.search.state import Search, SweepState

JOURNAL = "optuna.journal"


class _Journal:
    """A journal in memory, for Optuna to write: no lock is waited for, and the file appears whole."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.lines += logs

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.lines[log_number_from:]


def export(state: SweepState) -> None:
    """Write the studies of a sweep, one per search named ``<arm>/<repeat>``, as its folders tell.

    The objective is fresh examples to the target, infinite where it was missed; diverged and failed trials
    are Optuna's FAIL. A trial's number is its index, so one is exported after all before it. Whatever goes
    wrong is a warning.
    """
    try:
        text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in _lines(state))
        write_text(state.folder / JOURNAL, text, durable=False)
    except Exception as error:  # of Optuna, of the disk: none of them matters to the sweep
        warn(f"{state.folder / JOURNAL}: the Optuna study is not up to date: {error}")


def _lines(state: SweepState) -> list[dict[str, Any]]:
    import optuna

    journal, previous = _Journal(), optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        storage = optuna.storages.JournalStorage(journal)  # type: ignore[arg-type]
        for (arm, repeat), search in state.searches.items():
            study = optuna.create_study(storage=storage, study_name=f"{arm}/{repeat}", direction="minimize")
            for index in range(search.num_wanted()):
                if search.status(index) not in ENDED:
                    break
                study.add_trial(_trial(state, search, index))
    finally:
        optuna.logging.set_verbosity(previous)
    return journal.lines


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
