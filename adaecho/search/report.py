"""Output of a sweep: a line per ended trial, the table of arms, the outcome files and the Optuna studies.

Everything is read from the run folders.
"""

import json
import re
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from adaecho.config.identity import BUDGETS
from adaecho.errors import UserError, how_to_install, warn
from adaecho.records.collect import best_curves, trial_row
from adaecho.records.files import write_json, write_text
from adaecho.records.outcome import COSTS, EDGE, Row, best_value, num_best, without_target
from adaecho.records.table import as_clock, end_of_sweep, summarize, terminal_table
from adaecho.records.trials import ENDED, FINISHED, Status
from adaecho.search.design import Design, TrialId
from adaecho.search.state import SweepState

JOURNAL = "optuna.journal"
_LOOK_EVERY_S = 0.5
_DIGITS = 4  # of a position on an axis
_FIGURE = "fig3"  # prefix of the figures of a sweep


class Progress:
    """Progress of a sweep. A call reads the run folders and prints a line per trial that has ended."""

    def __init__(self, state: SweepState, console: Console) -> None:
        self._state, self._console = state, console
        self._durations_s: list[float] = []
        self._ended = {trial: status for trial in state.wanted() if (status := state.status(trial)) in ENDED}
        self._next_look = 0.0

    def __call__(self, *, at_once: bool = False) -> int:
        """Return the number of ended trials. Read the folders at most twice a second, or ``at_once``."""
        begin = time.monotonic()
        if begin < self._next_look and not at_once:
            return len(self._ended)
        self._state.refresh()
        trials = self._state.wanted()
        for trial in trials:
            status = self._state.status(trial)
            if status in ENDED and self._ended.get(trial) != status:
                self._ended[trial] = status
                summary = self._state.search(trial).summaries[trial.index]
                seconds = summary.get("train_time_s", 0) + summary.get("eval_time_s", 0)
                self._durations_s.append(seconds)
                done = sum(one in FINISHED for one in self._ended.values())
                line = f"{done}/{len(trials)}  {trial}: {describe(summary)}; {self._time_left()}"
                self._console.print(line, soft_wrap=True, highlight=False)
        # Reading thousands of folders takes at most a twentieth of the time.
        self._next_look = begin + max(_LOOK_EVERY_S, 20 * (time.monotonic() - begin))
        return len(self._ended)

    def _time_left(self) -> str:
        missing = self._state.missing()
        running = sum(self._state.status(trial) == Status.RUNNING for trial in missing)
        left_s = len(missing) * fmean(self._durations_s) / max(running, 1)
        return f"about {as_clock(left_s)} left"


def describe(summary: dict[str, Any]) -> str:
    """Return how a trial ended, in a few words."""
    status, best = str(summary["status"]), summary.get("best")
    if status == Status.REACHED:
        return f"reached after {summary['to_target']['fresh_examples']:,} fresh examples"
    if status == Status.FAILED:
        return f"failed ({summary.get('error', 'no message')})"
    if status in (Status.BUDGET_SPENT, Status.PRUNED):
        if summary.get("target", {}).get("value") is not None:
            status = f"missed the target ({status})"
        return f"{status}, best {best['metric']} {best['value']:.4g}" if best else status
    return status


def headline(state: SweepState) -> list[str]:
    """Return the size of the sweep, and the searched keys."""
    left, arms = len(state.missing()), state.design.arms
    searches = f" x {state.design.repeats} searches" if state.design.repeats > 1 else ""
    over = "" if left else " (restart=true starts over)"
    trials = counted(len(state.wanted()), "trial")
    lines = [f"{state.folder}: {counted(len(arms), 'arm')}{searches}, {trials}, {left} to run{over}"]
    searched = Counter(axis.key for arm in arms for axis in arm.axes)
    keys = [f"{key} (in {counted(n, 'arm')})" if n < len(arms) else key for key, n in searched.items()]
    return [*lines, *([f"searched: {', '.join(keys)}"] if keys else [])]


def counted(number: int, noun: str) -> str:
    """Return ``1 arm`` or ``2 arms``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def write_outcome(state: SweepState, console: Console) -> None:
    """Write ``trials.json``, ``outcome.json``, studies and figures; show the outcome."""
    state.refresh()
    rows = trial_rows(state)
    arms = summarize(rows)
    write_json(state.folder / "trials.json", rows)
    write_json(state.folder / "outcome.json", arms)
    export(state.folder, state.design, rows)
    drawn = draw(state.folder, rows, arms)
    show_outcome(state, console)
    for line in drawn:
        console.print(line, soft_wrap=True, highlight=False)


def show_outcome(state: SweepState, console: Console) -> None:
    """Show the table of arms so far, with a caption and warnings."""
    rows = trial_rows(state)
    arms = summarize(rows)
    console.print()
    console.print(terminal_table(end_of_sweep(rows, arms), console.width))
    notes = [*unfinished(state), *remarks(state), *edge_warnings(state.design, arms)]
    for line in [*(missed(rows, state) or [caption(state, rows, arms)]), *notes]:
        console.print(line, soft_wrap=True, highlight=False)


def trial_rows(state: SweepState) -> list[Row]:
    """Return one row per trial that has begun, in the order of the design."""
    rows = []
    for search in state.searches.values():
        counts, left = search.counted(), sum(1 for _ in search.missing())
        for index, summary in sorted(search.summaries.items()):
            trial = TrialId(search.arm.name, search.repeat, index)
            point = state.design.point(search.arm, search.repeat, index)
            row = trial_row(
                state.design.trial(trial)[0],
                summary,
                experiment=state.design.experiment or "sweep",
                arm=trial.arm,
                repeat=trial.repeat,
                index=index,
                counted=index in counts,
                positions={x.key: round(x.position(point[x.key]), _DIGITS) for x in search.arm.axes},
            )
            rows.append({**row, "hyperparameters": point, **({"trials_left": left} if left else {})})
    return rows


def draw(folder: Path, rows: list[Row], arms: list[Row]) -> list[str]:
    """Draw one figure per task and metric in the folder of the sweep. Return lines that name them."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        of = [row["task"], row["target_metric"], *["ends"] * (row["target_value"] is None)]
        groups.setdefault(re.sub(r"\W", "_", "_".join(of)), []).append(row)
    paths: list[Path] = []
    for name, group in groups.items():
        if without_target(group):
            has_something = any(row["status"] == Status.BUDGET_SPENT for row in group)
        else:
            has_something = any(row["to_target_fresh_examples"] is not None for row in group)
        if not has_something:
            continue
        try:
            from adaecho.figures.tables import draw_table
        except ImportError as error:
            return [f"no figure: {error}; {how_to_install('figures')}"]
        stem, of_arms = (_FIGURE, arms) if len(groups) == 1 else (f"{_FIGURE}_{name}", summarize(group))
        paths += draw_table(group, of_arms, best_curves(group, folder), folder, stem, "png")
    return [f"figure: {path}" for path in paths]


def caption(state: SweepState, rows: list[Row], arms: list[Row]) -> str:
    """Explain the columns of the table."""
    searched = any(search.trials > 1 for search in state.searches.values())
    of = "searches of each arm (the best trial of each search)" if searched else "runs of each arm"
    if without_target(rows):
        return f"At the end of the budgets: mean over the {of}."
    some = any(arm["reached"] < arm["searches"] for arm in arms)
    those = f"{'those that reached it of ' * some}{'the' if unfinished(state) else state.design.repeats} {of}"
    compared = any(arm["ratio_to_baseline"] is not None for arm in arms)
    ratio = "; ratio: geometric means of fresh examples, arm / baseline" if compared else ""
    interval = ", with 95 % interval" if any(arm["ratio_low"] is not None for arm in arms) else ""
    bounds = "; < and > are bounds" if any("ratio_bound" in arm for arm in arms) else ""
    return f"To the target: mean over {those}{ratio}{interval}{bounds}."


def missed(rows: list[Row], state: SweepState) -> list[str]:
    """Return a line if no trial met the target, with the remedy."""
    ended = [row for row in rows if row["status"] in FINISHED and row["target_value"] is not None]
    if not ended or any(row["to_target_fresh_examples"] is not None for row in rows):
        return []
    config, best = state.design.arms[0].config, best_value(ended)
    budgets = {key: config[key] for key in BUDGETS if config.get(key) is not None}
    within = " and ".join(f"{key}={value:g}" for key, value in budgets.items()) or "the runs"
    seen = "" if best is None else f" (best value: {best:.4g})"
    remedy = f"raise {' or '.join(budgets) or 'the budgets'}, or set a target.value that was met"
    if all(row["status"] == Status.DIVERGED for row in ended):
        remedy = "all trials diverged: lower the learning rate, or narrow the axes"
    target = f"{ended[0]['target_metric']} {ended[0]['target_value']:g}"
    return [f"missed: no evaluation met the target, {target}, within {within}{seen}; {remedy}"]


def remarks(state: SweepState) -> list[str]:
    """Return one line per arm with changed data files and per search that cannot be completed."""
    lines = [
        f"arm {arm.name}: the files of the data changed between trials (files_sha256 in summary.json)"
        for arm in state.design.arms
        if len(_files_of_trials(state, arm.name)) > 1
    ]
    for search in state.searches.values():
        says, diverged = f"search {search.arm.name}/{search.repeat} is incomplete:", Status.DIVERGED
        failed = [index for index in search.wanted() if search.status(index) == Status.FAILED]
        if failed:
            traceback = state.folder / search.arm.name / f"{search.repeat}/{failed[0]}/traceback.txt"
            why = f"see {traceback}" if traceback.exists() else search.summaries[failed[0]].get("error")
            lines.append(f"{says} {counted(len(failed), 'trial')} failed; {why}")
        elif search.arm.axes and search.count(diverged) > search.max_diverged:
            lines.append(
                f"{says} {search.count(diverged)} trials diverged, more than search.max_diverged="
                f"{search.max_diverged}; raise it, or narrow the axes"
            )
    return lines


def _files_of_trials(state: SweepState, arm: str) -> set[str]:
    """Return the digests of names and sizes of the data files of an arm's trials."""
    searches = [search for search in state.searches.values() if search.arm.name == arm]
    data = [summary.get("data", {}) for search in searches for summary in search.summaries.values()]
    return {facts["files_sha256"] for facts in data if "files_sha256" in facts}


def unfinished(state: SweepState) -> list[str]:
    """Return a line if trials are left to run."""
    left = sum(state.status(trial) != Status.FAILED for trial in state.missing())
    of = len(state.wanted())
    text = f"incomplete: {left} of {of} trials have not ended; run the same -m command to continue"
    return [text] if left else []


def edge_warnings(design: Design, arms: list[Row]) -> list[str]:
    """Return one line per arm and axis whose best point lies in the outermost 5 %."""
    axes = {arm.name: arm.axes for arm in design.arms}
    return [
        f"warning: {arm['arm']}: in {outer} of {num_best(arm)} searches the best {axis.key} lies in the "
        f"outermost {100 * EDGE:g} % of interval({axis.low:g}, {axis.high:g}); widen the axis"
        for arm in arms
        for axis in axes[arm["arm"]]
        if (outer := arm.get("at_edge", {}).get(axis.key))
    ]


class _Lines:
    """An Optuna journal in memory, so that the file is written at once and without a lock."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.lines += logs

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.lines[log_number_from:]


def export(folder: Path, design: Design, rows: list[Row]) -> None:
    """Write one Optuna study per search, named ``<arm>/<repeat>``, for example for optuna-dashboard.

    The number of a trial is its index. All points are enqueued, and ended trials are told to the study. The
    objective is fresh examples to the target, infinite if the target was missed. Diverged and failed trials
    have the state FAIL. Errors of Optuna or of the disk are warnings.
    """
    import optuna

    try:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = _Lines()
        storage = optuna.storages.JournalStorage(journal)  # type: ignore[arg-type]
        ended = {(row["arm"], row["repeat"], row["index"]): row for row in rows if row["status"] in ENDED}
        for arm in design.arms:
            for repeat in range(design.repeats):
                study = optuna.create_study(storage=storage, study_name=f"{arm.name}/{repeat}")
                indices = [index for name, number, index in ended if (name, number) == (arm.name, repeat)]
                for index in range(max([design.trials * bool(arm.axes) or 1, *(x + 1 for x in indices)])):
                    point = design.point(arm, repeat, index)
                    if row := ended.get((arm.name, repeat, index)):
                        study.add_trial(_optuna_trial(row, point, arm.axes))
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
        distributions={  # Optuna has no axis that is logarithmic in 1 - x, so it is linear there
            x.key: (IntDistribution if x.integer else FloatDistribution)(x.low, x.high, log=x.scale == "log")
            for x in axes
        },
        user_attrs={key: row[key] for key in ("status", "seed", *(f"to_target_{cost}" for cost in COSTS))},
    )
