"""Write the report, a Markdown page with the results and figures of all recorded experiments."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from adaecho.records.outcome import EDGE, Row, num_best
from adaecho.records.table import end_of_sweep

Cells = tuple[str, ...]

EXPLANATION = (
    "A cost is read at the first evaluation that meets the target, or at the last of the required number in "
    "a row. The trial with the fewest fresh examples represents its search. Means and ranges are over the "
    "searches that reached the target; with one search per arm, over its trials. The ratio is to the "
    "baseline's fresh examples. Missed, diverged and failed count trials; diverged trials are replaced. "
    "Without a target: means over the runs of an arm at the end of their budgets, and the range of the "
    "metric. The gain is AdaScale's, averaged over steps."
)
_LINKED = {"curves": "training curves", "tuning": "the best trial over those tried"}


def section(
    title: str, rows: list[Row], arms: list[Row], figures: list[Path], commands: list[str], into: Path
) -> str:
    """Return the report's section on one experiment and task, with figures and a table of configurations.

    Args:
        rows: one dict per trial; ``records.outcome`` describes its keys.
        arms: the result of ``records.table.summarize(rows)``.
        into: folder of the report. Links to the figures are relative to it.
    """
    columns = end_of_sweep(rows, arms)
    cells = list(zip(*(column.cells for column in columns), strict=True))
    shown = (Path(os.path.relpath(path, into)).as_posix() for path in figures)
    note = "\n\n".join(filter(None, [unfinished_note(rows), boundary_note(arms)]))
    table = markdown_table(tuple(column.heading for column in columns), cells)
    return laid_out(title, shown, table, note, commands=commands)


def laid_out(title: str, figures: Iterable[str], *parts: str, commands: Sequence[str]) -> str:
    """Return a Markdown section with figures, links to further figures, the given texts, and the commands."""
    made_by = "```\n" + "\n".join(commands) + "\n```" if commands else ""
    kinds = {figure: PurePosixPath(figure).stem.rpartition("_")[2] for figure in figures}
    pictures = [f"![{title}]({figure})" for figure, kind in kinds.items() if kind not in _LINKED]
    links = ", ".join(f"[{_LINKED[kind]}]({figure})" for figure, kind in kinds.items() if kind in _LINKED)
    also = f"Also drawn: {links}." if links else ""
    return "\n\n".join(filter(None, [f"## {title}", *pictures, also, *parts, made_by]))


def unfinished_note(rows: list[Row]) -> str:
    """Return a note that names the searches with unfinished trials; empty if there are none."""
    left = dict.fromkeys(f"{row['arm']}/{row['repeat']}" for row in rows if row.get("trials_left"))
    return f"Incomplete, with trials that had not ended: searches {', '.join(left)}." if left else ""


def boundary_note(arms: list[Row]) -> str:
    """Return a note on best hyperparameters near an end of their range; empty if nothing was searched."""
    searched = [arm for arm in arms if arm.get("at_edge")]
    near = [
        f"{arm['arm']}: {key} in {count} of {num_best(arm)} searches"
        for arm in searched
        for key, count in arm["at_edge"].items()
        if count
    ]
    note = f"Best points in the outermost {100 * EDGE:g}% of an axis: {'; '.join(near) or 'none'}."
    return note if searched else ""


def markdown_report(sections: Sequence[str], before: Sequence[str] = ()) -> str:
    """Return the whole report: the texts in ``before``, an explanation of the tables, then all sections."""
    return "\n\n".join(["# Results", *before, EXPLANATION, *sections]) + "\n"


def markdown_table(headings: Cells, rows: Sequence[Cells]) -> str:
    """Return a Markdown table. The first column is left-aligned, and all others are right-aligned."""
    rule = ("---", *["---:"] * (len(headings) - 1))
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))
