"""The end of a sweep: its rows, its outcome per arm, the terminal's table, the figure, Optuna's study."""

import json
import re
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from adaecho.config.identity import BUDGETS
from adaecho.errors import how_to_install, warn
from adaecho.records.collect import best_curves, trial_row
from adaecho.records.files import remove_leftovers, write_json, write_text
from adaecho.records.lock import alone
from adaecho.records.outcome import COSTS, EDGE, Row, best_value, num_best, without_target
from adaecho.records.status import ENDED, FINISHED, Status
from adaecho.records.table import end_of_sweep, summarize, validation_images
from adaecho.records.terminal import terminal_table
from adaecho.search.axes import Axis
from adaecho.search.design import Arm, Design, TrialId
from adaecho.search.state import Search, SweepState

_FEW_IMAGES = 1000  # from which on one is less than a tenth of a point
_DIGITS = 4  # of a position on an axis
_FIGURE = "fig3"  # what the names of a sweep's figures begin with


def write_outcome(state: SweepState, console: Console) -> None:
    """Write ``trials.json``, ``outcome.json`` and the Optuna study beside the trials; show the outcome."""
    with alone(state.folder):  # a collect beside the end of its sweep: the last to write has the latest view
        state.refresh()
        rows = trial_rows(state)
        arms = summarize(rows)
        for name in ("trials.json", "outcome.json", JOURNAL, f"{_FIGURE}*"):
            remove_leftovers(state.folder, name)
        for name, records in (("trials.json", rows), ("outcome.json", arms)):
            write_json(state.folder / name, records)
        export(state.folder, state.design, rows)
        drawn = draw(state.folder, rows, arms)
    console.print()
    console.print(terminal_table(end_of_sweep(rows, arms), console.width))
    notes = [*noise(rows), *unfinished(state), *remarks(state)]
    notes += edge_warnings(state.design, arms)
    about = missed(rows, state) or [caption(state, rows, arms)]
    for line in [*about, *notes, *drawn]:
        console.print(line, soft_wrap=True, highlight=False)


def draw(folder: Path, rows: list[Row], arms: list[Row]) -> list[str]:
    """Draw the sweep beside its trials; where the figures are, or why there are none."""
    alike = _of_one_measure(rows)
    drawn = {
        name: group
        for name, group in alike.items()
        if any(row["to_target_fresh_examples"] is not None for row in group)
        or (without_target(group) and any(row["status"] == Status.BUDGET_SPENT for row in group))
    }
    if not drawn:
        return []
    try:
        from adaecho.figures.tables import draw_table
    except ImportError as error:
        return [f"no figure: {error}; {how_to_install('figures')}"]
    paths: list[Path] = []
    for name, group in drawn.items():
        stem, of = (_FIGURE, arms) if len(alike) == 1 else (f"{_FIGURE}_{name}", summarize(group))
        paths += draw_table(group, of, best_curves(group, folder), folder, stem, "png")
    return [f"figure: {path}" for path in paths]


def _of_one_measure(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows that one figure can hold, by task, metric and whether there is a target."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        told = row["task"], row["target_metric"], *["ends"] * (row["target_value"] is None)
        groups.setdefault("_".join(re.sub(r"\W", "_", name) for name in told), []).append(row)
    return groups


def trial_rows(state: SweepState) -> list[Row]:
    """One flat row per trial that has begun, in the order of the design."""
    return [
        _row(state.design, search, index)
        for search in state.searches.values()
        for index in sorted(search.summaries)
    ]


def _row(design: Design, search: Search, index: int) -> Row:
    point = design.point(search.arm, search.repeat, index)
    config = design.trial_config(search.arm, search.repeat, index)
    positions = {axis.key: round(axis.position(point[axis.key]), _DIGITS) for axis in search.arm.axes}
    row = trial_row(
        config,
        search.summaries[index],
        experiment=design.experiment or "sweep",
        arm=search.arm.name,
        repeat=search.repeat,
        index=index,
        counted=index in search.counted(),
        positions=positions,
    )
    left = sum(1 for _ in search.missing())
    return {**row, "hyperparameters": point, **({"trials_left": left} if left else {})}


def caption(state: SweepState, rows: list[Row], arms: list[Row]) -> str:
    """What the columns of the table mean."""
    searched = any(search.trials > 1 for search in state.searches.values())
    if without_target(rows):
        of = "searches of each arm, of each its best trial by its best evaluation"
        return f"At the end of the budgets: means over the {of if searched else 'runs of each arm'}."
    compared = any(arm["ratio_to_baseline"] is not None for arm in arms)
    if state.design.repeats > 1:
        of = "searches of the best trial of each" if searched else "runs of each arm"
        number = "the" if unfinished(state) else state.design.repeats
        those = "those that reached it of " if any(arm["reached"] < arm["searches"] for arm in arms) else ""
        bounds = "; < and >: bounds, as some missed" if any("ratio_bound" in arm for arm in arms) else ""
        ratio = "; ratio: of geometric means of fresh examples, to the baseline's" if compared else ""
        interval = ", with its 95 % interval" if any(arm["ratio_low"] is not None for arm in arms) else ""
        return f"To the target: mean over {those}{number} {of}{ratio}{interval}{bounds}."
    of = "; ratio: to the baseline's fresh examples" if compared else ""
    return f"To the target: the best trial of each arm; range: over the arm's trials that reached it{of}."


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
    target = ended[0]["target_metric"], ended[0]["target_value"]
    best = best_value(ended)
    config = state.design.arms[0].config
    budgets = {key: config[key] for key in BUDGETS if config.get(key) is not None}
    spent = " and ".join(f"{key}={value:g}" for key, value in budgets.items())
    seen = "" if best is None else f" (the best was {best:.4g})"
    remedy = f"raise {' or '.join(budgets) or 'the budgets'}, or set a target.value that was met"
    if all(row["status"] == Status.DIVERGED for row in ended):
        remedy = "all diverged: lower the learning rate, or narrow the axes"
    return [
        f"missed: no evaluation met the target, {target[0]} {target[1]:g}, within "
        f"{spent or 'the runs'}{seen}; {remedy}"
    ]


def remarks(state: SweepState) -> list[str]:
    """What a reader of the table must know: searches that are incomplete, and why."""
    lines = []
    for search in state.searches.values():
        if search.is_complete():
            continue
        name = f"{search.arm.name}/{search.repeat}"
        failed = [index for index in search.missing() if search.status(index) == Status.FAILED]
        if failed:
            trial = TrialId(search.arm.name, search.repeat, failed[0])
            traceback = state.trial_folder(trial) / "traceback.txt"
            why = f"see {traceback}" if traceback.exists() else search.summaries[failed[0]].get("error")
            lines.append(f"search {name} is incomplete: {len(failed)} of its trials failed; {why}")
        elif search.arm.axes and search.count(Status.DIVERGED) > search.max_diverged:
            lines.append(
                f"search {name} is incomplete: {search.count('diverged')} trials diverged, and "
                f"search.max_diverged={search.max_diverged} were replaced; raise it, or narrow the axes"
            )
    return lines


def unfinished(state: SweepState) -> list[str]:
    """A line that says so where trials are still to run."""
    searches = state.searches.values()
    open_trials = len(state.missing()) - sum(search.count(Status.FAILED) for search in searches)
    if not open_trials:
        return []
    total = sum(search.num_wanted() for search in searches)
    return [f"incomplete: {open_trials} of {total} trials have not ended; the same -m command finishes them"]


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


JOURNAL = "optuna.journal"


class _Journal:
    """A journal in memory, for Optuna to write: no lock is waited for, and the file appears whole."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.lines += logs

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.lines[log_number_from:]


def export(folder: Path, design: Design, rows: list[Row]) -> None:
    """Write the studies of a sweep, one per search named ``<arm>/<repeat>``, as its rows tell.

    The objective is fresh examples to the target, infinite where it was missed; diverged and failed trials
    are Optuna's FAIL. A trial's number is its index, so one is exported after all before it. Whatever goes
    wrong is a warning.
    """
    try:
        text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in _lines(design, rows))
        write_text(folder / JOURNAL, text, durable=False)
    except Exception as error:  # of Optuna, of the disk: none of them matters to the sweep
        warn(f"{folder / JOURNAL}: the Optuna study is not up to date: {error}")


def _lines(design: Design, rows: list[Row]) -> list[dict[str, Any]]:
    import optuna

    journal, previous = _Journal(), optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    by_index = {(row["arm"], row["repeat"], row["index"]): row for row in rows if row["status"] in ENDED}
    try:
        storage = optuna.storages.JournalStorage(journal)  # type: ignore[arg-type]
        for arm, repeat in design.searches():
            study = optuna.create_study(
                storage=storage, study_name=f"{arm.name}/{repeat}", direction="minimize"
            )
            for index in count():
                if (row := by_index.get((arm.name, repeat, index))) is None:
                    break
                study.add_trial(_trial(arm, row))
    finally:
        optuna.logging.set_verbosity(previous)
    return journal.lines


def _trial(arm: Arm, row: Row) -> Any:
    import optuna

    failed, value = row["status"] in (Status.DIVERGED, Status.FAILED), row["to_target_fresh_examples"]
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE,
        value=None if failed else float("inf") if value is None else value,
        params=row["hyperparameters"],
        distributions={axis.key: _distribution(axis) for axis in arm.axes},
        user_attrs={key: row[key] for key in ("status", "seed", *(f"to_target_{cost}" for cost in COSTS))},
    )


def _distribution(axis: Axis) -> Any:
    """Optuna knows no axis that is logarithmic in 1 - x: such a one is exported as linear."""
    from optuna.distributions import FloatDistribution, IntDistribution

    if axis.integer:
        return IntDistribution(round(axis.low), round(axis.high), log=axis.scale == "log")
    return FloatDistribution(axis.low, axis.high, log=axis.scale == "log")
