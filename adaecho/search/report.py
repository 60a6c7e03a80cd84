"""The end of a sweep: its rows, its outcome per arm, the table on the terminal and the figure."""

import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

from adaecho.errors import how_to_install
from adaecho.records.collect import trial_row
from adaecho.records.files import write_json
from adaecho.records.lock import alone
from adaecho.records.outcome import EDGE, Row, num_best, without_target
from adaecho.records.status import Status
from adaecho.records.table import NARROW, TERMINAL, Column, end_of_sweep, summarize
from adaecho.search.design import Design, TrialId
from adaecho.search.optuna_export import export
from adaecho.search.state import Search, SweepState

_DIGITS = 4  # of a position on an axis
NARROW_WIDTH = 76  # columns of a terminal below which a table keeps to its main figures


def write_outcome(state: SweepState, console: Console) -> None:
    """Write ``trials.json``, ``outcome.json`` and the Optuna study beside the trials; show the outcome."""
    with alone(state.folder):  # a collect beside the end of its sweep: the last to write has the latest view
        state.refresh()
        rows = trial_rows(state)
        arms = summarize(rows)
        write_json(state.folder / "trials.json", rows)
        write_json(state.folder / "outcome.json", arms)
    export(state)
    console.print()
    console.print(terminal_table(end_of_sweep(rows, arms), console.width))
    notes = [*unfinished(state), *remarks(state), *edge_warnings(state.design, arms)]
    for line in [caption(state, rows), *notes, *draw(state.folder, rows, arms)]:
        console.print(line, soft_wrap=True, highlight=False)


def draw(folder: Path, rows: list[Row], arms: list[Row]) -> list[str]:
    """Draw the sweep beside its trials; where the figures are, or why there are none."""
    nothing_reached = all(row["to_target_fresh_examples"] is None for row in rows)
    if nothing_reached and not without_target(rows):
        return []
    try:
        from adaecho.figures.tables import draw_sweep
    except ImportError as error:
        return [f"no figure: {error}; {how_to_install('figures')}"]
    return [f"figure: {path}" for path in draw_sweep(folder, rows, arms)]


def trial_rows(state: SweepState) -> list[Row]:
    """One flat row per trial that has begun, in the order of the design."""
    return [
        _row(state.design, search, index)
        for search in state.searches.values()
        for index in sorted(search.summaries)
    ]


def _row(design: Design, search: Search, index: int) -> Row:
    point = design.point(search.arm, search.repeat, index)
    positions = {axis.key: round(axis.position(point[axis.key]), _DIGITS) for axis in search.arm.axes}
    row = trial_row(
        design.trial_config(search.arm, search.repeat, index),
        search.summaries[index],
        experiment=design.experiment or "sweep",
        arm=search.arm.name,
        repeat=search.repeat,
        index=index,
        counted=index in search.counted(),
        positions=positions,
    )
    return {**row, "hyperparameters": point}


def terminal_table(columns: list[Column], width: int) -> Table:
    """The columns for which a terminal of this width has room.

    A count that is 0 in every arm gives its room to the arms' names, unless it is one of the main figures.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    most = NARROW if width < NARROW_WIDTH else TERMINAL
    shown = [
        column
        for column in columns
        if column.medium == NARROW or (column.medium <= most and set(column.cells) != {"0"})
    ]
    table.add_column(shown[0].heading, overflow="fold", min_width=12)
    for column in shown[1:]:
        heading = re.sub(r" (?!%)", "\n", column.heading)  # a number stays beside its unit
        table.add_column(heading, justify="right", no_wrap=True)
    for cells in zip(*(column.cells for column in shown), strict=True):
        table.add_row(cells[0], *("-" if cell == "0" else cell.replace(" to ", "-") for cell in cells[1:]))
    return table


def caption(state: SweepState, rows: list[Row]) -> str:
    """What the columns of the table mean."""
    if without_target(rows):
        return "At the end of the budgets: means over the runs of each arm."
    if state.design.repeats > 1:
        searched = any(search.trials > 1 for search in state.searches.values())
        of = "searches of the best trial of each" if searched else "runs of each arm"
        return (
            f"To the target: mean over {state.design.repeats} {of}; ratio: of geometric means of fresh "
            "examples, to the baseline's, with its 95 % interval."
        )
    return (
        "To the target: the best trial of each arm; range: over the arm's trials that reached it; "
        "ratio: to the baseline's fresh examples."
    )


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
