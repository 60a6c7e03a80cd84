"""Report the progress and the results of a sweep, based on its run folders.

``Progress`` prints a line for each trial that has ended. ``write_outcome`` prints a table of the compared
configurations, and writes results, figures and Optuna studies.
"""

import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from adaecho.errors import UserError, how_to_install, print_line, warn
from adaecho.records.collect import best_curves, trial_row
from adaecho.records.files import write_json, write_text
from adaecho.records.outcome import COSTS, EDGE, Row, best_trials, best_value, num_best, without_target
from adaecho.records.table import as_clock, end_of_sweep, summarize, terminal_table
from adaecho.records.trials import ENDED, FINISHED, Status
from adaecho.search.design import Design, TrialId
from adaecho.search.state import SweepState

JOURNAL = "optuna.journal"
_DIGITS = 4  # number of decimal places of a position on an axis
_FIGURE = "fig3"  # prefix of the names of a sweep's figures
_AT_END = "Means over the best trials of an arm's searches, at the end of the budgets."
_TO_TARGET = (
    "Means over the searches of an arm that reached the target.\n"
    "ratio: geometric mean of arm / baseline, with 95% interval; < and > are bounds."
)


class Progress:
    """A callable that prints one line for each trial of a sweep that has ended since the last call."""

    def __init__(self, state: SweepState) -> None:
        self._state = state
        self._begin, self._num_new = time.monotonic(), 0
        self._ended = {trial: status for trial in state.wanted() if (status := state.status(trial)) in ENDED}

    def __call__(self) -> int:
        """Print the progress, and return the number of trials that have ended."""
        self._state.refresh()
        trials = self._state.wanted()
        for trial in trials:
            status = self._state.status(trial)
            if status in ENDED and self._ended.get(trial) != status:
                self._ended[trial] = status
                summary = self._state.search(trial).summaries[trial.index]
                self._num_new += 1
                left_s = (time.monotonic() - self._begin) / self._num_new * len(self._state.missing())
                done = sum(one in FINISHED for one in self._ended.values())
                line = f"{done}/{len(trials)}  {trial}: {describe(summary)}; {as_clock(left_s)} left"
                print_line(line)
        return len(self._ended)


def describe(summary: dict[str, Any]) -> str:
    """Describe in a few words how a trial ended, given its summary."""
    status, best = str(summary["status"]), summary.get("best")
    if status == Status.REACHED:
        return f"reached after {summary['to_target']['fresh_examples']:,} fresh examples"
    if status == Status.FAILED:
        return f"failed ({summary.get('error', 'no message')})"
    return f"{status}, best {best['metric']} {best['value']:.4g}" if best else status


def headline(state: SweepState) -> list[str]:
    """Return lines that state the size of a sweep and the keys that it searches."""
    left, arms = len(state.missing()), state.design.arms
    searches = f" x {state.design.repeats} searches" if state.design.repeats > 1 else ""
    trials = counted(len(state.wanted()), "trial")
    lines = [f"{state.folder}: {counted(len(arms), 'arm')}{searches}, {trials}, {left} to run"]
    searched = dict.fromkeys(axis.key for arm in arms for axis in arm.axes)
    return [*lines, f"searched: {', '.join(searched)}"] if searched else lines


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 arm`` or ``2 arms``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def write_outcome(state: SweepState) -> None:
    """Print the results of a sweep, and write tables, Optuna studies and figures to its folder."""
    state.refresh()
    rows, arms = show_outcome(state)
    write_json(state.folder / "trials.json", rows)
    write_json(state.folder / "outcome.json", arms)
    export(state.folder, state.design, rows)
    for line in draw(state.folder, rows):
        print_line(line)


def show_outcome(state: SweepState) -> tuple[list[Row], list[Row]]:
    """Print the results of a sweep, which may still be running.

    Returns:
        One row for each trial that has begun, and one dict for each compared configuration.
    """
    rows = trial_rows(state)
    arms = summarize(rows)
    print_line("")
    Console().print(terminal_table(end_of_sweep(rows, arms)))
    explanation = missed(rows) or [_AT_END if without_target(rows) else _TO_TARGET]
    edges = edge_warnings(state.design, arms)
    print_line("\n".join([*explanation, *unfinished(state), *remarks(state), *edges]))
    return rows, arms


def trial_rows(state: SweepState) -> list[Row]:
    """Return one row for each trial that has begun (see ``records.outcome``)."""
    rows = []
    for search in state.searches.values():
        counts, left = search.counted(), len(search.missing())
        for index, summary in sorted(search.summaries.items()):
            trial = TrialId(search.arm.name, search.repeat, index)
            point = state.design.point(search.arm, search.repeat, index)
            row = trial_row(
                state.design.trial(trial)[0],
                summary,
                experiment=state.design.experiment or "sweep",
                **asdict(trial),
                counted=index in counts,
                positions={x.key: round(x.position(point[x.key]), _DIGITS) for x in search.arm.axes},
            )
            rows.append({**row, "hyperparameters": point, **({"trials_left": left} if left else {})})
    return rows


def draw(folder: Path, rows: list[Row]) -> list[str]:
    """Draw one figure for each task and metric, and return messages with their paths."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        of = [row["task"], row["target_metric"], *["ends"] * (row["target_value"] is None)]
        groups.setdefault(re.sub(r"\W", "_", "_".join(of)), []).append(row)
    paths: list[Path] = []
    for name, group in groups.items():
        if not best_trials(group):
            continue
        try:
            from adaecho.figures.tables import draw_table
        except ImportError as error:
            return [f"no figure: {error}; {how_to_install('figures')}"]
        stem = _FIGURE if len(groups) == 1 else f"{_FIGURE}_{name}"
        paths += draw_table(group, summarize(group), best_curves(group, folder), folder, stem, "png")
    return [f"figure: {path}" for path in paths]


def missed(rows: list[Row]) -> list[str]:
    """Explain what to do if trials have ended but none reached the target."""
    ended = [row for row in rows if row["status"] in FINISHED and row["target_value"] is not None]
    if not ended or any(row["to_target_fresh_examples"] is not None for row in rows):
        return []
    best = best_value(ended)
    found = "" if best is None else f" (best value: {best:.4g})"
    remedy = "raise the budgets (max_fresh_examples, max_steps), or lower the target"
    if all(row["status"] == Status.DIVERGED for row in ended):
        remedy = "all trials diverged: lower the learning rate, or narrow the axes"
    target = f"{ended[0]['target_metric']} {ended[0]['target_value']:g}"
    return [f"missed: no evaluation met the target, {target}{found}; {remedy}"]


def remarks(state: SweepState) -> list[str]:
    """Return one message for each problem that makes the results incomplete or incomparable."""
    lines = []
    files: dict[str, set[str]] = {arm.name: set() for arm in state.design.arms}  # digests of their names
    for search in state.searches.values():
        data = [summary.get("data", {}) for summary in search.summaries.values()]
        files[search.arm.name] |= {facts["files_sha256"] for facts in data if "files_sha256" in facts}
        says = f"search {search.arm.name}/{search.repeat} is incomplete:"
        diverged = sum(search.status(index) == Status.DIVERGED for index in search.wanted())
        failed = [index for index in search.wanted() if search.status(index) == Status.FAILED]
        if failed:
            traceback = state.folder / search.arm.name / f"{search.repeat}/{failed[0]}/traceback.txt"
            why = f"see {traceback}" if traceback.exists() else search.summaries[failed[0]].get("error")
            lines.append(f"{says} {counted(len(failed), 'trial')} failed; {why}")
        elif search.arm.axes and diverged > search.max_diverged:
            lines.append(
                f"{says} {diverged} trials diverged, more than search.max_diverged="
                f"{search.max_diverged}; raise it, or narrow the axes"
            )
    changed = "the files of the data changed between trials (files_sha256 in summary.json)"
    return [*(f"arm {arm}: {changed}" for arm, digests in files.items() if len(digests) > 1), *lines]


def unfinished(state: SweepState) -> list[str]:
    """Return a message with the number of trials that remain to be run, or an empty list."""
    left = sum(state.status(trial) != Status.FAILED for trial in state.missing())
    line = f"incomplete: {counted(left, 'trial')} left; run the same -m command to continue"
    return [line] if left else []


def edge_warnings(design: Design, arms: list[Row]) -> list[str]:
    """Return a warning for each hyperparameter whose best value lies near an end of its range."""
    axes = {arm.name: arm.axes for arm in design.arms}
    return [
        f"warning: {arm['arm']}: in {outer} of {num_best(arm)} searches the best {axis.key} lies in the "
        f"outermost {100 * EDGE:g}% of interval({axis.low:g}, {axis.high:g}); widen the axis"
        for arm in arms
        for axis in axes[arm["arm"]]
        if (outer := arm.get("at_edge", {}).get(axis.key))
    ]


class _Lines:
    """An Optuna journal in memory, so that the whole journal can be written to a file at once."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.lines += logs

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.lines[log_number_from:]


def export(folder: Path, design: Design, rows: list[Row]) -> None:
    """Export each search as an Optuna study, for tools such as optuna-dashboard.

    The objective is the number of fresh examples to the target, or infinity if the target was missed.
    """
    import optuna

    try:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = _Lines()
        storage = optuna.storages.JournalStorage(journal)  # type: ignore[arg-type]
        ended = [row for row in rows if row["status"] in ENDED]
        for arm in design.arms:
            for repeat in range(design.repeats):
                study = optuna.create_study(storage=storage, study_name=f"{arm.name}/{repeat}")
                ours = {x["index"]: x for x in ended if (x["arm"], x["repeat"]) == (arm.name, repeat)}
                for index in range(max([design.trials if arm.axes else 1, *(x + 1 for x in ours)])):
                    point = design.point(arm, repeat, index)
                    if index in ours:
                        study.add_trial(_optuna_trial(ours[index], point, arm.axes))
                    else:
                        study.enqueue_trial(point)
        text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in journal.lines)
        write_text(folder / JOURNAL, text)
    except (optuna.exceptions.OptunaError, UserError, OSError) as error:
        warn(f"{folder / JOURNAL}: the Optuna study is not up to date: {error}")


def _optuna_trial(row: Row, point: dict[str, Any], axes: Any) -> Any:
    from optuna.distributions import FloatDistribution, IntDistribution
    from optuna.trial import TrialState, create_trial

    failed, value = row["status"] in (Status.DIVERGED, Status.FAILED), row["to_target_fresh_examples"]
    return create_trial(
        state=TrialState.FAIL if failed else TrialState.COMPLETE,
        value=None if failed else float("inf") if value is None else value,
        params=point,
        distributions={  # Optuna has no reverse_log scale, so such an axis is exported as linear
            x.key: (IntDistribution if x.integer else FloatDistribution)(x.low, x.high, log=x.scale == "log")
            for x in axes
        },
        user_attrs={key: row[key] for key in ("status", "seed", *(f"to_target_{cost}" for cost in COSTS))},
    )
