"""What a sweep tells: a line for each trial that ends, tables, files of the outcome, Optuna's studies.

All of it is read from the run folders, so it does not matter where the trials run.
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
from adaecho.errors import how_to_install, warn
from adaecho.records.collect import best_curves, trial_row
from adaecho.records.files import write_json, write_text
from adaecho.records.outcome import COSTS, EDGE, Row, best_value, num_best, without_target
from adaecho.records.table import as_clock, end_of_sweep, summarize, terminal_table, validation_images
from adaecho.records.trials import ENDED, FINISHED, Status
from adaecho.search.design import Design, TrialId
from adaecho.search.state import SweepState

JOURNAL = "optuna.journal"
_LOOK_EVERY_S = 0.5
_FEW_IMAGES = 1000  # from which on one is less than a tenth of a point
_DIGITS = 4  # of a position on an axis
_FIGURE = "fig3"  # what the names of a sweep's figures begin with


class Progress:
    """Follows a sweep: a call takes over what the folders say, and tells what has ended since."""

    def __init__(self, state: SweepState, console: Console) -> None:
        self._state, self._console = state, console
        self._durations_s: list[float] = []
        self._ended = {trial: status for trial in state.wanted() if (status := state.status(trial)) in ENDED}
        self._next_look = 0.0

    def __call__(self, *, at_once: bool = False) -> int:
        """How many trials have ended; the folders are read about twice a second at most, or ``at_once``."""
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
                told = f"{done}/{len(trials)}  {trial}: {describe(summary)}; {self._time_left()}"
                self._console.print(told, soft_wrap=True, highlight=False)
        # A look at thousands of folders takes a while: it may take a twentieth of the time.
        self._next_look = begin + max(_LOOK_EVERY_S, 20 * (time.monotonic() - begin))
        return len(self._ended)

    def _time_left(self) -> str:
        missing = self._state.missing()
        running = sum(self._state.status(trial) == Status.RUNNING for trial in missing)
        left_s = len(missing) * fmean(self._durations_s) / max(running, 1)
        return f"about {as_clock(left_s)} left"


def describe(summary: dict[str, Any]) -> str:
    """How a trial ended, in a few words."""
    status, best = str(summary["status"]), summary.get("best")
    if status == Status.REACHED:
        return f"reached after {summary['to_target']['fresh_examples']:,} fresh examples"
    if status == Status.FAILED:
        return f"failed ({summary.get('error', 'without a word')})"
    if status in (Status.BUDGET_SPENT, Status.PRUNED):
        if summary.get("target", {}).get("value") is not None:
            status = f"missed the target ({status})"
        return f"{status}, best {best['metric']} {best['value']:.4g}" if best else status
    return status


def headline(state: SweepState) -> list[str]:
    """What the sweep consists of; and which keys each arm searches, if any does."""
    left, arms = len(state.missing()), state.design.arms
    searches = f" x {state.design.repeats} searches" if state.design.repeats > 1 else ""
    anew = "" if left else " (fresh=true starts anew)"
    trials = counted(len(state.wanted()), "trial")
    lines = [f"{state.folder}: {counted(len(arms), 'arm')}{searches}, {trials}, {left} to run{anew}"]
    # What an experiment sets for all arms is drawn all the same where its task searches it.
    searched = Counter(axis.key for arm in arms for axis in arm.axes)
    keys = [f"{key} (in {counted(n, 'arm')})" if n < len(arms) else key for key, n in searched.items()]
    return [*lines, *([f"searched: {', '.join(keys)}"] if keys else [])]


def counted(number: int, noun: str) -> str:
    """``1 arm``, ``2 arms``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def write_outcome(state: SweepState, console: Console) -> None:
    """Write ``trials.json``, ``outcome.json``, studies and figure beside the trials; show the outcome."""
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
    """Show the table of arms as far as trials have ended, what its columns mean, and what to know of it."""
    rows = trial_rows(state)
    arms = summarize(rows)
    console.print()
    console.print(terminal_table(end_of_sweep(rows, arms), console.width))
    notes = [*noise(rows), *unfinished(state), *remarks(state), *edge_warnings(state.design, arms)]
    for line in [*(missed(rows, state) or [caption(state, rows, arms)]), *notes]:
        console.print(line, soft_wrap=True, highlight=False)


def trial_rows(state: SweepState) -> list[Row]:
    """One flat row per trial that has begun, in the order of the design."""
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
    """Draw the sweep beside its trials, a figure for each task and measure; where they are, or why not."""
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
    """What the columns of the table mean."""
    searched = any(search.trials > 1 for search in state.searches.values())
    if without_target(rows):
        of = "searches of each arm, of each its best trial by its best evaluation"
        return f"At the end of the budgets: means over the {of if searched else 'runs of each arm'}."
    compared = any(arm["ratio_to_baseline"] is not None for arm in arms)
    if state.design.repeats == 1:
        of = "; ratio: to the baseline's fresh examples" if compared else ""
        return f"To the target: the best trial of each arm; range: over the arm's trials that reached it{of}."
    of = "searches of the best trial of each" if searched else "runs of each arm"
    number = "the" if unfinished(state) else state.design.repeats
    those = "those that reached it of " if any(arm["reached"] < arm["searches"] for arm in arms) else ""
    bounds = "; < and >: bounds, as some missed" if any("ratio_bound" in arm for arm in arms) else ""
    ratio = "; ratio: of geometric means of fresh examples, to the baseline's" if compared else ""
    interval = ", with its 95 % interval" if any(arm["ratio_low"] is not None for arm in arms) else ""
    return f"To the target: mean over {those}{number} {of}{ratio}{interval}{bounds}."


def noise(rows: list[Row]) -> list[str]:
    """What one held-out image makes of an accuracy, where few are held out."""
    number = validation_images(rows)
    if number is None or number > _FEW_IMAGES or rows[0]["target_metric"] != "accuracy":
        return []
    return [f"{number} held-out images: one is {100 / number:.2g} points; smaller differences are noise."]


def missed(rows: list[Row], state: SweepState) -> list[str]:
    """What it means that no trial met the target, and what to change."""
    ended = [row for row in rows if row["status"] in FINISHED and row["target_value"] is not None]
    if not ended or any(row["to_target_fresh_examples"] is not None for row in rows):
        return []
    config, best = state.design.arms[0].config, best_value(ended)
    budgets = {key: config[key] for key in BUDGETS if config.get(key) is not None}
    within = " and ".join(f"{key}={value:g}" for key, value in budgets.items()) or "the runs"
    seen = "" if best is None else f" (the best was {best:.4g})"
    remedy = f"raise {' or '.join(budgets) or 'the budgets'}, or set a target.value that was met"
    if all(row["status"] == Status.DIVERGED for row in ended):
        remedy = "all diverged: lower the learning rate, or narrow the axes"
    target = f"{ended[0]['target_metric']} {ended[0]['target_value']:g}"
    return [f"missed: no evaluation met the target, {target}, within {within}{seen}; {remedy}"]


def remarks(state: SweepState) -> list[str]:
    """Which searches are incomplete although nothing is left to run, and why."""
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
            lines.append(f"{says} {len(failed)} of its trials failed; {why}")
        elif search.arm.axes and search.count(diverged) > search.max_diverged:
            lines.append(
                f"{says} {search.count(diverged)} trials diverged, and search.max_diverged="
                f"{search.max_diverged} were replaced; raise it, or narrow the axes"
            )
    return lines


def _files_of_trials(state: SweepState, arm: str) -> set[str]:
    """The digests of the names and sizes of data files in the summaries of an arm."""
    searches = [search for search in state.searches.values() if search.arm.name == arm]
    data = [summary.get("data", {}) for search in searches for summary in search.summaries.values()]
    return {facts["files_sha256"] for facts in data if "files_sha256" in facts}


def unfinished(state: SweepState) -> list[str]:
    """A line that says so where trials are still to run."""
    left = sum(state.status(trial) != Status.FAILED for trial in state.missing())
    of = len(state.wanted())
    text = f"incomplete: {left} of {of} trials have not ended; the same -m command finishes them"
    return [text] if left else []


def edge_warnings(design: Design, arms: list[Row]) -> list[str]:
    """One line per arm and axis on whose outermost 5 % a best point lies: the range may be too narrow."""
    axes = {arm.name: arm.axes for arm in design.arms}
    return [
        f"warning: {arm['arm']}: the best {axis.key} of {outer} of {num_best(arm)} searches lies in the "
        f"outermost {100 * EDGE:g} % of interval({axis.low:g}, {axis.high:g}); widen the axis"
        for arm in arms
        for axis in axes[arm["arm"]]
        if (outer := arm.get("at_edge", {}).get(axis.key))
    ]


class _Lines:
    """A journal in memory, for Optuna to write: no lock is waited for, and the file appears whole."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.lines += logs

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.lines[log_number_from:]


def export(folder: Path, design: Design, rows: list[Row]) -> None:
    """Write the sweep as Optuna studies, a search each, named ``<arm>/<repeat>``: for optuna-dashboard.

    A trial's number is its index; those that have not ended wait, with their points. The objective is fresh
    examples to the target, infinite where it was missed; diverged and failed trials are Optuna's FAIL.
    Whatever goes wrong is a warning.
    """
    try:
        import optuna

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
    except Exception as error:  # of Optuna, of the disk: none of them matters to the sweep
        warn(f"{folder / JOURNAL}: the Optuna study is not up to date: {error}")


def _optuna_trial(row: Row, point: dict[str, Any], axes: Any) -> Any:
    from optuna.distributions import FloatDistribution, IntDistribution
    from optuna.trial import TrialState, create_trial

    failed, value = row["status"] in (Status.DIVERGED, Status.FAILED), row["to_target_fresh_examples"]
    return create_trial(
        state=TrialState.FAIL if failed else TrialState.COMPLETE,
        value=None if failed else float("inf") if value is None else value,
        params=point,
        distributions={  # Optuna knows no axis that is logarithmic in 1 - x: such a one is linear
            x.key: (IntDistribution if x.integer else FloatDistribution)(x.low, x.high, log=x.scale == "log")
            for x in axes
        },
        user_attrs={key: row[key] for key in ("status", "seed", *(f"to_target_{cost}" for cost in COSTS))},
    )
